"""Who waits for whom when no rank can continue: the shortest circle of waits, in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megalite.pipeline.ir.actions import Action
from megalite.pipeline.ir.table import NOWHERE, Fault, IntArray
from megalite.pipeline.ir.wiring import Wiring


@dataclass(frozen=True)
class Execution:
    """What happened."""

    starts: list[float]
    """By index, when each action starts. Waiting is not part of an action, but lies before its start. 0 for those
    never reached."""
    reached: list[int]  # per rank, the index of the action at which it waits forever, or one beyond its last
    finished: bool  # every rank came to its end


def execute(
    wiring: Wiring,
    durations: Sequence[float],
    *,
    links: Sequence[tuple[float, float]] | None = None,
    rendezvous: bool = True,
) -> Execution:
    """Runs the lists to the end or until no rank can continue, in time linear in the number of actions.

    A message is there once both its send and its receive have been posted, those before it on its channel have left
    the link, and then the link's occupancy and latency have passed. A computation starts when its rank is free and its
    message is there. A send that finds the window full waits for the oldest pending send of its channel: with
    `rendezvous` until that message is there (gloo; NCCL with large messages), else not at all, sends completing at once.

    `durations`: by index, 0 of all but computations. `links`: per channel of the wiring, (latency, occupancy).
    """
    table = wiring.table
    waits, posts = wiring.awaited(rendezvous=rendezvous).tolist(), wiring.posted().tolist()
    channel = wiring.channel.tolist()
    speeds = links or [(0.0, 0.0)] * len(wiring.channels)
    left = [0.0] * len(wiring.channels)  # when the last message so far left the channel's link
    half_posted = [-1.0] * len(channel)  # when the first of a message's ends was posted; negative: not yet
    arrivals = [-1.0] * len(channel)
    sleepers = [-1] * len(channel)  # the rank that waits for a message: posting the other end wakes it
    starts = [0.0] * len(waits)
    cursors, clocks = list(table.first[:-1]), [0.0] * (len(table.first) - 1)
    ready = list(range(len(cursors)))
    # One function on plain lists, because this is the hot loop of both the proof and every simulation.
    while ready:
        rank = ready.pop()
        index, stop, now = cursors[rank], table.first[rank + 1], clocks[rank]
        while index < stop:
            awaited = waits[index]
            if awaited >= 0:
                arrival = arrivals[awaited]
                if arrival < 0.0:
                    sleepers[awaited] = rank
                    break
                if arrival > now:
                    now = arrival
            starts[index] = now
            message = posts[index]
            if message < 0:
                now += durations[index]
            elif half_posted[message] < 0.0:
                half_posted[message] = now
            else:
                # The messages before this one have both ends posted too: their order is the same at both.
                edge = channel[message]
                latency, occupancy = speeds[edge]
                left[edge] = max(left[edge], half_posted[message], now) + occupancy
                arrivals[message] = left[edge] + latency
                if sleepers[message] >= 0:
                    ready.append(sleepers[message])
            index += 1
        cursors[rank], clocks[rank] = index, now
    return Execution(starts, cursors, cursors == list(table.first[1:]))


class Wait(NamedTuple):
    """An action that needs another, on another rank."""

    rank: int
    position: int
    action: Action
    awaited: Action
    awaited_rank: int

    def __str__(self) -> str:
        return f"{self.action} on rank {self.rank} -> {self.awaited} on rank {self.awaited_rank}"


def prove_no_deadlock(wiring: Wiring) -> None:
    """Runs the program, with sends that complete only once their receive is posted; a Fault if it gets stuck.

    Such a run waits for all that one with eager sends waits for and more, so its end proves both."""
    if not execute(wiring, [0.0] * len(wiring.table.kind)).finished:
        raise deadlock(wiring)


def deadlock(wiring: Wiring) -> Fault:
    """The fault of a program that gets stuck: its shortest circle of waits, without full send windows if there is one."""
    eager = execute(wiring, [0.0] * len(wiring.table.kind), rendezvous=False)
    circle = _shortest_cycle(wiring, rendezvous=eager.finished)
    when = (
        f"when a send completes only once its receive is posted (send window {wiring.program.send_window})"
        if eager.finished
        else "whenever its sends complete"
    )
    return Fault(
        f"schedule {wiring.program.schedule.name} deadlocks {when}: {'; '.join(map(str, circle))} (-> waits for; what is "
        f"awaited comes no earlier on its rank than the wait named next, and the last closes the circle)",
        {wait.rank: wait.position for wait in circle},
    )


def _shortest_cycle(wiring: Wiring, *, rendezvous: bool) -> tuple[Wait, ...]:
    """The fewest waits between ranks that close a circle, of all waits in the program whether a run gets to them or not.

    A wait at position i of rank q for position j of rank q' is followed by any wait of q' at j or before. Ties go to
    the lowest rank, then to the earliest position. Empty if there is no circle.
    """
    reach = _furthest(wiring, rendezvous)
    best: tuple[Wait, ...] = ()
    for rank in range(wiring.program.schedule.num_ranks):
        # A shortest circle meets a rank once, so that it is never longer than there are ranks.
        longest = len(best) - 1 if best else wiring.program.schedule.num_ranks
        best = _cycle_through(wiring, reach, rank, longest) or best
    return best


def _furthest(wiring: Wiring, rendezvous: bool) -> dict[tuple[int, int], IntArray]:
    """(rank, other rank) -> by position, the furthest position of the other that this one needs to get past its own.

    At every position what it or any before it waits for; NOWHERE before the first wait."""
    table = wiring.table
    position = np.arange(len(table.kind)) - np.array(table.first)[table.rank]
    awaited = wiring.awaited(rendezvous=rendezvous)
    waiting = np.flatnonzero(awaited != NOWHERE)
    message = awaited[waiting]
    # A reader waits for the send on the other rank, a send for the receive there.
    there = np.where(table.computes[waiting], wiring.send[message], wiring.receive[message])
    pairs = table.rank[waiting] * len(table.rows) + table.rank[there]
    reach = {}
    for pair in np.unique(pairs):
        rank, other = divmod(int(pair), len(table.rows))
        chosen = pairs == pair
        furthest = np.full(len(table.rows[rank]), NOWHERE)
        furthest[position[waiting[chosen]]] = position[there[chosen]]
        reach[rank, other] = np.maximum.accumulate(furthest)
    return reach


def _cycle_through(wiring: Wiring, reach: dict[tuple[int, int], IntArray], rank: int, longest: int) -> tuple[Wait, ...]:
    """The shortest circle of at most that many waits that starts on a rank."""
    size = len(wiring.table.rows[rank])
    # After k waits: other rank -> by starting position here, the furthest position there that is held up.
    levels = [{rank: np.arange(size)}]
    for _ in range(longest):
        held: dict[int, IntArray] = {}
        for (source, target), furthest in reach.items():
            if source in levels[-1]:
                at = levels[-1][source]
                found = np.where(at == NOWHERE, NOWHERE, furthest[at])
                held[target] = np.maximum(held[target], found) if target in held else found
        levels.append(held)
        closed = held.get(rank, np.full(size, NOWHERE)) >= np.arange(size)
        if closed.any():
            return _traced(wiring, reach, levels, rank, int(np.argmax(closed)))
    return ()


def _traced(
    wiring: Wiring, reach: dict[tuple[int, int], IntArray], levels: list[dict[int, IntArray]], start: int, position: int
) -> tuple[Wait, ...]:
    """The circle's waits, found backwards from where it closes."""
    rows = wiring.table.rows
    circle: list[Wait] = []
    target, needed = start, position
    for level in reversed(levels[:-1]):
        for (source, other), furthest in reach.items():
            if other != target or source not in level:
                continue
            latest = int(level[source][position])
            if latest == NOWHERE or furthest[latest] < needed:
                continue
            # The first wait that is for the needed position or one beyond it.
            at = int(np.searchsorted(furthest, needed))
            awaited = rows[target][int(furthest[at])]
            circle.append(Wait(source, at, rows[source][at], awaited, target))
            target, needed = source, at
            break
    return tuple(reversed(circle))
