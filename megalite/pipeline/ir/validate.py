"""Match a program's sends and receives, and prove that it is complete, correctly wired, free of deadlock and within a memory
limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np

from megalite.config.numbers import readable_bytes
from megalite.config.run import cache_by_object
from megalite.pipeline.ir.memory import Peak, Sizes, activation_peaks, exceeds, sufficient, table_peaks
from megalite.pipeline.ir.schedule import (
    NEEDS,
    NO_MICROBATCH,
    RECEIVE_OF,
    RECVS,
    SENDS,
    Action,
    Kind,
    Program,
    Schedule,
    ScheduleError,
)
from megalite.pipeline.ir.table import CODES, NOWHERE, BoolArray, Fault, IntArray, Table, render_lists


@dataclass(frozen=True)
class Wiring:
    """A program with complete, ordered and correctly wired lists. It may still deadlock.

    Messages are numbered by channel, then in the order of their sends, which is also that of their receives."""

    program: Program
    table: Table
    channels: tuple[tuple[int, int], ...]  # (source rank, destination rank) of each channel with messages
    channel: IntArray  # per message, the index of its channel
    send: IntArray  # per message, the index of its send
    receive: IntArray
    reader: IntArray  # per message, the index of the computation that needs it

    def awaited(self, *, rendezvous: bool) -> IntArray:
        """Return, per action, the message that it waits for, or NOWHERE.

        A reader waits for its input. With `rendezvous` a send also waits for the oldest of the pending sends of its
        channel, if `send_window` are pending."""
        waits = np.full(len(self.table.kind), NOWHERE)
        waits[self.reader] = np.arange(len(self.reader))
        window = self.program.send_window
        if rendezvous and window < len(self.send):
            later = np.arange(window, len(self.send))
            later = later[self.channel[later] == self.channel[later - window]]
            waits[self.send[later]] = later - window
        return waits

    def posted(self) -> IntArray:
        """Return, per action, the message that it sends or receives, or NOWHERE."""
        posts = np.full(len(self.table.kind), NOWHERE)
        posts[self.send] = posts[self.receive] = np.arange(len(self.send))
        return posts


@cache_by_object(maxsize=4)
def wire(program: Program) -> Wiring:
    """Match and check the program's messages in time linear in its length. Raise Fault for the first error. Checked in
    this order: sizes, legality of each action, agreement with the schedule, completeness, order on each rank, messages,
    order on each channel."""
    _check_sizes(program)
    table = Table.of(program.actions, program.schedule)
    table.refuse_illegal()
    _check_same_computation(program, table)
    table.refuse_doubled()
    _check_complete(table)
    reduced = table.place[CODES[Kind.REDUCE_GRAD], :, 0] != NOWHERE
    if not (table.schedule.forward_only or reduced.all()):
        table.fail_missing(Action(Kind.REDUCE_GRAD, int(np.argmin(reduced)), NO_MICROBATCH), "")
    _check_order(table)
    _check_messages(table)
    return _in_channel_order(program, table)


def check_computation(schedule: Schedule) -> None:
    """Run the checks of `wire` that concern computations only, on the schedule's own lists; raise the first Fault."""
    table = Table.of(schedule.actions, schedule)
    table.refuse_illegal()
    table.refuse_doubled()
    _check_complete(table)
    _fail_late(table, _late_on_own_rank(table))


def _check_sizes(program: Program) -> None:
    schedule = program.schedule
    sizes = (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches, program.send_window)
    wrong = None
    if min(sizes) < 1:
        wrong = "ranks, stages, microbatches and send window are {}, {}, {}, {}; each must be 1 or more".format(*sizes)
    elif not set(schedule.placement) <= set(range(schedule.num_ranks)):
        wrong = f"placement {schedule.placement} names ranks beyond 0 to {schedule.num_ranks - 1}"
    elif len(program.actions) != schedule.num_ranks:
        wrong = f"there are {len(program.actions)} action lists for {schedule.num_ranks} ranks"
    if wrong:
        raise Fault(f"schedule {schedule.name}: {wrong}", {})


def _check_same_computation(program: Program, table: Table) -> None:
    for rank, (row, planned) in enumerate(zip(program.actions, program.schedule.actions, strict=True)):
        computes = table.computes[table.first[rank] : table.first[rank + 1]].tolist()
        if tuple(compress(row, computes)) == planned:
            continue
        pairs = zip(compress(range(len(row)), computes), planned, strict=False)
        position = next((position for position, wanted in pairs if row[position] != wanted), None)
        raise Fault(
            f"schedule {program.schedule.name}: the computations of rank {rank} in the program differ from its schedule"
            f"{'' if position is None else f': see {row[position]} at position {position}'}; lower the schedule again",
            {} if position is None else {rank: position},
        )


def _check_complete(table: Table) -> None:
    """Check that each pair of stage and microbatch has one F and one B, or I and W."""
    exists = table.place != NOWHERE
    forward, whole, inner, weight = (exists[CODES[kind]] for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    _fail_first_missing(table, Kind.F, ~forward, "")
    if table.schedule.forward_only:
        return
    doubled = whole & (inner | weight)
    if doubled.any():
        halves = table.place[[CODES[Kind.I], CODES[Kind.W]]][:, doubled]
        index = int(halves[halves != NOWHERE].min())
        _, stage, microbatch = table.action(index)
        both = Action(Kind.B, stage, microbatch)
        at = table.at(int(table.place[CODES[Kind.B], stage, microbatch]))
        table.fail(index, f"its microbatch has a full backward too, {both} {at}; a backward is either B or I and W")
    _fail_first_missing(table, Kind.B, ~(whole | inner | weight), " (or its halves, I and W)", near=Kind.F)
    _fail_first_missing(table, Kind.I, weight & ~inner, " (its W exists)", near=Kind.W)
    _fail_first_missing(table, Kind.W, inner & ~weight, " (its I exists)", near=Kind.I)


def _fail_first_missing(table: Table, kind: Kind, missing: BoolArray, remark: str, *, near: Kind | None = None) -> None:
    if not missing.any():
        return
    stage, microbatch = (int(cell[0]) for cell in np.nonzero(missing))
    found = np.flatnonzero(table.microbatch == microbatch)
    if microbatch > 0 and 0 < len(found) < table.schedule.num_stages:
        # A microbatch with very few actions is most likely a wrong number in one cell.
        places = ", ".join(f"{table.action(int(index))} {table.at(int(index))}" for index in found[:3])
        remark += f"; microbatch {microbatch} has only {places}{', ...' if len(found) > 3 else ''}"
    shown = NOWHERE if near is None else int(table.place[CODES[near], stage, microbatch])
    table.fail_missing(Action(kind, stage, microbatch), remark, shown)


_Late = tuple[int, int, Action]  # (consumer, producer or NOWHERE, the producer's action)


def _late_on_own_rank(table: Table) -> list[_Late]:
    """Return, for each dependency, the first consumer with a later producer on the same rank."""
    faults: list[_Late] = []
    for kind in (kind for kind in Kind if kind not in RECVS):
        for need in NEEDS[kind]:
            consumers, producers = table.place[CODES[kind]], table.needed(need)
            if kind is Kind.REDUCE_GRAD:
                consumers, producers = consumers[:, 0], producers.max(axis=1)
            faults += _first_late(table, consumers, producers)
    return faults


def _check_order(table: Table) -> None:
    """Check that each action comes after its producers on the same rank and after the receives of its messages."""
    faults = _late_on_own_rank(table)
    for crossing in table.crossings:
        readers = table.place[CODES[crossing.reader]][crossing.stages]
        for kind, offset in ((crossing.receive, 0), (crossing.send, crossing.need.offset)):
            lacking = (readers != NOWHERE) & (table.place[CODES[kind]][crossing.stages + offset] == NOWHERE)
            if lacking.any():
                reader = int(readers[lacking].min())
                _, stage, microbatch = table.action(reader)
                faults.append((reader, NOWHERE, Action(kind, stage + offset, microbatch)))
        faults += _first_late(table, readers, table.place[CODES[crossing.receive]][crossing.stages])
    _fail_late(table, faults)


def _fail_late(table: Table, faults: list[_Late]) -> None:
    if faults:
        index, producer, needed = min(faults)
        late = "does not exist" if producer == NOWHERE else f"comes only later, {table.at(producer)}"
        table.fail(index, f"it needs {needed}, which {late}")


def _first_late(table: Table, consumers: IntArray, producers: IntArray) -> list[_Late]:
    """Return the first consumer with its producer later on the same rank, if any. NOWHERE is before all indices."""
    late = (consumers != NOWHERE) & (producers > consumers) & (table.rank[producers] == table.rank[consumers])
    if not late.any():
        return []
    which = int(np.argmin(np.where(late, consumers, len(table.kind))))
    producer = int(producers.reshape(-1)[which])
    return [(int(consumers.reshape(-1)[which]), producer, table.action(producer))]


def _check_messages(table: Table) -> None:
    """Check that every send and receive is needed by a computation."""
    wanted = np.zeros((len(CODES), table.schedule.num_stages), dtype=bool)
    for crossing in table.crossings:
        wanted[CODES[crossing.receive], crossing.stages] = True
        wanted[CODES[crossing.send], crossing.sources] = True
    surplus = table.is_kind(*SENDS, *RECVS) & ~wanted[table.kind, table.stage]
    if surplus.any():
        table.fail(int(np.argmax(surplus)), "no action on another rank depends on this message")


def _in_channel_order(program: Program, table: Table) -> Wiring:
    parts = [np.zeros((4, 0), dtype=np.int64)]
    for crossing in table.crossings:
        readers = table.place[CODES[crossing.reader]][crossing.stages]
        receives = table.place[CODES[crossing.receive]][crossing.stages]
        sends = table.place[CODES[crossing.send]][crossing.sources]
        keys = np.broadcast_to(crossing.channels[:, None], readers.shape)
        parts.append(np.stack((keys, sends, receives, readers))[:, readers != NOWHERE])
    messages = np.concatenate(parts, axis=1)
    key, send, receive, reader = messages[:, np.lexsort((messages[1], messages[0]))]
    in_order = receive[np.lexsort((receive, key))]
    wrong = np.flatnonzero(in_order != receive)
    if len(wrong):
        message = int(wrong[np.argmin(in_order[wrong])])
        number = message - int(np.argmax(key == key[message]))
        _fail_channel_order(table, int(in_order[message]), int(send[message]), number)
    used, channel = np.unique(key, return_inverse=True)
    channels = tuple(divmod(edge, program.schedule.num_ranks) for edge in used.tolist())
    return Wiring(program, table, channels, channel, send, receive, reader)


def _fail_channel_order(table: Table, receive: int, send: int, number: int) -> None:
    sent = table.action(send)
    kind, offset = RECEIVE_OF[sent.kind]
    table.fail(
        receive,
        f"message {number} from rank {table.rank[send]} to rank {table.rank[receive]} is {sent}, {table.at(send)}, so "
        f"{Action(kind, sent.stage + offset, sent.microbatch)} must be posted here: a channel delivers in the order of "
        f"the sends",
    )


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

    Call it before lowering. `validate` then finds the faults that involve messages: deadlock and memory."""
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

    `durations`: by index, 0 for communication. `links`: per channel of the wiring, (latency, occupancy)."""
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
    to the lowest rank, then to the earliest position. Empty if no cycle exists."""
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
