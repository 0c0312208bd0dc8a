"""A model of units with fixed gradients that records which parameters are whole in each forward and backward."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.data_parallel.buckets import has_memory
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.kernels.registry import Kernels
from megalite.optimizers.base import Optimizer, Update
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.topology.group import Group
from megalite.topology.topology import Topology
from megalite.training.replica import Precision, build_optimizer, build_strategy
from tests.support.ranks import RankContext

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
        """Return the units that are whole now."""
        return self.run.live()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
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
        """Return the units with whole weights or gradients in memory."""
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
        """Run the forward of the microbatch."""
        return self.model(torch.zeros(()))

    def step(self) -> list[float]:
        """Run one whole step; return the losses of its microbatches."""
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
    """Run some steps on one rank, for run_ranks."""
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
    """Return a rank's losses and the final weights, by torch's AdamW over sums by microbatch and by rank."""
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
