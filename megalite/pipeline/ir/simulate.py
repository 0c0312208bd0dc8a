"""Simulate a program: how long a step takes, and where its bubbles are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress, repeat
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.pipeline.ir.lower import earliest_starts
from megalite.pipeline.ir.memory import activation_peaks
from megalite.pipeline.ir.schedule import Action, Kind, Program, Schedule, dependencies
from megalite.pipeline.ir.table import CODES, Table
from megalite.pipeline.ir.validate import deadlock, execute, wire


class Link(NamedTuple):
    """A directed connection between two pipeline ranks."""

    latency: float  # from the time that both ends have posted a message, and the link is free, to its arrival
    seconds_per_message: float = 0.0
    """How long a message occupies the link (bytes / bandwidth), before the latency; other messages queue behind it."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times per virtual stage for one microbatch, in seconds or any other unit."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]  # the full backward without recomputation: input and weight gradients
    weight_grad: tuple[float, ...] | None = None  # W's part of `backward`; the rest is I's. Default: half.
    recompute: tuple[float, ...] | None = None
    """Cost of an R. In a schedule without any R it is added to each B or I. Default 0."""
    p2p: float = 0.0  # latency of links that are not in `links`
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict, hash=False)
    """(source rank, destination rank) -> link."""

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        backward: float = 2.0,
        weight_grad: float | None = None,
        recompute: float = 0.0,
        p2p: float = 0.0,
    ) -> "Costs":
        """Build equal costs for all stages. A backward usually takes two forwards, half of it for weight gradients."""
        weight = None if weight_grad is None else (weight_grad,) * num_stages
        f, b, r = ((cost,) * num_stages for cost in (forward, backward, recompute))
        return cls(forward=f, backward=b, weight_grad=weight, recompute=r, p2p=p2p)

    def of_actions(self, *, ahead: bool) -> dict[Kind, tuple[float, ...]]:
        """Return the cost per stage of each kind of computation. `ahead`: R actions recompute, not B and I."""
        again = self.recompute or (0.0,) * len(self.forward)
        inside = (0.0,) * len(again) if ahead else again
        weight = self.weight_grad or tuple(cost / 2 for cost in self.backward)
        return {
            Kind.F: self.forward,
            Kind.B: tuple(map(add, self.backward, inside)),
            Kind.I: tuple(b - w + r for b, w, r in zip(self.backward, weight, inside, strict=True)),
            Kind.W: weight,
            Kind.R: again,
        }

    def link(self, source: int, destination: int) -> Link:
        return self.links.get((source, destination), Link(self.p2p))


class Event(NamedTuple):
    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Timeline of one simulated step, in the unit of the costs."""

    schedule: Schedule
    events: tuple[Event, ...]  # computations, by rank, then in order
    makespan: float  # from the first start to the last end over all ranks
    busy: tuple[float, ...]  # per rank, the time spent computing

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Per rank, the peak number of (stage, microbatch) pairs with live activations."""
        return activation_peaks(Table.of(self.schedule.actions, self.schedule), 1)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """Per rank, the time from its first start to its last end: the step time if the next step may start at once."""
        starts = {event.rank: event.start for event in reversed(self.events)}
        ends = {event.rank: event.end for event in self.events}
        return tuple(ends[rank] - starts[rank] for rank in sorted(ends))

    @property
    def span_bubble_fraction(self) -> float:
        """Idle share of the longest span: the bubble rate of the zero-bubble paper (arXiv 2401.10241)."""
        return 1.0 - max(self.busy) / max(self.spans) if self.makespan else 0.0

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the makespan: 1 - (busy time of the busiest rank) / makespan."""
        return 1.0 - max(self.busy) / self.makespan if self.makespan else 0.0


def simulate(program: Program, costs: Costs) -> Timeline:
    """Simulate the program's lists with these costs, with the executor's semantics (rendezvous sends).

    Raise ScheduleError if the program has a fault that `validate` would find, or deadlocks."""
    schedule = program.schedule
    wiring = wire(program)
    table = wiring.table
    durations = _durations(table, costs)
    times = execute(wiring, durations.tolist(), links=[costs.link(*channel) for channel in wiring.channels])
    if times is None:
        raise deadlock(wiring)
    computes = np.flatnonzero(table.computes)
    starts = np.array(times)
    actions = compress(chain.from_iterable(table.rows), table.computes.tolist())
    ends = (starts + durations)[computes].tolist()
    columns = zip(table.rank[computes].tolist(), actions, starts[computes].tolist(), ends)
    events = tuple(map(tuple.__new__, repeat(Event), columns))
    return Timeline(
        schedule=schedule,
        events=events,
        makespan=max((event.end for event in events), default=0.0),
        busy=tuple(np.bincount(table.rank, weights=durations, minlength=schedule.num_ranks).tolist()),
    )


def least_makespan(schedule: Schedule, costs: Costs) -> float:
    """Return a lower bound on the makespan: messages take no time, and no rank waits to send."""
    table = Table.of(schedule.actions, schedule)
    durations = _durations(table, costs).tolist()
    return max(map(add, earliest_starts(table, durations, 0.0), durations))


def _durations(table: Table, costs: Costs) -> npt.NDArray[np.float64]:
    """Return the duration of each action by index; 0 for communication."""
    by_kind = np.zeros((len(CODES), table.schedule.num_stages))
    for kind, per_stage in costs.of_actions(ahead=bool(table.is_kind(Kind.R).any())).items():
        by_kind[CODES[kind]] = per_stage
    return by_kind[table.kind, table.stage]


def shared_makespan(schedule: Schedule, costs: Costs, ranks_per_core: float) -> float:
    """Return the makespan in seconds if ranks share CPU cores.

    `costs` apply while all ranks compute. With k of p ranks computing, each is min(ranks_per_core, p/k) times as fast:
    its share of the cores grows up to one whole core (processor sharing). The cores also move the messages: the time of
    a link is added as work to the sender, after the computation, and to the receiver, before it. The schedule must be
    free of deadlock."""
    seconds = _with_messages(schedule, costs)
    p = schedule.num_ranks
    position, now = [0] * p, 0.0
    ended: set[Action] = set()
    left: dict[int, float] = {}  # rank -> seconds left of its action, at the speed while all ranks compute

    def proceed(rank: int) -> None:
        row = schedule.actions[rank]
        if rank not in left and position[rank] < len(row):
            action = row[position[rank]]
            if all(needed in ended for needed in dependencies(action, schedule)):
                left[rank] = seconds[action]

    for rank in range(p):
        proceed(rank)
    while left:
        speed = min(ranks_per_core, p / len(left))
        then = now + min(left.values()) / speed
        done = []
        for rank in left:
            left[rank] -= (then - now) * speed
            # A remainder from rounding could keep the time from advancing.
            if left[rank] <= 1e-12 * then * speed:
                done.append(rank)
        now = then
        for rank in done:
            del left[rank]
            ended.add(schedule.actions[rank][position[rank]])
            position[rank] += 1
        for rank in range(p):
            proceed(rank)
    return now


def _with_messages(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """Return the seconds of each action and of the messages that it receives and sends, while all ranks compute."""
    computing = costs.of_actions(ahead=bool(schedule.recomputed))
    seconds = {action: computing[action.kind][action.stage] for row in schedule.actions for action in row}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            for needed in dependencies(action, schedule):
                source = schedule.placement[needed.stage]
                if source != rank:
                    link = costs.link(source, rank)
                    message = link.latency + link.seconds_per_message
                    seconds[action] += message
                    seconds[needed] += message
    return seconds
