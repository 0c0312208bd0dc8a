"""Test ZeRO-2 and ZeRO-3 on units with fixed gradients: bits, which units are whole when, and the bytes sent."""

from typing import Any

import pytest
import torch

from megalite.data_parallel.buckets import parameters_of
from megalite.data_parallel.fully_sharded import FullySharded, find_units
from tests.data_parallel.toy import adam, assert_same, gradient, trajectory
from tests.data_parallel.units import MICROBATCHES, UNITS, Result, UnitRun, oracle, unit_steps
from tests.support.ranks import RankContext, run_ranks

Z1 = {"dp_strategy": "distributed-optimizer"}
Z2 = {**Z1, "shard_gradients": True}
Z3 = {"dp_strategy": "fully-sharded"}
BY_RANK = {"reduction_order": "rank"}
STEPS = 3


@pytest.mark.parametrize("settings", [Z2, {**Z3, **BY_RANK}], ids=str)
def test_weights_equal_adam_with_given_gradients(settings: dict[str, Any]) -> None:
    """Some buckets have several parameters, some have one; each parameter gets one gradient."""
    for found in run_ranks(3, trajectory, 3, settings, STEPS):
        assert_same(found, adam(3))


def in_two_levels(name: str, step: int, ranks: int) -> torch.Tensor:
    """Return the gradient of a step with two instances, each added in rank order."""
    parts = torch.stack([gradient(name, step, rank) for rank in range(ranks)])
    return parts[: ranks // 2].sum(dim=0) + parts[ranks // 2 :].sum(dim=0)


@pytest.mark.parametrize("settings", [{**Z1, **BY_RANK, "precision": "bf16"}, Z2, {**Z3, **BY_RANK}], ids=str)
def test_two_instances_sum_inside_and_then_across(settings: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if "precision" in settings else torch.float32
    for found in run_ranks(4, trajectory, 4, {**settings, "dp_instances": 2}, STEPS):
        assert_same(found, adam(4, total=in_two_levels, dtype=dtype))


@pytest.mark.parametrize("settings", [{**Z2, **BY_RANK}, {**Z2, "overlap_grad_reduce": False}, Z3], ids=str)
def test_microbatches_are_bitwise_equal_to_the_oracle(settings: dict[str, Any]) -> None:
    for rank, found in enumerate(run_ranks(3, unit_steps, 3, settings, STEPS)):
        losses, weights = oracle(3, rank, STEPS)
        assert found.losses == losses, "a forward must use the weights of the previous step"
        for unit, (ours, theirs) in enumerate(zip(found.weights, weights, strict=True)):
            assert torch.equal(ours, theirs), f"unit {unit}"


def moments(found: Result) -> dict[tuple[str, int], list[Any]]:
    """Return (forward or backward, unit) -> the whole units, by microbatch."""
    result: dict[tuple[str, int], list[Any]] = {}
    for kind, unit, live, _ in found.seen:
        result.setdefault((kind, unit), []).append(live)
    return result


@pytest.mark.parametrize("more", [{}, BY_RANK, {"precision": "bf16"}], ids=str)
def test_at_most_the_current_and_the_next_unit_are_whole(more: dict[str, Any]) -> None:
    for found in run_ranks(2, unit_steps, 2, {**Z3, **more}, 2):
        for (kind, unit), lives in moments(found).items():
            ahead = unit + 1 if kind == "forward" else unit - 1
            assert len(lives) == MICROBATCHES
            for live in lives:
                assert live.weights == sorted({unit, ahead} & set(range(UNITS)))
                # The gradients of the current unit, and of one in flight.
                there = {unit, unit + 1} if kind == "backward" else {0} if unit == 0 else set()
                assert set(live.gradients) <= there
        assert found.idle.weights == found.idle.gradients == []


def test_one_unit_is_whole_without_overlap() -> None:
    settings = {**Z3, "overlap_param_gather": False, "overlap_grad_reduce": False}
    for found in run_ranks(2, unit_steps, 2, settings, 2):
        for (kind, unit), lives in moments(found).items():
            for live in lives:
                assert live.weights == [unit]
                assert set(live.gradients) <= ({unit} if kind == "backward" else set())


def test_zero_2_gradients_are_whole_only_in_their_backward() -> None:
    for found in run_ranks(2, unit_steps, 2, Z2, 2):
        for (kind, unit), lives in moments(found).items():
            for live in lives:
                assert live.weights == list(range(UNITS))
                assert set(live.gradients) <= ({unit, unit + 1} if kind == "backward" else {0})
        assert found.idle.gradients == []


def test_bytes_of_zero_2() -> None:
    for found in run_ranks(4, unit_steps, 4, {**Z2, "precision": "bf16"}, 2):
        assert found.sent == pytest.approx((MICROBATCHES * 4 + 2) * sum(found.held) * 3 / 4)


def test_states_are_shards_and_saving_gathers_no_unit() -> None:
    for rank, (ranges, live) in enumerate(run_ranks(3, saved_ranges)):
        assert live == []
        for start, stop, whole in ranges:
            assert (start, stop) == (rank * whole // 3, (rank + 1) * whole // 3)


def saved_ranges(context: RankContext) -> tuple[list[tuple[int, int, int]], list[int]]:
    run = UnitRun(context.topology(dp=3), Z3)
    assert isinstance(run.strategy, FullySharded)
    run.step()
    with run.strategy.consensus():
        states = [run.strategy.weights(shard) for shard in run.strategy.shards]
        ranges = [(state.start, state.stop, state.bucket.data.numel()) for state in states]
        live = run.live().weights
    run.strategy.close()
    return ranges, live


def test_units_are_children_and_the_contents_of_containers() -> None:
    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            run = UnitRun(RankContext(0, {}).topology(dp=1), {})
            self.first, self.layers = (run.layers[0], torch.nn.ModuleDict({"a": run.layers[1], "b": run.layers[2]}))
            self.plain = torch.nn.ReLU()
            self.last = torch.nn.Sequential(run.layers[3], run.layers[4])

    units = find_units(Stage())
    names = [[parameter.info.spec.name for parameter in parameters_of(unit)] for unit in units]
    assert names == [["0.weight"], ["1.weight"], ["2.weight"], ["3.weight", "4.weight"]]
