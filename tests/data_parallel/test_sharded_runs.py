"""ZeRO-2 and ZeRO-3 with a real model: equal bits, checkpoints, failed steps. `tests/parity` compares with one rank."""

import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.data_parallel.buckets import has_memory
from megalite.tensor_parallel.parameter import ShardedParameter
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import continued, save_run
from tests.support.tiny import LLAMA, Z1, Runner, assemble, build, local_parts, tiny_config

Settings = dict[str, Any]

Z2: Settings = {**Z1, "shard_gradients": True}
Z3: Settings = {"dp_strategy": "fully-sharded"}
SP: Settings = {"tp": 2, "sequence_parallel": True}
FULL: Settings = {"recompute_granularity": "full", "recompute_method": "uniform"}
STEPS = 3
STATES = ("weight", "main_param", "exp_avg", "exp_avg_sq")


def bits(context: RankContext, settings: Settings) -> dict[str, Any]:
    more = {"dp": 2, "clip_grad": 0.1, "micro_batch_size": 4, "num_layers": 2}
    runner = Runner(build(context, tiny_config(2, **{**more, **settings})))
    steps = [runner.step() for _ in range(STEPS)]
    assert all(step.grad_norm > 0.1 for step in steps)
    losses = [step.loss for step in steps]
    return {"losses": losses, "weights": local_parts(runner.replica, "weight")}


def test_two_ranks_are_bitwise_equal_to_all_reduce() -> None:
    """A sum of two has only one order, and one microbatch needs no accumulation."""
    plain = run_ranks(2, bits, {"precision": "bf16"})
    theirs = assemble([rank["weights"] for rank in plain])
    late = {**Z1, "overlap_param_gather": False, "overlap_grad_reduce": False}
    for settings in (Z1, late, Z2, {**Z3, **FULL}):
        sharded = run_ranks(2, bits, {"precision": "bf16", **settings})
        assert sharded[0]["losses"] == plain[0]["losses"]
        ours = assemble([rank["weights"] for rank in sharded])
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def most_units(context: RankContext, settings: Settings) -> tuple[int, set[str]]:
    """Return the maximum number of units with whole weights in a forward or backward, and those whole after a step."""
    runner = Runner(build(context, tiny_config(2, dp=2, **LLAMA, **settings)))
    strategy, most = runner.replica.strategy, 0

    def units() -> set[str]:
        held = [bucket for bucket in strategy.all_buckets() if has_memory(bucket.data)]
        names = [placed.parameter.info.spec.name for bucket in held for placed in bucket.placed]
        return {re.sub(r"^(layers\.\d+|embedding|head|final_norm).*", r"\1", name) for name in names}

    def note(*_: Any) -> None:
        nonlocal most
        found = units()
        most = max(most, len(found) - (found >= {"head", "final_norm"}))

    def noting(ready: Callable[[], None]) -> None:
        note()
        ready()

    for stage in runner.replica.stages.values():
        for module in stage.modules():
            module.register_forward_hook(note)
    for bucket in runner.replica.strategy.all_buckets():
        bucket._count_down = partial(noting, bucket._count_down)  # type: ignore[method-assign]
    for _ in range(2):
        runner.step()
    left = units()
    runner.evaluate()
    return most, left


@pytest.mark.parametrize("settings", [{}, {**FULL, "recompute_num_layers": 3}], ids=str)
def test_at_most_two_units_are_whole(settings: Settings) -> None:
    for most, left in run_ranks(2, most_units, {**Z3, **settings}):
        assert (most, left) == (2, set())


def state(runner: Runner) -> dict[str, Any]:
    return {kind: local_parts(runner.replica, kind) for kind in STATES}


def steps(runner: Runner, count: int) -> list[tuple[float, float]]:
    results = [runner.step() for _ in range(count)]
    return [(result.loss, result.grad_norm) for result in results]


def leg(
    context: RankContext, world: int, settings: Settings, taken_from: str | None, to: str, count: int
) -> dict[str, Any]:
    config = tiny_config(world, **{"precision": "bf16", "num_layers": 2, "load": taken_from, **settings})
    runner = Runner(build(context, config)) if taken_from is None else continued(context, config, taken_from)
    start = state(runner)
    steps(runner, count)
    end = state(runner)
    runner.replica.strategy.begin_step(0)  # nothing is gathered when the save starts
    save_run(runner, to)
    return {"start": start, "end": end}


def test_states_load_in_another_strategy(tmp_path: Path) -> None:
    """All states load with the weights, on any number of ranks."""
    legs: list[tuple[int, Settings]] = [
        (2, {}),
        (3, {**Z3, "global_batch_size": 6}),
        (2, Z2),
        (4, {**Z3, **SP}),
        (4, {**Z1, "dp_instances": 2}),
        (2, {}),
    ]
    paths = [None, *(str(tmp_path / str(number)) for number in range(len(legs)))]
    runs = [
        run_ranks(world, leg, world, settings, before, after, 1)
        for (world, settings), (before, after) in zip(legs, pairwise(paths), strict=True)
    ]
    for before, after in pairwise(runs):
        for kind in STATES:
            found, wanted = (
                assemble([rank[moment][kind] for rank in ranks])
                for ranks, moment in ((after, "start"), (before, "end"))
            )
            for name, values in wanted.items():
                assert np.array_equal(found[name], values), (kind, name)


def after_failure(context: RankContext, ranks: int, settings: Settings, fails: bool) -> list[tuple[float, float]]:
    """Run two steps, optionally after a step that failed in the backward of its second microbatch."""
    runner = Runner(build(context, tiny_config(ranks, dp=ranks, micro_batch_size=4 // ranks, num_layers=2, **settings)))
    if fails:
        (stage,) = runner.replica.stages.values()
        parameter = stage.get_parameter("layers.1.mlp.up.weight")
        assert isinstance(parameter, ShardedParameter)
        add, calls = parameter.accumulate_product, list[int]()

        def broken(*factors: torch.Tensor) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise ZeroDivisionError
            add(*factors)

        parameter.accumulate_product = broken
        with pytest.raises(ZeroDivisionError):
            runner.step()
        parameter.accumulate_product = add
    return steps(runner, 2)


@pytest.mark.parametrize(
    "settings",
    [
        {**Z1, "ddp_bucket_size": 100},
        {**Z3, **FULL, "reduction_order": "rank"},
        {**Z2, "dp_instances": 2, "reduction_order": "rank"},
    ],
    ids=str,
)
def test_failed_step_leaves_no_state(settings: Settings) -> None:
    ranks = 2 * settings.get("dp_instances", 1)
    failed = run_ranks(ranks, after_failure, ranks, settings, True)
    assert failed == run_ranks(ranks, after_failure, ranks, settings, False)
