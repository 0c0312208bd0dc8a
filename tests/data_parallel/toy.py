"""A small model with fixed gradients, so that tests can compute the results of a strategy independently."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.data_parallel.shards import StrategyGroups, StrategyOptions
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.kernels.registry import Kernels
from megalite.optimizers.base import Optimizer, Update
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.topology.group import Group
from megalite.topology.topology import Topology
from megalite.training.replica import Precision, build_optimizer, build_strategy
from tests.support.ranks import RankContext

SHAPES = {"table": (24, 10), "up": (33, 10), "bias": (33,), "down": (10, 33), "norm": (10,)}
NO_DECAY = ("bias", "norm")


class Toy(torch.nn.Module):
    """Parameters without a forward."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        factory = ParameterFactory(tp=Group.solo("tp"), seed=5, dtype=dtype, device=torch.device("cpu"))
        for name, shape in SHAPES.items():
            setattr(self, name, factory.parameter(name, shape, std=1.0, decay=name not in NO_DECAY))


def gradient(name: str, step: int, rank: int, scale: float = 1.0) -> torch.Tensor:
    """Return data-parallel rank `rank`'s part of the gradient in `step` (from 1), fp32."""
    seed = 1000 * step + 10 * rank + list(SHAPES).index(name)
    return scale * torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


class ToyRun:
    """A strategy and its optimizer over `Toy`, on one rank of a dp group. `settings`: flat config settings: dp_strategy,
    optimizer, ..."""

    def __init__(self, topology: Topology, settings: Mapping[str, Any]) -> None:
        settings = {"clip_grad": 0.0, "weight_decay": 0.1, "ddp_bucket_size": 300, **settings}
        self.topology = topology
        self.config: RunConfig = replace(RunConfig(), **settings)
        precision = Precision.of(self.config.training.precision)
        self.toy = Toy(precision.compute)
        self.strategy: DataParallelStrategy = build_strategy(self.config, {0: self.toy}, topology, precision, Kernels())
        self.optimizer: Optimizer = build_optimizer(self.config, self.strategy, topology, Kernels())
        self.steps = 0

    def gradients(self, *, scale: float = 1.0, loss_scale: float = 1.0) -> list[float]:
        step = self.steps + 1
        self.strategy.begin_step(step, loss_scale=loss_scale)
        self.strategy.enable_grad_sync(0)
        for name in reversed(SHAPES):
            parameter = getattr(self.toy, name)
            assert isinstance(parameter, ShardedParameter)
            parameter.accumulate(gradient(name, step, self.topology.dp.rank, scale * loss_scale))
        self.strategy.start_grad_sync(0)
        self.strategy.finish_grad_sync()
        terms = self.strategy.norm_terms()
        self.strategy.scope.all_reduce(terms)
        return terms.tolist()

    def step(self, *, lr: float = 0.05, loss_scale: float = 1.0) -> None:
        self.gradients(loss_scale=loss_scale)
        self.steps += 1
        update = Update(step=self.steps, lr=lr, weight_decay=0.1, factor=1.0 / loss_scale)
        self.strategy.update(self.optimizer, update)

    def weights(self) -> dict[str, torch.Tensor]:
        self.strategy.wait_for_parameters()
        return {name: getattr(self.toy, name).detach().clone() for name in SHAPES}


S = TypeVar("S", bound=DataParallelStrategy)


def bare(
    kind: type[S], stages: Mapping[int, torch.nn.Module], *, groups: Mapping[str, Group] | None = None, **options: Any
) -> S:
    """Return a strategy without a run, on a single rank except for `groups`, which need not exist."""
    alone: dict[str, Any] = {name: Group.solo(name) for name in ("dp", "tp", "expert_dp")}
    defaults: dict[str, Any] = {"bucket_size": 1, "grad_dtype": torch.float32, "overlap": True}
    return kind(
        stages,
        groups=StrategyGroups(**{**alone, "embedding": None, **(groups or {})}),
        options=StrategyOptions(**{**defaults, **options}),
    )


def trajectory(context: RankContext, dp: int, settings: Mapping[str, Any], steps: int) -> list[dict[str, torch.Tensor]]:
    """Return, for run_ranks, the weights after each step on this rank."""
    run = ToyRun(context.topology(dp=dp, instances=settings.get("dp_instances", 1)), settings)
    found = []
    for _ in range(steps):
        run.step()
        found.append(run.weights())
    run.strategy.close()
    return found


def initial() -> dict[str, torch.Tensor]:
    toy = Toy()
    return {name: getattr(toy, name).detach().clone() for name in SHAPES}


STEPS = 3
Weights = dict[str, torch.Tensor]


def summed(name: str, step: int, ranks: int) -> torch.Tensor:
    return torch.stack([gradient(name, step, rank) for rank in range(ranks)]).sum(dim=0)


def padded(values: torch.Tensor, multiple: int = 64) -> torch.Tensor:
    """Return flat values with padding as in a bucket: torch's kernels round the last elements of a tensor differently."""
    return torch.nn.functional.pad(values.flatten(), (0, -values.numel() % multiple))


def adam(
    ranks: int,
    steps: int = STEPS,
    *,
    total: Callable[[str, int, int], torch.Tensor] = summed,
    dtype: torch.dtype = torch.float32,
) -> list[Weights]:
    """Return the weights after each step in one process that simulates all ranks: torch's AdamW over fp32 parameters and
    the `total` of their gradients; weights are in `dtype`, also the initial ones."""
    first = {name: getattr(Toy(dtype), name).detach().float() for name in SHAPES}
    main = {name: torch.nn.Parameter(padded(value)) for name, value in first.items()}
    groups = [
        {"params": [main[name] for name in SHAPES if (name in NO_DECAY) == plain], "weight_decay": decay}
        for plain, decay in ((False, 0.1), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05, fused=True)
    found = []
    for step in range(1, steps + 1):
        for name, weight in main.items():
            weight.grad = padded(total(name, step, ranks))
        optimizer.step()
        found.append(
            {
                name: main[name].detach()[: value.numel()].view_as(value).to(dtype, copy=True)
                for name, value in first.items()
            }
        )
    return found


def assert_same(found: list[Weights], wanted: list[Weights]) -> None:
    for step, (one, other) in enumerate(zip(found, wanted, strict=True), start=1):
        for name in SHAPES:
            assert torch.equal(one[name], other[name]), f"{name} after step {step}"
