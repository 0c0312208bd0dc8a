"""Whole GPT runs with fused all-reduce and parameter servers: the numbers of one rank, and checkpoints that move."""

from pathlib import Path
from typing import Any

import pytest

from megalite.parity.trajectory import rank_trajectory
from tests.parity.factors import FAMILIES, world_of
from tests.parity.reference import STEPS, TOLERANCE, reference
from tests.support.ranks import RankContext, run_ranks
from tests.support.same import require_same
from tests.support.state import continued, hashed, hashes, save_run
from tests.support.tiny import Runner, build, tiny_config, whole

Settings = dict[str, Any]

# The network has some 60 thousand parameters: several pieces and chunks of most buckets.
STRATEGIES: dict[str, Settings] = {
    "fused": {"dp_strategy": "fused-all-reduce", "fusion_threshold_mb": 0.02},
    "server": {"dp_strategy": "parameter-server", "server_chunk_mb": 0.01},
    "sharded": {"dp_strategy": "sharded-parameter-server", "server_chunk_mb": 0.004},
}
LAYOUTS: dict[str, Settings] = {
    # The tied embedding waits for its other copy, and a split backward arms with what is pending.
    "pp2-dp2": {**FAMILIES["gpt"], "pp": 2, "dp": 2, "pipeline_schedule": "zb-h1"},
    # Experts have groups, and servers, of their own.
    "ep2-dp4": {**FAMILIES["mixtral"], "ep": 2, "dp": 4, "num_layers": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_of_one_rank(layout: str) -> None:
    """The other two are in the covering set of tests/parity."""
    settings = {**LAYOUTS[layout], **STRATEGIES["server"]}
    world = world_of(settings)
    ours = whole(run_ranks(world, rank_trajectory, tiny_config(world, **settings), STEPS))
    require_same(ours, reference(LAYOUTS[layout]), TOLERANCE)


@pytest.mark.parametrize("name", ["all-reduce", "sharded"])
def test_sums_beside_the_program_do_not_meet_what_layers_exchange(name: str) -> None:
    """Here the ranks with the same experts are those of tensor parallelism, which layers use in the last backward."""
    layout = {**FAMILIES["mixtral"], "tp": 2, "etp": 1, "num_layers": 2}
    settings = {**layout, **STRATEGIES.get(name, {}), "reduction_order": "rank"}
    ours = whole(run_ranks(2, rank_trajectory, tiny_config(2, **settings), STEPS, timeout=60.0))
    require_same(ours, reference(layout), TOLERANCE)


SAVED_BY: dict[str, Settings] = {"all-reduce": {"dp_strategy": "all-reduce"}, **STRATEGIES}


def weights(runner: Runner) -> dict[str, str]:
    """Of each tensor on this rank, as hashes: the buckets that they lie in do not matter."""
    runner.replica.strategy.wait_for_parameters()
    return {
        placed.parameter.info.spec.name: hashed(shard.bucket.data[placed.start : placed.stop])
        for shard in runner.replica.strategy.shards
        for placed in shard.bucket.placed
    }


def resumed(context: RankContext, folder: str) -> dict[str, Any]:
    """By strategy: a step and a checkpoint and one more; then each way to continue from each checkpoint."""
    common = {"dp": 2, "precision": "bf16", "reduction_order": "rank", "clip_grad": 0.1, "num_layers": 2}
    found: dict[str, Any] = {"on": {}, "same": {}, "crossed": {}}
    for name, settings in SAVED_BY.items():
        runner = Runner(build(context, tiny_config(2, **common, **settings)))
        runner.step()
        save_run(runner, Path(folder, name))
        runner.step()
        found["on"][name] = hashes(runner.replica), weights(runner)
        runner.replica.strategy.close()
    for saved in SAVED_BY:
        for name, settings in SAVED_BY.items():
            if (name == "all-reduce") == (saved == "all-reduce") and (name != saved or name == "all-reduce"):
                continue
            path = str(Path(folder, saved))
            runner = continued(context, tiny_config(2, **common, **settings, load=path), path)
            runner.step()
            if name == saved:
                found["same"][name] = hashes(runner.replica)
            else:
                found["crossed"][saved, name] = weights(runner)
            runner.replica.strategy.close()
    return found


def test_resume_goes_on_to_the_bit_also_from_and_to_all_reduce(tmp_path: Path) -> None:
    for found in run_ranks(2, resumed, str(tmp_path)):
        straight = [of_weights for _, of_weights in found["on"].values()]
        assert all(one == straight[0] for one in straight), "strategies differ without any checkpoint"
        assert len(found["same"]) == 3 and len(found["crossed"]) == 6
        for name, resumed_state in found["same"].items():
            assert resumed_state == found["on"][name][0], name
        for pair, resumed_state in found["crossed"].items():
            assert resumed_state == straight[0], pair
