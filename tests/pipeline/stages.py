"""Pipeline stages of megalite's layers in fp32, with buckets as in training, for the executor's tests."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from megalite.data_parallel.shards import StrategyGroups, StrategyOptions
from megalite.data_parallel.strategy import AllReduce
from megalite.pipeline.executor import Executor, GradientReducer, Tracer
from megalite.pipeline.ir.schedule import Program, Schedule
from megalite.pipeline.messages import MessageFormat
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter import (
    DeferredWeightGradients,
    ParameterFactory,
    ShardedParameter,
    attach_deferred,
)
from megalite.topology.group import Group

ROWS, H, F_SIZE = 6, 16, 24
MESSAGES = MessageFormat(shape=(ROWS, H), dtype=torch.float32, device=torch.device("cpu"))


class Stage(torch.nn.Module):
    """x + down(tanh(up(x·norm))), with biases; the last layer returns a loss."""

    def __init__(self, stage: int, *, last: bool, factory: ParameterFactory) -> None:
        super().__init__()
        self.last = last
        self.norm = factory.parameter(f"{stage}.norm", (H,), value=1.0)
        self.up = ColumnParallelLinear(f"{stage}.up", (F_SIZE, H), std=0.4, bias=True, factory=factory)
        self.down = RowParallelLinear(f"{stage}.down", (H, F_SIZE), std=0.4, bias=True, factory=factory)

    def forward(self, x: torch.Tensor, microbatch: int) -> torch.Tensor:
        y = x + self.down(torch.tanh(self.up(x * self.norm)))
        return (y**2).sum() * (microbatch + 1) if self.last else y


def build_stage(stage: int, num_stages: int) -> Stage:
    factory = ParameterFactory(tp=Group.solo("tp"), seed=7, dtype=torch.float32, device=torch.device("cpu"))
    return Stage(stage, last=stage == num_stages - 1, factory=factory)


def data(microbatch: int) -> torch.Tensor:
    return torch.randn(ROWS, H, generator=torch.Generator().manual_seed(99 + microbatch))


def strategy_of(stages: dict[int, Stage], dp: Group) -> AllReduce:
    """Build a strategy with buckets so small that each stage has several."""
    groups = StrategyGroups(dp=dp, tp=Group.solo("tp"), embedding=None, expert_dp=Group.solo("expert-dp"))
    options = StrategyOptions(bucket_size=200, grad_dtype=torch.float32, overlap=True)
    return AllReduce(stages, groups=groups, options=options)


def gradients(stages: dict[int, Stage]) -> dict[str, torch.Tensor]:
    found = {}
    for stage in stages.values():
        for parameter in stage.parameters():
            assert isinstance(parameter, ShardedParameter) and parameter.main_grad is not None
            assert parameter.grad is None
            found[parameter.info.spec.name] = parameter.main_grad.clone()
    return found


class Rank:
    """A pipeline rank with its stages and deferred weight gradients. `first_microbatch`: number of microbatch 0 among those
    of all data-parallel ranks."""

    def __init__(
        self,
        program: Program,
        rank: int,
        edges: dict[tuple[int, int], Group],
        *,
        dp: Group | None = None,
        first_microbatch: int = 0,
        tracer: Tracer | None = None,
        **options: Any,
    ) -> None:
        schedule = program.schedule
        self.first_microbatch = first_microbatch
        self.stages = {stage: build_stage(stage, schedule.num_stages) for stage in schedule.stages_of(rank)}
        self.strategy = strategy_of(self.stages, dp or Group.solo("dp"))
        self.deferred = {stage: DeferredWeightGradients() for stage in self.stages}
        for stage, module in self.stages.items():
            attach_deferred(module, self.deferred[stage])
        self.executor = Executor(
            program,
            rank=rank,
            edges=edges,
            forward=self.forward,
            reducer=self.reducer_of(schedule),
            **{"messages": MESSAGES, "deferred": self.deferred, "check_memory": True, "tracer": tracer, **options},
        )

    def reducer_of(self, schedule: Schedule) -> GradientReducer | None:
        return None if schedule.forward_only else self.strategy

    def forward(self, stage: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor:
        microbatch += self.first_microbatch
        return self.stages[stage](data(microbatch) if x is None else x, microbatch)

    def step(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        self.strategy.zero_grad()
        losses = [loss.item() for loss in self.executor.run()]
        self.strategy.finish_grad_sync()
        return losses, gradients(self.stages)


class Watched(Rank):
    """A rank that counts live graphs and outputs, and records backwards and calls of its reducer."""

    def __init__(self, program: Program, rank: int, edges: dict[tuple[int, int], Group]) -> None:
        self.schedule = program.schedule
        self.graphs = self.most_graphs = 0
        self.most_held = self.most_full = 0
        """Maximum number of outputs with a live graph, and of those with unfreed storage."""
        self.events: list[str] = []
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        """Outputs that are sent or come from a second forward; their graphs live until the backward."""
        super().__init__(program, rank, edges)

    def reducer_of(self, schedule: Schedule) -> GradientReducer:
        return self

    def enable_grad_sync(self, stage: int, pending: Sequence[torch.nn.Parameter] | None = None) -> None:
        self.events.append(f"enable {stage}")
        self.strategy.enable_grad_sync(stage, pending)

    def collect_grads(self, stage: int) -> None:
        self.strategy.collect_grads(stage)

    def start_grad_sync(self, stage: int) -> None:
        self.events.append(f"start {stage}")
        self.strategy.start_grad_sync(stage)

    def set_prefetch(self, stage: int | None, *, backward: bool) -> None:
        self.strategy.set_prefetch(stage, backward=backward)

    def forward(self, stage: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor:
        held = [output for ref in self._outputs if (output := ref()) is not None]
        full = [output for output in held if output.untyped_storage().nbytes() > output.element_size()]
        self.most_held, self.most_full = max(self.most_held, len(held)), max(self.most_full, len(full))
        del held, full
        y = super().forward(stage, microbatch, x)
        has_graph = torch.is_grad_enabled()
        if has_graph:
            y = _Watch.apply(y, _Graph(self), microbatch)
        placement, following = self.schedule.placement, stage + 1
        if following < len(placement):
            leaves = placement[following] != placement[stage]
            if leaves or (has_graph and (stage, microbatch) in self.schedule.recomputed):
                self._outputs.append(weakref.ref(y))
        return y


class _Graph:
    """An object with the lifetime of the graph that refers to it."""

    def __init__(self, rank: Watched) -> None:
        self.rank = rank
        rank.graphs += 1
        rank.most_graphs = max(rank.most_graphs, rank.graphs)

    def __del__(self) -> None:
        self.rank.graphs -= 1


class _Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, graph: _Graph, microbatch: int) -> torch.Tensor:
        ctx.graph, ctx.microbatch = graph, microbatch
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.graph.rank.events.append(f"B{ctx.microbatch}")
        return grad, None, None


def one_rank(num_stages: int, microbatches: range) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and gradients without a pipeline, by ascending microbatch."""
    stages = {stage: build_stage(stage, num_stages) for stage in range(num_stages)}
    strategy, losses = strategy_of(stages, Group.solo("dp")), []
    for microbatch in microbatches:
        x = data(microbatch)
        for module in stages.values():
            x = module(x, microbatch)
        x.backward()
        for stage in stages:
            strategy.collect_grads(stage)
        losses.append(x.item())
    return losses, gradients(stages)
