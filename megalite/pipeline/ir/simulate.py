"""A program on a clock: how long a step takes, where the bubbles are."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import COMPUTE, Action, Kind
from megalite.pipeline.ir.dependencies import all_inputs
from megalite.pipeline.ir.engine import describe, execute, shortest_cycle
from megalite.pipeline.ir.errors import ScheduleError
from megalite.pipeline.ir.schedule import Program, Schedule, peak_activations


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, or any one unit."""

    forward: tuple[float, ...]
    """Per virtual stage, one microbatch's forward."""
    backward: tuple[float, ...]
    """Per virtual stage, one microbatch's full backward."""
    p2p: float = 0.0
    """One message, from the moment that both ends have posted it until it is there."""

    @classmethod
    def uniform(
        cls, num_stages: int, *, forward: float = 1.0, backward: float = 2.0, p2p: float = 0.0
    ) -> "Costs":
        """The same for each stage; a backward is commonly two forwards."""
        return cls(forward=(forward,) * num_stages, backward=(backward,) * num_stages, p2p=p2p)


class Event(NamedTuple):
    """A forward or backward on the clock."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step as `simulate` saw it; times in the unit of the costs."""

    schedule: Schedule
    events: tuple[Event, ...]
    """Forwards and backwards, rank by rank in order."""
    makespan: float
    """From the first start to the last end over all ranks."""
    busy: tuple[float, ...]
    """Per rank, the time spent in forwards and backwards."""
    peak_activations: tuple[int, ...]
    """Per rank, the most (stage, microbatch) pairs whose activations are alive at once."""

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Per rank, the rest of the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """Share of the makespan that is lost: 1 - (busy time of the busiest rank) / makespan."""
        return 1.0 - max(self.busy) / self.makespan if self.makespan else 0.0


def simulate(program: Program, costs: Costs) -> Timeline:
    """Runs the program's own lists with these costs, under the executor's semantics (rendezvous sends).

    Source of the clock: `engine.execute`.

    Raises:
        ConfigError: costs of another number of stages, or negative ones.
        ScheduleError: the program gets stuck.
    """
    schedule = program.schedule
    _check(costs, schedule)
    seconds = {Kind.F: costs.forward, Kind.B: costs.backward}
    execution = execute(
        program,
        lambda action: seconds[action.kind][action.stage],
        all_inputs(program.actions, schedule),
        p2p=costs.p2p,
    )
    if execution.waits:
        cycle = shortest_cycle(execution.waits, schedule.placement)
        raise ScheduleError(f"schedule {schedule.name} gets stuck: {describe(cycle, schedule.placement)}")
    events = tuple(
        Event(rank, action, start, end)
        for rank, row in enumerate(program.actions)
        for action, start, end in zip(row, execution.starts[rank], execution.ends[rank], strict=True)
        if action.kind in COMPUTE
    )
    busy = [0.0] * schedule.num_ranks
    for event in events:
        busy[event.rank] += event.end - event.start
    return Timeline(
        schedule=schedule,
        events=events,
        makespan=max((event.end for event in events), default=0.0),
        busy=tuple(busy),
        peak_activations=peak_activations(program.actions, forward_only=schedule.forward_only),
    )


def _check(costs: Costs, schedule: Schedule) -> None:
    for what, values in (("forward", costs.forward), ("backward", costs.backward)):
        if len(values) != schedule.num_stages:
            raise ConfigError(
                f"{what} costs are given for {len(values)} stages, but schedule {schedule.name} has "
                f"{schedule.num_stages}: give one value a stage"
            )
    lowest = min(*costs.forward, *costs.backward, costs.p2p)
    if lowest < 0:
        raise ConfigError(f"a pipeline cost is {lowest}; costs are times: 0 or more")
