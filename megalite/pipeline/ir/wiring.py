"""Match a program's sends and receives, and check everything about a program except deadlock and memory."""

from dataclasses import dataclass
from itertools import compress

import numpy as np

from megalite.config.run import cache_by_object
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
)
from megalite.pipeline.ir.table import CODES, NOWHERE, BoolArray, Fault, IntArray, Table


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
        wrong = f"placement {schedule.placement} names a rank beyond 0 to {schedule.num_ranks - 1}"
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
    _fail_first_missing(table, Kind.B, ~(whole | inner | weight), " (or its halves, I and W)", beside=Kind.F)
    _fail_first_missing(table, Kind.I, weight & ~inner, " (its W exists)", beside=Kind.W)
    _fail_first_missing(table, Kind.W, inner & ~weight, " (its I exists)", beside=Kind.I)


def _fail_first_missing(
    table: Table, kind: Kind, missing: BoolArray, remark: str, *, beside: Kind | None = None
) -> None:
    if not missing.any():
        return
    stage, microbatch = (int(cell[0]) for cell in np.nonzero(missing))
    found = np.flatnonzero(table.microbatch == microbatch)
    if microbatch > 0 and 0 < len(found) < table.schedule.num_stages:
        # A microbatch with very few actions is most likely a wrong number in one cell.
        places = ", ".join(f"{table.action(int(index))} {table.at(int(index))}" for index in found[:3])
        remark += f"; microbatch {microbatch} has only {places}{', ...' if len(found) > 3 else ''}"
    shown = NOWHERE if beside is None else int(table.place[CODES[beside], stage, microbatch])
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
        wanted[CODES[crossing.send], crossing.stages + crossing.need.offset] = True
    surplus = table.is_kind(*SENDS, *RECVS) & ~wanted[table.kind, table.stage]
    if surplus.any():
        table.fail(int(np.argmax(surplus)), "no action on another rank depends on this message")


def _in_channel_order(program: Program, table: Table) -> Wiring:
    num_ranks, placement = program.schedule.num_ranks, np.array(program.schedule.placement)
    parts = [np.zeros((4, 0), dtype=np.int64)]
    for crossing in table.crossings:
        sources = crossing.stages + crossing.need.offset
        readers = table.place[CODES[crossing.reader]][crossing.stages]
        receives = table.place[CODES[crossing.receive]][crossing.stages]
        sends = table.place[CODES[crossing.send]][sources]
        keys = np.broadcast_to((placement[sources] * num_ranks + placement[crossing.stages])[:, None], readers.shape)
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
    channels = tuple(divmod(edge, num_ranks) for edge in used.tolist())
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
