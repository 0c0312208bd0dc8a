"""Test ZeRO-2 and ZeRO-3 on units with fixed gradients: bits, which units are whole when, and the bytes sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.data_parallel.buckets import has_memory, parameters_of
from megalite.data_parallel.fully_sharded import FullySharded, find_units
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.kernels.registry import Kernels
from megalite.optimizers.base import Optimizer, Update
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.topology.group import Group
from megalite.topology.topology import Topology
from megalite.training.replica import Precision, build_optimizer, build_strategy
from tests.data_parallel.toy import adam, assert_same, gradient, trajectory
from tests.support.ranks import RankContext, run_ranks

UNITS = 5
SHAPE = (20, 31)
MICROBATCHES = 3
LR, DECAY = 0.05, 0.1


def factor(unit: int, step: int, microbatch: int, rank: int) -> torch.Tensor:
    """Return the factor of a unit's weight, which is also its gradient."""
    seed = ((step * 100 + microbatch) * 10 + rank) * 10 + unit
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


class _Product(torch.autograd.Function):
    """Computes x + Σ weight·factor, and reads the weight again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: ShardedParameter, factor: torch.Tensor, unit: "Layer"
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.weight, ctx.factor, ctx.unit = weight, factor, unit
        unit.seen.append(("forward", unit.index, unit.live(), weight.detach().sum().item()))
        return x + (weight * factor).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (saved,), unit = ctx.saved_tensors, ctx.unit
        ctx.weight.accumulate(grad * ctx.factor)
        assert torch.equal(saved, ctx.weight)
        unit.seen.append(("backward", unit.index, unit.live(), saved.detach().sum().item()))
        return grad, None, None, None


Seen = tuple[str, int, "Live", float]


@dataclass(frozen=True)
class Live:
    """The units with whole weights or gradients."""

    weights: list[int]
    gradients: list[int]


@dataclass
class Layer(torch.nn.Module):
    """A unit of one matrix."""

    index: int
    factory: ParameterFactory
    run: "UnitRun"
    seen: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.weight = self.factory.parameter(f"{self.index}.weight", SHAPE, std=1.0)

    __hash__ = torch.nn.Module.__hash__

    def live(self) -> Live:
        return self.run.live()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run = self.run
        return _Product.apply(x, self.weight, factor(self.index, run.steps + 1, run.microbatch, run.rank), self)


class UnitRun:
    """A strategy and its optimizer over a few units, on one rank of a dp group. `settings`: flat config settings:
    dp_strategy, ..."""

    def __init__(self, topology: Topology, settings: Mapping[str, Any]) -> None:
        self.topology, self.rank = topology, topology.dp.rank
        config: RunConfig = replace(RunConfig(), **{"clip_grad": 0.0, "ddp_bucket_size": 500, **settings})
        precision = Precision.of(config.training.precision)
        factory = ParameterFactory(tp=Group.solo("tp"), seed=3, dtype=precision.compute, device=torch.device("cpu"))
        self.layers = [Layer(index, factory, self) for index in range(UNITS)]
        self.model = torch.nn.Sequential(*self.layers)
        self.strategy: DataParallelStrategy = build_strategy(config, {0: self.model}, topology, precision, Kernels())
        self.optimizer: Optimizer = build_optimizer(config, self.strategy, topology, Kernels())
        self.steps = self.microbatch = 0

    def live(self) -> Live:
        weights, gradients = [], []
        for bucket in self.strategy.all_buckets():
            unit = int(bucket.placed[0].parameter.info.spec.name.split(".")[0])
            weights += [unit] if has_memory(bucket.data) else []
            gradients += [unit] if has_memory(bucket.grad) else []
        return Live(sorted(weights), sorted(gradients))

    def seen(self) -> list[Seen]:
        """Return the layers' records since the last call, layer by layer."""
        found = [note for layer in self.layers for note in layer.seen]
        for layer in self.layers:
            layer.seen.clear()
        return found

    def forward(self) -> torch.Tensor:
        return self.model(torch.zeros(()))

    def step(self) -> list[float]:
        strategy, losses = self.strategy, list[float]()
        strategy.begin_step(self.steps + 1)
        for self.microbatch in range(MICROBATCHES):
            loss = self.forward()
            losses.append(loss.item())
            if self.microbatch == MICROBATCHES - 1:
                strategy.enable_grad_sync(0)
            loss.backward()
            strategy.collect_grads(0)
        strategy.start_grad_sync(0)
        strategy.finish_grad_sync()
        self.steps += 1
        strategy.update(self.optimizer, Update(step=self.steps, lr=LR, weight_decay=DECAY))
        return losses


@dataclass
class Result:
    """One rank's results of some steps."""

    losses: list[list[float]]
    weights: list[torch.Tensor]  # after the last step
    seen: list[Seen]  # in the last step
    idle: Live  # between the steps
    sent: float  # bytes in the last step
    held: list[int]  # elements of each unit's bucket


def unit_steps(context: RankContext, dp: int, settings: Mapping[str, Any], steps: int) -> Result:
    run = UnitRun(context.topology(dp=dp), settings)
    losses, seen, sent = [], list[Seen](), 0.0
    for _ in range(steps):
        run.strategy.take_wire_bytes()
        losses.append(run.step())
        seen, sent = run.seen(), run.strategy.take_wire_bytes()
    idle = run.live()
    run.strategy.wait_for_parameters()
    weights = [layer.weight.detach().clone() for layer in run.layers]
    held = [bucket.data.numel() for bucket in run.strategy.all_buckets()]
    run.strategy.close()
    return Result(losses, weights, seen, idle, sent, held)


def oracle(ranks: int, rank: int, steps: int) -> tuple[list[list[float]], list[torch.Tensor]]:
    """Return the losses of one rank and the final weights, by torch's AdamW over sums by microbatch and by rank."""
    factory = ParameterFactory(tp=Group.solo("tp"), seed=3, dtype=torch.float32, device=torch.device("cpu"))
    weights = [factory.parameter(f"{unit}.weight", SHAPE, std=1.0) for unit in range(UNITS)]
    optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=DECAY, fused=True)
    losses: list[list[float]] = []
    for step in range(1, steps + 1):
        losses.append([])
        for microbatch in range(MICROBATCHES):
            x = torch.zeros(())
            for unit, weight in enumerate(weights):
                parts = [factor(unit, step, microbatch, other) for other in range(ranks)]
                with torch.no_grad():
                    x = x + (weight * parts[rank]).sum()
                    total = torch.stack(parts).sum(dim=0)
                    weight.grad = total if weight.grad is None else weight.grad + total
            losses[-1].append(x.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [weight.detach() for weight in weights]


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
