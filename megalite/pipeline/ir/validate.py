"""Prove that a program is complete, correctly wired, free of deadlock and within a memory limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megalite.config.byte_size import readable_bytes
from megalite.pipeline.ir.memory import Peak, Sizes, activation_peaks, exceeds, sufficient, table_peaks
from megalite.pipeline.ir.schedule import RECVS, SENDS, Action, Program, Schedule, ScheduleError
from megalite.pipeline.ir.table import NOWHERE, Fault, IntArray, Table, render_lists
from megalite.pipeline.ir.wiring import Wiring, check_computation, wire


@dataclass(frozen=True)
class ValidationReport:
    """Resources of a valid program, per rank. Exact, since they depend on the order of actions only."""

    peak_activations: tuple[int, ...]  # peak number of (stage, microbatch) pairs with live activations
    peak_receives: tuple[int, ...]  # peak number of receive buffers posted and not yet consumed
    sends: tuple[int, ...]  # messages sent in a step
    peak_bytes: tuple[Peak, ...] | None = None
    """Peak memory in the unit of the sizes; None without sizes."""


def validate(program: Program, *, sizes: Sizes | None = None, limit: float | None = None) -> ValidationReport:
    """Prove that the program runs to its end and computes the right results, in time linear in its length.

    Checks: each (stage, microbatch) has one F and, unless forward-only, either one B or one I and one W, and at most
    one R; ids are in range, each action is on the rank of its stage and occurs once; the results that an action reads
    are produced before it; each dependency between ranks has one send after the producer and one receive before the
    consumer, and nothing else is sent; both ends of a channel agree on the order; no rank waits forever, whether a send
    completes at once or only when its receive is posted; each stage has one REDUCE_GRAD, after its B and W; memory.

    `limit`: maximum memory of a rank, in the unit of `sizes`.

    Raises ScheduleError for the first fault. The message names rank, position and action, or the shortest cycle of
    waits, and shows the lists around them."""
    assert limit is None or sizes is not None, "a limit needs sizes"
    try:
        wiring = wire(program)
        prove_no_deadlock(wiring)
        table = wiring.table
        peaks = None if sizes is None else table_peaks(table, sizes, program.send_window)
        if peaks is not None and limit is not None:
            _check_limit(table, peaks, limit)
    except Fault as fault:
        raise ScheduleError(f"{fault}\n{render_lists(program.actions, fault.marks)}") from None
    posted = table.is_kind(*RECVS).astype(np.int64) - table.receives
    return ValidationReport(
        peak_activations=activation_peaks(table, program.send_window),
        peak_receives=tuple(int(np.cumsum(part).max(initial=0)) for part in np.split(posted, table.first[1:-1])),
        sends=tuple(np.bincount(table.rank[table.is_kind(*SENDS)], minlength=len(table.rows)).tolist()),
        peak_bytes=peaks,
    )


def validate_written(schedule: Schedule) -> None:
    """Check the computations of a user's schedule; raise ScheduleError with positions in the user's file.

    Call it before lowering. `validate` then finds the faults that involve messages: deadlock and memory.
    """
    try:
        check_computation(schedule)
    except Fault as fault:
        lists = render_lists(schedule.actions, fault.marks)
        raise ScheduleError(
            f"{fault}\n{lists}\n(rank 0 is the first line; positions count the actions of a line from 0)"
        ) from None


def _check_limit(table: Table, peaks: tuple[Peak, ...], limit: float) -> None:
    above = [rank for rank, peak in enumerate(peaks) if exceeds(peak.size, limit)]
    if not above:
        return
    rank = max(above, key=lambda rank: peaks[rank].size)
    size, position = peaks[rank]
    others = f"; {len(above)} of {len(peaks)} ranks need more than the limit" if len(above) > 1 else ""
    table.fail(
        table.first[rank] + position,
        f"here the rank holds {readable_bytes(size)}, above the limit of {readable_bytes(limit)}{others}; a limit of "
        f"{sufficient(max(peak.size for peak in peaks))} works",
    )


def execute(
    wiring: Wiring,
    durations: Sequence[float],
    *,
    links: Sequence[tuple[float, float]] | None = None,
    rendezvous: bool = True,
) -> list[float] | None:
    """Run the lists, in time linear in the number of actions. Return the start of each action, after any wait for a
    message, by index; None if the ranks deadlock.

    A message occupies its link once its send and its receive have been posted and earlier messages of the channel have
    left the link; it arrives after the link's occupancy and latency. A computation starts when its rank is free and its
    message has arrived. With `rendezvous` a send waits, if the window is full, until the oldest pending message of its
    channel has arrived (gloo; NCCL with large messages); without, sends complete at once.

    `durations`: by index, 0 for communication. `links`: per channel of the wiring, (latency, occupancy).
    """
    table = wiring.table
    waits, posts = wiring.awaited(rendezvous=rendezvous).tolist(), wiring.posted().tolist()
    channel = wiring.channel.tolist()
    speeds = links or [(0.0, 0.0)] * len(wiring.channels)
    left = [0.0] * len(wiring.channels)  # when the latest message left the channel's link
    half_posted = [-1.0] * len(channel)  # when the send or receive of a message was first posted; negative: not yet
    arrivals = [-1.0] * len(channel)
    sleepers = [-1] * len(channel)  # the rank that waits for a message, until the other rank posts its end
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
                # Both ends post messages in the same order, so all earlier messages of the channel are posted too.
                edge = channel[message]
                latency, occupancy = speeds[edge]
                left[edge] = max(left[edge], half_posted[message], now) + occupancy
                arrivals[message] = left[edge] + latency
                if sleepers[message] >= 0:
                    ready.append(sleepers[message])
            index += 1
        cursors[rank], clocks[rank] = index, now
    return starts if cursors == list(table.first[1:]) else None


class Wait(NamedTuple):
    """An action that waits for an action of another rank."""

    rank: int
    position: int
    action: Action
    awaited: Action
    awaited_rank: int

    def __str__(self) -> str:
        return f"{self.action} on rank {self.rank} -> {self.awaited} on rank {self.awaited_rank}"


def prove_no_deadlock(wiring: Wiring) -> None:
    """Run the program with sends that complete only once their receive is posted; raise Fault if it gets stuck.

    Such a run waits for everything that a run with eager sends waits for, so its success covers both."""
    if execute(wiring, [0.0] * len(wiring.table.kind)) is None:
        raise deadlock(wiring)


def deadlock(wiring: Wiring) -> Fault:
    """Return the Fault of a program that gets stuck: its shortest cycle of waits. Waits for a full send window are
    considered only if the program finishes with eager sends."""
    rendezvous = execute(wiring, [0.0] * len(wiring.table.kind), rendezvous=False) is not None
    cycle = _shortest_cycle(wiring, rendezvous=rendezvous)
    when = (
        f"when a send completes only once its receive is posted (send window {wiring.program.send_window})"
        if rendezvous
        else "whenever its sends complete"
    )
    return Fault(
        f"schedule {wiring.program.schedule.name} deadlocks {when}: {'; '.join(map(str, cycle))} (-> waits for; each "
        f"awaited action is the next wait or comes after it on that rank, and the last one closes the cycle)",
        {wait.rank: wait.position for wait in cycle},
    )


def _shortest_cycle(wiring: Wiring, *, rendezvous: bool) -> tuple[Wait, ...]:
    """Find the shortest cycle among all waits of the program, including those that no run reaches.

    A wait at position i of rank q for position j of rank q' can be followed by any wait of q' at j or before. Ties go
    to the lowest rank, then to the earliest position. Empty if no cycle exists.
    """
    reach = _furthest(wiring, rendezvous)
    best: tuple[Wait, ...] = ()
    for rank in range(wiring.program.schedule.num_ranks):
        # A shortest cycle visits each rank at most once.
        longest = len(best) - 1 if best else wiring.program.schedule.num_ranks
        best = _cycle_through(wiring, reach, rank, longest) or best
    return best


def _furthest(wiring: Wiring, rendezvous: bool) -> dict[tuple[int, int], IntArray]:
    """Return (rank, other rank) -> by position, the furthest position of the other rank that this rank depends on.

    The furthest over the waits at this position and all before it; NOWHERE before the first wait."""
    table = wiring.table
    position = np.arange(len(table.kind)) - np.array(table.first)[table.rank]
    awaited = wiring.awaited(rendezvous=rendezvous)
    waiting = np.flatnonzero(awaited != NOWHERE)
    message = awaited[waiting]
    # A reader waits for the send on the other rank, a send waits for the receive.
    remote = np.where(table.computes[waiting], wiring.send[message], wiring.receive[message])
    pairs = table.rank[waiting] * len(table.rows) + table.rank[remote]
    reach = {}
    for pair in np.unique(pairs):
        rank, other = divmod(int(pair), len(table.rows))
        chosen = pairs == pair
        furthest = np.full(len(table.rows[rank]), NOWHERE)
        furthest[position[waiting[chosen]]] = position[remote[chosen]]
        reach[rank, other] = np.maximum.accumulate(furthest)
    return reach


def _cycle_through(wiring: Wiring, reach: dict[tuple[int, int], IntArray], rank: int, longest: int) -> tuple[Wait, ...]:
    """Return the shortest cycle of at most `longest` waits that starts on `rank`; empty if there is none."""
    size = len(wiring.table.rows[rank])
    # levels[k]: other rank -> by starting position on `rank`, the furthest position there that k waits lead to.
    levels = [{rank: np.arange(size)}]
    for _ in range(longest):
        level: dict[int, IntArray] = {}
        for (source, target), furthest in reach.items():
            if source in levels[-1]:
                at = levels[-1][source]
                found = np.where(at == NOWHERE, NOWHERE, furthest[at])
                level[target] = np.maximum(level[target], found) if target in level else found
        levels.append(level)
        closed = level.get(rank, np.full(size, NOWHERE)) >= np.arange(size)
        if closed.any():
            return _traced(wiring, reach, levels, rank, int(np.argmax(closed)))
    return ()


def _traced(
    wiring: Wiring, reach: dict[tuple[int, int], IntArray], levels: list[dict[int, IntArray]], start: int, position: int
) -> tuple[Wait, ...]:
    """Return the cycle's waits, traced backwards from its end."""
    rows = wiring.table.rows
    cycle: list[Wait] = []
    target, needed = start, position
    for level in reversed(levels[:-1]):
        for (source, other), furthest in reach.items():
            if other != target or source not in level:
                continue
            latest = int(level[source][position])
            if latest == NOWHERE or furthest[latest] < needed:
                continue
            # The first wait for the needed position or a later one.
            at = int(np.searchsorted(furthest, needed))
            awaited = rows[target][int(furthest[at])]
            cycle.append(Wait(source, at, rows[source][at], awaited, target))
            target, needed = source, at
            break
    return tuple(reversed(cycle))
