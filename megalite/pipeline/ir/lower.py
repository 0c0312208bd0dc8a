"""Lower a schedule of forwards and backwards to a program that also sends, receives and reduces."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.schedule import NO_MICROBATCH, Action, ActionLists, Kind, Program, Schedule
from megalite.pipeline.ir.table import CODES, NOWHERE, IntArray, Table

NEVER = -1
"""The slot of an action that can never start, because the schedule deadlocks or lacks a dependency."""


def unit_starts(table: Table, *, backward: int = 1) -> list[int]:
    """Return `earliest_starts` for a B of `backward` slots and all other actions of one."""
    return earliest_starts(table, np.where(table.is_kind(Kind.B), backward, 1).tolist(), 0)


Time = TypeVar("Time", int, float)


def earliest_starts(table: Table, lengths: Sequence[Time], zero: Time) -> list[Time]:
    """Return, by index in the table, the earliest start that order and dependencies allow, or NEVER.

    Messages take no time. Linear in the number of actions."""
    own, remote = table.producers
    starts: list[Time] = [NEVER for _ in lengths]
    # Two more cells: a missing producer never ends, and an action without a producer may start at once.
    ends: list[Time] = list(starts)
    ends.extend((NEVER, zero))
    cursors = list(table.first[:-1])
    free_from = [zero] * len(cursors)
    waiting: list[list[int]] = [[] for _ in ends]
    ready = list(range(len(cursors)))
    while ready:
        rank = ready.pop()
        index, stop, now = cursors[rank], table.first[rank + 1], free_from[rank]
        while index < stop:
            first, second = ends[own[index]], ends[remote[index]]
            if first < 0 or second < 0:
                waiting[own[index] if first < 0 else remote[index]].append(rank)
                break
            if first > now:
                now = first
            if second > now:
                now = second
            starts[index] = now
            now += lengths[index]
            ends[index] = now
            if waiting[index]:
                ready += waiting[index]
                waiting[index] = []
            index += 1
        cursors[rank], free_from[rank] = index, now
    return starts


def lower(schedule: Schedule, *, recv_prefetch: int = 1, send_window: int = 1) -> Program:
    """Add the communication that the dependencies require.

    A send follows its producer immediately. A receive is posted `recv_prefetch` actions before its consumer, but no
    later than its message is sent in a run with unit costs (or with full backwards of two units), and on each channel
    in the order of the sends, since NCCL matches by order alone. REDUCE_GRAD follows the last B or W of its stage (and
    that B's send, which another rank waits for).

    If the computations of a schedule alone do not deadlock, neither does the program, for any placement, split or
    recomputed backwards, any send window and any delay of a send's completion. Proof: consider the run in which each
    computation takes one unit and messages take none; all times are integers. The producers of a channel's messages are
    on one rank, so no two messages of a channel are sent at the same time. A receive is posted no later than its
    message is sent: all computations before it in its list start earlier than the send, so they have ended by then. A
    send at time t waits at most for the receive of an earlier message of its channel, sent at t-1 or before and posted
    no later than that. So each wait is for an earlier time, or, if a computation waits for its inputs, for the same
    time but an earlier phase (ends, then sends, then receives, then starts): no cycle exists. Receives wait for
    nothing; the other limits only move them forward, and keep the order of each channel.

    An incomplete or deadlocking schedule is lowered as far as possible, so that `validate` can report its fault.
    A larger `recv_prefetch` (actions between the posting of a receive and its consumer) hides latency but holds buffers
    for longer. `send_window` limits the pending sends per channel."""
    if recv_prefetch < 0:
        raise ConfigError(f"recv_prefetch is {recv_prefetch}; it counts actions: 0 or more (1 is the default)")
    if send_window < 1:
        raise ConfigError(f"send_window is {send_window}; at least one send must be pending: 1 or more")
    table = Table.of(schedule.actions, schedule)
    table.refuse_illegal()
    messages = _messages(table)
    before = _receive_places(table, messages, recv_prefetch)
    return Program(schedule=schedule, actions=_assembled(table, messages, before), send_window=send_window)


class _Messages(NamedTuple):
    """Messages, ordered by channel (source rank * ranks + destination), then by their send."""

    channel: IntArray
    producer: IntArray
    consumer: IntArray
    send: IntArray  # [3, messages]: code of the kind, stage, microbatch. `receive` likewise.
    receive: IntArray


def _messages(table: Table) -> _Messages:
    parts = [np.zeros((9, 0), dtype=np.int64)]
    for crossing in table.crossings:
        consumers = table.place[CODES[crossing.reader]][crossing.stages]
        producers = table.needed(crossing.need)[crossing.stages]
        exists = (consumers != NOWHERE) & (producers != NOWHERE)
        row, microbatch = np.nonzero(exists)
        send, receive = (np.full_like(row, CODES[kind]) for kind in (crossing.send, crossing.receive))
        sent, received = (send, crossing.sources[row], microbatch), (receive, crossing.stages[row], microbatch)
        parts.append(np.stack((crossing.channels[row], producers[exists], consumers[exists], *sent, *received)))
    every = np.concatenate(parts, axis=1)
    # A faulty schedule may have two consumers of one result, which is still sent once.
    _, once = np.unique(every[1], return_index=True)
    every = every[:, once]
    every = every[:, np.lexsort((every[1], every[0]))]
    return _Messages(every[0], every[1], every[2], every[3:6], every[6:])


def _receive_places(table: Table, messages: _Messages, recv_prefetch: int) -> IntArray:
    """Return, by message, the index of the action before which its receive is posted."""
    first, num_ranks = np.array(table.first), table.schedule.num_ranks
    clocks = [_clock(table, 1)]
    # The proof needs equal lengths. Backwards of two slots are closer to real ones and keep senders from waiting.
    if table.is_kind(Kind.B).any():
        clocks.append(_clock(table, 2))
    places = np.zeros_like(messages.channel)
    for channel in np.unique(messages.channel):
        on_it = messages.channel == channel
        destination = int(channel) % num_ranks
        here = slice(first[destination], first[destination + 1])
        # Accumulated from the end: a receive must also precede the consumers of all later messages of its channel,
        # because messages may be consumed in another order than they are sent.
        latest = np.minimum.accumulate(messages.consumer[on_it][::-1])[::-1] - here.start
        place = np.maximum(latest - recv_prefetch, 0)
        for starts, ends in clocks:
            # The first action on the destination that starts at the end of the producer or later.
            sent = np.searchsorted(starts[here], ends[messages.producer[on_it]])
            place = np.minimum(place, sent)
        places[on_it] = place + here.start
    return places


def _clock(table: Table, backward: int) -> tuple[IntArray, IntArray]:
    """Return, by index, the slots in which actions start and end; actions that never start come after all others."""
    starts = np.array(unit_starts(table, backward=backward), dtype=np.int64)
    length = np.where(table.is_kind(Kind.B), backward, 1)
    last = (1 + backward) * (len(starts) + 1)
    never = starts == NEVER
    return np.where(never, last, starts), np.where(never, last + 1, starts + length)


def _assembled(table: Table, messages: _Messages, before: IntArray) -> ActionLists:
    """Return, per rank, the computations with the communication before and after each."""
    last = table.place[[CODES[Kind.B], CODES[Kind.W]]].max(axis=(0, 2))
    reduced = np.flatnonzero(last != NOWHERE)
    reductions = [Action(Kind.REDUCE_GRAD, stage, NO_MICROBATCH) for stage in reduced.tolist()]
    num_actions = len(table.kind)
    # Keys sort receives before an action, sends and reductions after it; the stable sort keeps each channel's order.
    keys = np.concatenate(
        (4 * before, 4 * np.arange(num_actions) + 1, 4 * messages.producer + 2, 4 * last[reduced] + 3)
    )
    actions = [*_actions(messages.receive), *chain.from_iterable(table.rows), *_actions(messages.send), *reductions]
    order = np.argsort(keys, kind="stable")
    bounds = np.searchsorted(keys[order], 4 * np.array(table.first)[1:-1])
    return tuple(tuple(actions[index] for index in row.tolist()) for row in np.split(order, bounds))


def _actions(columns: IntArray) -> list[Action]:
    kinds, stages, microbatches = columns.tolist()
    return list(map(Action._make, zip(map(list(Kind).__getitem__, kinds), stages, microbatches)))
