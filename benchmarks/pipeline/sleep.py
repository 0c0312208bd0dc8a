"""Pipeline stages that sleep instead of computing: many ranks run truly in parallel on a machine with few cores.

The executor, its messages and gloo are real; forward, input gradient and weight gradient of a stage sleep for a given time and pass
a real tensor on."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megalite.parity.pool import RankContext
from megalite.pipeline.executor import Executor, Tracer
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Action, Kind, Program, Schedule
from megalite.pipeline.ir.simulate import Costs
from megalite.pipeline.messages import MessageFormat
from megalite.topology.group import Group

SHAPE = (64, 64)  # shape of the sent activations: 16 KiB in fp32
_PAUSE_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds that each stage sleeps per microbatch."""

    forward: float
    input_grad: float
    weight_grad: float

    @classmethod
    def equal(cls, seconds: float) -> "Durations":
        return cls(forward=seconds, input_grad=seconds, weight_grad=seconds)


class SleepGradients:
    """Weight gradients of a stage: `run` sleeps."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._owed: set[int] = set()
        self.is_deferring = False

    @property
    def pending(self) -> int:
        """Microbatches between their I and their W."""
        return len(self._owed)

    @contextmanager
    def deferring(self, microbatch: int) -> Iterator[None]:
        """Leave the weight gradient's sleep of a backward inside the block to `run`."""
        self._owed.add(microbatch)
        self.is_deferring = True
        try:
            yield
        finally:
            self.is_deferring = False

    def parameters(self, microbatch: int) -> Sequence[torch.nn.Parameter]:
        """A sleeping stage has no parameters."""
        return ()

    def run(self, microbatch: int) -> None:
        self._owed.remove(microbatch)
        time.sleep(self._seconds)

    def clear(self) -> None:
        """Drop the state of a failed step."""
        self._owed.clear()


@dataclass
class _Stage:
    durations: Durations
    deferred: SleepGradients


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: _Stage) -> torch.Tensor:
        ctx.stage = stage
        time.sleep(stage.durations.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        durations, deferred = ctx.stage.durations, ctx.stage.deferred
        time.sleep(durations.input_grad + (0.0 if deferred.is_deferring else durations.weight_grad))
        return grad.clone(), None


class SleepingRank:
    """A pipeline rank with sleeping stages."""

    def __init__(
        self, program: Program, rank: int, edges: dict[tuple[int, int], Group], durations: Durations, *,
        tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        schedule = program.schedule
        self._last = schedule.num_stages - 1
        self._stages = {stage: _Stage(durations, SleepGradients(durations.weight_grad)) for stage in schedule.stages_of(rank)}
        self._tokens = torch.ones(SHAPE, requires_grad=True)
        deferred = {stage: held.deferred for stage, held in self._stages.items()}
        self.executor = Executor(
            program, rank=rank, edges=edges, forward=self._forward, reducer=None, deferred=deferred, tracer=tracer,
            messages=MessageFormat(shape=SHAPE, dtype=torch.float32, device=torch.device("cpu")),
        )  # fmt: skip

    def _forward(self, stage: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor:
        y = _Work.apply(self._tokens if x is None else x, self._stages[stage])
        return y.sum() if stage == self._last else y


@dataclass
class _Ends:
    """A tracer that records the end of each computation."""

    times: list[tuple[Action, float]] = field(default_factory=list)

    def start(self, action: Action) -> None:
        """Do nothing: a duration is from end to end, so the executor's work before an action is part of it."""

    def end(self, action: Action) -> None:
        self.times.append((action, time.perf_counter()))


def measured_durations(durations: Durations, microbatches: int = 12) -> dict[Kind, float]:
    """Measured medians of F, B, I, W and R of a sleeping stage, including the executor, in this process only."""
    cells = [f"0F{i},0R{i},0I{i},0W{i},0F{i + 1},0B{i + 1}" for i in range(0, 2 * microbatches, 2)]
    ends = _Ends()
    program = lower(Schedule.from_csv(",".join(cells)))
    SleepingRank(program, 0, {}, durations, tracer=ends).executor.run()
    took: dict[Kind, list[float]] = defaultdict(list)
    for (_, before), (action, end) in zip(ends.times, ends.times[1:]):
        took[action.kind].append(end - before)
    return {kind: statistics.median(times) for kind, times in took.items()}


def costs_of(took: dict[Kind, float], num_stages: int, *, split: bool, recomputed: bool, p2p: float) -> Costs:
    """The simulator's costs from `measured_durations`; a whole backward is one sleep, split halves are two."""
    backward = took[Kind.I] + took[Kind.W] if split else took[Kind.B]
    return Costs.uniform(
        num_stages,
        forward=took[Kind.F],
        backward=backward,
        weight_grad=took[Kind.W] if split else None,
        recompute=took[Kind.R] if recomputed else 0.0,
        p2p=p2p,
    )


def message_latency(context: RankContext, rounds: int) -> float:
    """Median seconds from a send to its arrival at a waiting rank; the same on both ranks.

    Each message contains the time of its sending, and follows a pause as long as an operation: a core that has been idle
    wakes up more slowly than one that has just received a message."""
    topology = context.topology(pp=2)
    edge = topology.edges[0, 1]
    latencies = torch.zeros(rounds, dtype=torch.float64)
    for index in range(rounds):
        stamp = torch.zeros(SHAPE, dtype=torch.float64)
        if context.rank == 0:
            time.sleep(_PAUSE_SECONDS)
            stamp.fill_(time.perf_counter())
            edge.send_async(stamp, to=1).wait()
        else:
            edge.receive_async(stamp, source=0).wait()
            latencies[index] = time.perf_counter() - stamp[0, 0]
    topology.world.all_reduce(latencies)
    return float(latencies.median())


def timed_steps(world: Group, run: Callable[[], object], steps: int) -> list[tuple[float, float]]:
    """(start, end) of each step on this rank, with a common start. All ranks of a machine share one clock."""
    found = []
    for _ in range(steps):
        world.all_reduce(torch.zeros(1))
        start = time.perf_counter()
        run()
        found.append((start, time.perf_counter()))
    return found


def step_times(ranks: list[list[tuple[float, float]]]) -> list[float]:
    """Time of each step from the first rank's start to the last rank's end."""
    return [max(end for _, end in step) - min(start for start, _ in step) for step in zip(*ranks)]
