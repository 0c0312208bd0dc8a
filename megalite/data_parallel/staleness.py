"""Stale-synchronous parallelism: which worker may go on, how far behind a gradient's weights are, what it then weighs.

Nothing here knows of tensors, threads or ranks: the same rules serve the server and a simulation of it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol


class Kind(IntEnum):
    """What a worker asks of the server."""

    PULL = 1
    """The newest weights, as soon as it may start its next step."""
    PUSH = 2
    """Take this gradient."""
    MEET = 3
    """The newest weights, as soon as all workers ask for that: then all get the same."""
    LEAVE = 4
    """To go, as soon as all workers ask for that."""


JOINT = (Kind.MEET, Kind.LEAVE)
"""All workers ask for these, and are answered together."""


@dataclass(frozen=True)
class Event:
    """Something that the server does: an entry in the order that all servers of a model follow."""

    kind: Kind
    worker: int
    """Its index; of what concerns all of them, 0."""


@dataclass
class Ledger:
    """How far each of the workers is.

    The clock of a worker counts its applied pushes; the version of the weights counts all of them. Bounded staleness
    (SSP, Ho et al., NeurIPS 2013): a worker may start a step while clock <= min over workers of clock + max_staleness.
    The staleness of a push is the number of other workers' pushes that were applied since its worker pulled. Between two
    of equal speed it is workers-1; it is never above (workers-1)·(2·max_staleness + 1).
    """

    workers: int
    max_staleness: int
    clocks: list[int] = field(init=False)
    held: list[int] = field(init=False)
    """The version that each worker has."""

    def __post_init__(self) -> None:
        self.clocks = [0] * self.workers
        self.held = [0] * self.workers

    @property
    def version(self) -> int:
        """Of the server's weights."""
        return sum(self.clocks)

    def may_pull(self, worker: int) -> bool:
        """The worker may start its next step."""
        return self.clocks[worker] <= min(self.clocks) + self.max_staleness

    def pulled(self, worker: int) -> None:
        """It has been given the newest weights."""
        self.held[worker] = self.version

    def staleness(self, worker: int) -> int:
        """Of a push of the worker that is applied now."""
        return self.version - self.held[worker]

    def pushed(self, worker: int) -> None:
        """Its push has been applied."""
        self.clocks[worker] += 1


def divisor(staleness: int, *, workers: int, aware: bool) -> int:
    """What the learning rate of a step is divided by for one push.

    One push is one of `workers` parts of a step. Staleness-aware (Zhang et al., arXiv 1511.05950): 1 + staleness, the age
    of the weights in updates, where that is more than the workers-1 others that a step has anyway.
    """
    return max(workers, 1 + staleness) if aware else workers


class Order(Protocol):
    """Decides what is served next."""

    def choose(self, waiting: Sequence[Event], ledger: Ledger) -> Event | None:
        """One of `waiting`: what could be served now, by arrival, and at least one. None: wait for another."""


class ByArrival:
    """First come, first served."""

    def choose(self, waiting: Sequence[Event], ledger: Ledger) -> Event | None:
        """The first."""
        return waiting[0]


class ByRank:
    """Pushes of one clock once they are all there, in the order of ranks.

    With max_staleness 0, where workers wait for each other anyway, all of them have then pulled the same version for each
    step, and the run is the same each time.
    """

    def choose(self, waiting: Sequence[Event], ledger: Ledger) -> Event | None:
        """A pull, or the push that the order says."""
        pushes = [event for event in waiting if event.kind is Kind.PUSH]
        if len(pushes) < len(waiting):
            return next(event for event in waiting if event.kind is not Kind.PUSH)
        least = min(ledger.clocks)
        if max(ledger.clocks) == least and len(pushes) < ledger.workers:
            return None
        following = ledger.clocks.index(least)
        return next((event for event in pushes if event.worker == following), None)


class Scripted:
    """What a list says, each as soon as it comes; then by arrival."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._left = deque(events)

    def choose(self, waiting: Sequence[Event], ledger: Ledger) -> Event | None:
        """The next of the list, if it is there."""
        if not self._left:
            return waiting[0]
        if self._left[0] not in waiting:
            return None
        return self._left.popleft()


@dataclass
class Report:
    """What happened since the last report."""

    staleness: Counter[int] = field(default_factory=Counter)
    """Pushes by their staleness."""
    waited: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds for which each worker's pulls waited."""

    def line(self) -> str:
        """For the log."""
        pushes = self.staleness.total()
        mean = sum(age * count for age, count in self.staleness.items()) / pushes
        ages = ", ".join(f"{age}: {count}" for age, count in sorted(self.staleness.items()))
        waits = ", ".join(f"{worker}: {seconds:.1f} s" for worker, seconds in sorted(self.waited.items()))
        return (
            f"async-parameter-server: {pushes} updates, staleness {mean:.2f} on average ({ages}); "
            f"workers waited for weights {waits}"
        )
