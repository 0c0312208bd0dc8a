"""One step: decisions that all ranks take together, and number formats."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from megalite.topology.group import Group
from megalite.training.non_finite import NonFiniteError
from megalite.training.step import Stepper
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, assert_same_numbers, build, local_parts, tiny_config, trajectory, whole

Z1 = {"dp_strategy": "distributed-optimizer"}
SP = {"sequence_parallel": True}
STATES = ("weight", "main_param", "exp_avg", "exp_avg_sq")


@contextmanager
def planted(runner: Runner, value: float, *, here: bool) -> Iterator[None]:
    """On this rank alone, one gradient element is `value` before the last backward, and so before any reduction."""
    strategy = runner.replica.strategy
    arm = strategy.enable_grad_sync

    def arm_and_plant(stage: int) -> None:
        # A split parameter: its gradient is on no other tp or pp rank.
        split = [bucket for bucket in strategy.buckets[stage] if bucket.kind.split_over_tp and not bucket.kind.tied]
        split[0].grad[0] = value
        arm(stage)

    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr(strategy, "enable_grad_sync", arm_and_plant)
        yield


def state(runner: Runner) -> dict[str, Any]:
    return {kind: local_parts(runner.replica, kind) for kind in STATES}


def unchanged(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return all(np.array_equal(before[kind][name][2], after[kind][name][2]) for kind in STATES for name in before[kind])


def overflow_on_one_rank(context: RankContext, world: int, settings: dict[str, Any], culprit: int) -> dict[str, Any]:
    fp16 = {"precision": "fp16", "initial_loss_scale": 2.0**10, "hysteresis": 2}
    config = tiny_config(world, micro_batch_size=2, **fp16, **settings)
    runner = Runner(build(context, config))
    results, held = [runner.step()], []
    for _ in range(2):
        before = state(runner)
        with planted(runner, float("inf"), here=context.rank == culprit):
            results.append(runner.step())
        held.append(unchanged(before, state(runner)))
    before = state(runner)
    results.append(runner.step())
    held.append(unchanged(before, state(runner)))
    return {
        "skipped": [result.skipped for result in results],
        "scales": [result.loss_scale for result in results],
        "norms": [result.grad_norm for result in results],
        "held": held,
        "updates": runner.replica.optimizer.updates,
    }


@pytest.mark.parametrize(
    "settings, culprit",
    [
        ({"tp": 2}, 1),
        ({"tp": 2, **SP}, 0),
        ({"pp": 2}, 0),
        ({"pp": 2}, 1),
        ({"dp": 2}, 1),
        ({"dp": 2, **Z1}, 0),
        ({"tp": 2, "pp": 2, "dp": 2, **SP, **Z1}, 5),
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(settings: dict[str, Any], culprit: int) -> None:
    world = int(np.prod([settings.get(axis, 1) for axis in ("tp", "pp", "dp")]))
    for found in run_ranks(world, overflow_on_one_rank, world, settings, culprit):
        assert found["skipped"] == [False, True, True, False]
        # The second overflow in a row halves the scale of the step after it.
        assert found["scales"] == [2.0**10, 2.0**10, 2.0**10, 2.0**9]
        assert found["held"] == [True, True, False]
        assert found["updates"] == 2
        assert np.isfinite([found["norms"][0], found["norms"][3]]).all()


def stopped_by(context: RankContext, settings: dict[str, Any], value: float) -> dict[str, Any]:
    runner = Runner(build(context, tiny_config(2, **settings)))
    runner.step()
    before = state(runner)
    message = ""
    with planted(runner, value, here=context.rank == 1):
        try:
            runner.step()
        except NonFiniteError as error:
            message = str(error)
    return {"message": message, "held": unchanged(before, state(runner)), "updates": runner.replica.optimizer.updates}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("settings", [{"tp": 2}, {"pp": 2}, {"dp": 2}, {"dp": 2, **Z1}])
def test_nan_stops_every_rank_before_the_update(settings: dict[str, Any], value: float, precision: str) -> None:
    found = run_ranks(2, stopped_by, {**settings, "precision": precision}, value)
    assert found[0]["message"] == found[1]["message"]
    assert "step 2" in found[0]["message"] and "gradient norm" in found[0]["message"]
    for rank in found:
        assert rank["held"]
        assert rank["updates"] == 1


def nan_in_the_loss(context: RankContext) -> list[str]:
    """The loss is NaN on the last stage alone; the gradients never are."""
    runner = Runner(build(context, tiny_config(2, pp=2)))
    totals = Stepper._totals

    def with_nan(stepper: Stepper, over: Group, losses: list[torch.Tensor], squared: torch.Tensor) -> list[float]:
        return totals(stepper, over, [loss * float("nan") for loss in losses], squared)

    messages = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "_totals", with_nan)
        try:
            runner.step()
        except NonFiniteError as error:
            messages.append(str(error))
    return messages


def test_nan_in_the_loss_alone_stops_every_rank() -> None:
    found = run_ranks(2, nan_in_the_loss)
    assert found[0] == found[1]
    assert "loss nan" in found[0][0]


def test_the_check_can_be_turned_off() -> None:
    settings = {"dp": 2, "check_for_nan_in_loss_and_grad": False}
    for rank in run_ranks(2, stopped_by, settings, float("nan")):
        assert rank["message"] == ""
        assert rank["updates"] == 2


RAMP = {"rampup_batch_size": [4, 4, 16], "global_batch_size": 12}


def test_ramp_up_sizes() -> None:
    runner = Runner(build(RankContext(0, {}), tiny_config(1, **RAMP)))
    taken = []
    for _ in range(5):
        before = runner.progress.samples
        runner.step()
        taken.append(runner.progress.samples - before)
    assert taken == [4, 4, 8, 12, 12]


@pytest.fixture(scope="module")
def ramp_on_one_rank() -> Any:
    return whole([trajectory(RankContext(0, {}), 1, RAMP)])


@pytest.mark.parametrize("settings", [{"tp": 2}, {"pp": 2}, {"dp": 2}, {"pp": 2, "vpp": 2}, {"pp": 2, "dp": 2, **Z1}])
def test_a_run_with_ramp_up_has_the_numbers_of_one_rank(ramp_on_one_rank: Any, settings: dict[str, Any]) -> None:
    world = int(np.prod([settings.get(axis, 1) for axis in ("tp", "pp", "dp")]))
    ours = whole(run_ranks(world, trajectory, world, {**RAMP, **settings}))
    assert_same_numbers(ours, ramp_on_one_rank)


def test_clipping_scales_to_the_bound_and_no_further() -> None:
    """After a step the gradients hold the clipped values: their norm is the bound, or what it was if below."""
    for clip, factor in ((0.05, None), (1e3, 1.0), (0.0, 1.0)):
        runner = Runner(build(RankContext(0, {}), tiny_config(1, clip_grad=clip)))
        result = runner.step()
        norm = float(runner.replica.strategy.local_norm_squared().sqrt())
        expected = clip if factor is None else result.grad_norm
        assert norm == pytest.approx(expected, rel=1e-4)
