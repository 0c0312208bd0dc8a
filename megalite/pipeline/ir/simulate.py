"""Simulate a program: how long a step takes, and where its bubbles are. The costs are given in code or by a costs.json:

```json
{"unit": "ms", "forward": 18.5, "input_grad": 18.1, "weight_grad": 9.3, "p2p": 0.6,
 "links": {"3->4": {"latency": 0.9, "seconds_per_message": 0.2}},
 "memory": {"activation": 3.2e9, "deferred": 1.1e9, "kept_input": 1.6e7, "message": 1.6e7}}
```"""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress, repeat
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from megalite.config.errors import ConfigError, shortened
from megalite.config.reading import build, number, read_json
from megalite.pipeline.ir.lower import earliest_starts
from megalite.pipeline.ir.memory import Sizes, activation_peaks
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


PerStage = float | tuple[float, ...]
"""Either one number per rank or one per virtual stage; a single number applies to every rank. A number per rank is
divided evenly over its stages."""

UNITS: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Allowed units and their length in seconds."""

_TIMES = ("forward", "backward", "input_grad", "weight_grad", "recompute")
_AMOUNT = {"least": 0.0, "most": 1e15}


def _per_stage(value: Any, where: str) -> PerStage:
    if isinstance(value, list):
        return tuple(number(float, part, f"{where}[{index}]", _AMOUNT) for index, part in enumerate(value))
    return number(float, value, where, _AMOUNT)


def _links(value: Any, where: str) -> dict[tuple[int, int], Link]:
    if not isinstance(value, dict):
        raise ConfigError(f'{where} takes e.g. {{"0->1": {{"latency": 0.5}}}}, got {shortened(value)}')
    links: dict[tuple[int, int], Link] = {}
    for name, link in value.items():
        ends = re.fullmatch(r"\s*([0-9]{1,8})\s*->\s*([0-9]{1,8})\s*", name)
        if ends is None:
            raise ConfigError(f'{where} has {shortened(name)}; a link is named by two ranks, such as "0->1"')
        pair = int(ends[1]), int(ends[2])
        if pair[0] == pair[1] or pair in links:
            wrong = "joins the same rank twice" if pair[0] == pair[1] else "is listed twice"
            raise ConfigError(f"{where}: {name} {wrong}; list each pair of two ranks once")
        links[pair] = Link(**vars(build(_Link, link, f"{where}: {name}")))
    return links


_STAGES = {"read": _per_stage, "example": 1.0}


@dataclass(frozen=True, kw_only=True)
class _Link:
    """A `Link` as a file spells it."""

    latency: float = field(metadata=_AMOUNT)
    seconds_per_message: float = field(default=0.0, metadata=_AMOUNT)


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Bytes of one microbatch; `Sizes` defines when each is alive."""

    activation: PerStage = field(metadata=_STAGES)
    deferred: PerStage = field(default=0.0, metadata=_STAGES)
    kept_input: float = field(default=0.0, metadata=_AMOUNT)  # of each stage: ranks with more stages keep more inputs
    message: float = field(default=0.0, metadata=_AMOUNT)


@dataclass(frozen=True, kw_only=True)
class _CostsFile:
    forward: PerStage = field(metadata=_STAGES)
    input_grad: PerStage | None = field(default=None, metadata=_STAGES)  # None: the rest of `backward`
    weight_grad: PerStage | None = field(default=None, metadata=_STAGES)  # None: half of `backward`
    backward: PerStage | None = field(default=None, metadata=_STAGES)  # None: the sum of its halves
    recompute: PerStage | None = field(default=None, metadata=_STAGES)
    """None: nothing is recomputed, except in schedules with R actions, where each costs a forward."""
    p2p: float = field(default=0.0, metadata=_AMOUNT)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict, metadata={"read": _links})
    memory: MemoryTable | None = None
    unit: str | None = None  # of the times; None if the file does not say


@dataclass(frozen=True, kw_only=True)
class CostTable(_CostsFile):
    """Costs that do not depend on the number of stages per rank, so that one table serves several schedules.

    Default without a file: forward, input gradient and weight gradient of each rank's share cost 1 each."""

    forward: PerStage = 1.0
    input_grad: PerStage | None = 1.0
    weight_grad: PerStage | None = 1.0
    source: str = "default costs"  # the file, for error messages

    def costs(self, placement: tuple[int, ...], *, ahead: bool = False) -> Costs:
        """Return the costs of each stage. `placement`: rank of each stage; `ahead`: the schedule has R actions."""
        spread = {
            key: self._spread(key, getattr(self, key), placement) for key in _TIMES if getattr(self, key) is not None
        }
        forward, weight = spread["forward"], spread.get("weight_grad")
        backward = spread.get("backward")
        if backward is None:
            backward = tuple(map(add, spread["input_grad"], spread["weight_grad"]))
        for stage, (part, whole) in enumerate(zip(weight or backward, backward, strict=True)):
            if part > whole:
                self._fail(
                    f"weight_grad of stage {stage} is {part:g}, more than its backward {whole:g}, of which it is a part; "
                    f"use at most {whole:g}, or give input_grad instead of backward"
                )
        if not any(forward) and not any(backward):
            self._fail("forward and backward are all 0, so no time passes; use e.g. forward 1, backward 2")
        last = max(placement)
        for source, destination in self.links:
            if max(source, destination) > last:
                self._fail(f'links has "{source}->{destination}", but there are {last + 1} ranks; use 0 to {last}')
        recompute = spread.get("recompute", forward if ahead else None)
        return Costs(
            forward=forward, backward=backward, weight_grad=weight, recompute=recompute, p2p=self.p2p, links=self.links
        )

    def sizes(self, placement: tuple[int, ...]) -> Sizes | None:
        """Return the bytes of each stage of a pipeline, or None if the table has no memory."""
        if self.memory is None:
            return None
        return Sizes(
            activation=self._spread("memory.activation", self.memory.activation, placement),
            deferred=self._spread("memory.deferred", self.memory.deferred, placement),
            kept_input=(self.memory.kept_input,) * len(placement),
            message=self.memory.message,
        )

    def _spread(self, key: str, value: PerStage, placement: tuple[int, ...]) -> tuple[float, ...]:
        num_ranks, num_stages = max(placement) + 1, len(placement)
        if isinstance(value, tuple) and len(value) == num_stages:
            return value
        if isinstance(value, tuple) and len(value) != num_ranks:
            wanted = f"{num_stages}, one per stage"
            if num_ranks != num_stages:
                wanted += f", or {num_ranks}, one per rank"
            self._fail(
                f"{key} has {len(value)} values, {reprlib.repr(list(value))}, for {num_stages} stages on {num_ranks} "
                f"ranks; give {wanted}, or a single number"
            )
        of_ranks = value if isinstance(value, tuple) else (value,) * num_ranks
        return tuple(of_ranks[rank] / placement.count(rank) for rank in placement)

    def _fail(self, reason: str) -> NoReturn:
        raise ConfigError(f"{self.source}: {reason}")


def read_costs(path: Path) -> CostTable:
    """Read the table of a file. Raise ConfigError, which names the file, if it is invalid."""
    example = '{"forward": 1, "input_grad": 1, "weight_grad": 1}'
    return parse_costs(read_json(path, "costs file", example), source=str(path))


def parse_costs(data: Any, *, source: str = "costs") -> CostTable:
    """Convert parsed JSON to a table. Raise ConfigError if it is invalid.

    Keys: `forward`; `input_grad` and `weight_grad`, or `backward` (half of it is then the weight gradient; default: two
    forwards); `recompute`, `p2p`, `links`, `memory`, `unit`."""
    values = vars(build(_CostsFile, data, source))
    forward, backward, inner, weight = (values[key] for key in ("forward", "backward", "input_grad", "weight_grad"))
    if backward is not None and inner is not None:
        raise ConfigError(
            f"{source}: backward {backward} and input_grad {inner} are both set, but backward is input_grad + "
            "weight_grad; keep input_grad and weight_grad, or backward"
        )
    if backward is None and (inner is None) != (weight is None):
        present, missing = ("input_grad", "weight_grad") if weight is None else ("weight_grad", "input_grad")
        raise ConfigError(f"{source}: {present} is set without {missing}; add it, or set backward, their sum")
    if backward is None and inner is None:
        values["backward"] = tuple(2 * part for part in forward) if isinstance(forward, tuple) else 2 * forward
    if values["unit"] not in (None, *UNITS):
        raise ConfigError(f"{source}: unit is {values['unit']}; use one of {', '.join(UNITS)}, or leave it out")
    return CostTable(**values, source=source)
