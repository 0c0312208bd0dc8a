"""Compare servers, bit by bit, with one process that simulates all ranks; test resumes across strategies."""

from pathlib import Path
from typing import Any

import pytest

from tests.data_parallel.toy import STEPS, adam, assert_same, trajectory
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import continued, hashed, hashes, save_run
from tests.support.tiny import Runner, build, tiny_config

BY_RANK = {"reduction_order": "rank"}
# Chunks and pieces of a few hundred elements: several in each bucket.
FUSED = {"dp_strategy": "fused-all-reduce", "fusion_threshold_mb": 0.002, **BY_RANK}
SERVER = {"dp_strategy": "parameter-server", "server_chunk_mb": 0.0006}
SHARDED = {"dp_strategy": "sharded-parameter-server", "server_chunk_mb": 0.0003}
EACH = {"fused": FUSED, "server": SERVER, "sharded": SHARDED}
WAYS = {
    **EACH,
    "all-reduce": {"dp_strategy": "all-reduce", **BY_RANK},
    "distributed-optimizer": {"dp_strategy": "distributed-optimizer"},
    "fused late": {**FUSED, "overlap_grad_reduce": False},
    "server late": {**SERVER, "overlap_param_gather": False, "overlap_grad_reduce": False},
    "sharded late": {**SHARDED, "overlap_param_gather": False, "overlap_grad_reduce": False},
    "fused, all at once": {**FUSED, "fusion_threshold_mb": 1.0},
    "server, all at once": {**SERVER, "server_chunk_mb": 1.0},
    "sharded, all at once": {**SHARDED, "server_chunk_mb": 1.0},
}


@pytest.mark.parametrize(
    ("ranks", "name", "wire"), [*((3, name, "fp32") for name in WAYS), *((1, name, "bf16") for name in EACH)]
)
def test_weights_equal_the_simulation(ranks: int, name: str, wire: str) -> None:
    for found in run_ranks(ranks, trajectory, ranks, {**WAYS[name], "wire_dtype": wire}, STEPS):
        assert_same(found, adam(ranks))


Settings = dict[str, Any]

# The model has about 60 thousand parameters: several pieces and chunks in most buckets.
SAVED_BY: dict[str, Settings] = {
    "all-reduce": {"dp_strategy": "all-reduce"},
    "fused": {"dp_strategy": "fused-all-reduce", "fusion_threshold_mb": 0.02},
    "server": {"dp_strategy": "parameter-server", "server_chunk_mb": 0.01},
    "sharded": {"dp_strategy": "sharded-parameter-server", "server_chunk_mb": 0.004},
}


def weights(runner: Runner) -> dict[str, str]:
    """Return hashes of the states of each tensor on this rank, independent of the buckets."""
    runner.replica.strategy.wait_for_parameters()
    return {
        placed.parameter.info.spec.name: hashed(shard.bucket.data[placed.start : placed.stop])
        for shard in runner.replica.strategy.shards
        for placed in shard.bucket.placed
    }


def resumed(context: RankContext, folder: str) -> dict[str, Any]:
    """Run, for each strategy, a step, a save and another step; then resume each checkpoint with each strategy."""
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


def test_resume_across_strategies_is_bitwise_equal(tmp_path: Path) -> None:
    for found in run_ranks(2, resumed, str(tmp_path)):
        straight = [of_weights for _, of_weights in found["on"].values()]
        assert all(one == straight[0] for one in straight), "strategies differ without any checkpoint"
        assert len(found["same"]) == 3 and len(found["crossed"]) == 6
        for name, resumed_state in found["same"].items():
            assert resumed_state == found["on"][name][0], name
        for pair, resumed_state in found["crossed"].items():
            assert resumed_state == straight[0], pair
