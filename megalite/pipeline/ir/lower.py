"""Lowering: from forwards and backwards to a program that also sends, receives and reduces."""

from bisect import bisect_left
from collections import defaultdict
from typing import NamedTuple

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import NO_MICROBATCH, Action, Kind
from megalite.pipeline.ir.dependencies import channel, dependencies, other_end, send_between
from megalite.pipeline.ir.errors import ScheduleError
from megalite.pipeline.ir.schedule import Program, Schedule
from megalite.pipeline.ir.unit_time import unit_slots


class _Message(NamedTuple):
    send: Action
    producer: Action
    consumer_position: int


def lower(schedule: Schedule, *, recv_prefetch: int = 1, send_window: int = 1) -> Program:
    """Adds the communication that the dependencies call for.

    A send follows its producer at once. A receive is posted `recv_prefetch` actions before its consumer, but no later
    than its message is sent in a run with unit costs (or with backwards of two units), and on each channel in the order
    of the sends, since NCCL matches by order alone. REDUCE_GRAD follows the last backward of its stage (and that
    backward's send, which others wait for).

    Any schedule without a deadlock among its forwards and backwards gives a program without one, for every send
    window and however late a send completes. Proof: give each event its time in the run with unit costs. A send at
    time t waits at most for the receive of an earlier message of its channel, sent at t-1 or before and posted no later
    than that. So each wait is for an earlier time, or, of a computation for its inputs, for the same time but an
    earlier phase (ends, then sends, then receives, then starts): no circle closes.

    Args:
        recv_prefetch: Actions between the posting of a receive and its consumer; 0 posts right before it. More hides
            more latency and holds more receive buffers.
        send_window: Sends that may be pending on one channel.

    Raises:
        ConfigError: `recv_prefetch` < 0 or `send_window` < 1.
        ScheduleError: an action names a stage, microbatch or rank that does not exist.
    """
    if recv_prefetch < 0:
        raise ConfigError(
            f"recv_prefetch is {recv_prefetch}; it counts actions: 0 or more (1 is the default)"
        )
    if send_window < 1:
        raise ConfigError(f"send_window is {send_window}; at least one send must be pending: 1 or more")
    for rank, row in enumerate(schedule.actions):
        for action in row:
            objection = schedule.objection(rank, action)
            if objection:
                raise ScheduleError(f"schedule {schedule.name}: {action} on rank {rank}: {objection}")

    sends, channels = _messages(schedule)
    receives = _place_receives(schedule, channels, recv_prefetch)
    lowered = []
    for rank, row in enumerate(schedule.actions):
        last_backward = {
            action.stage: position for position, action in enumerate(row) if action.kind is Kind.B
        }
        out: list[Action] = []
        for position, action in enumerate(row):
            out.extend(receives[rank][position])
            out.append(action)
            out.extend(sends[action])
            if last_backward.get(action.stage) == position:
                out.append(Action(Kind.REDUCE_GRAD, action.stage, NO_MICROBATCH))
        lowered.append(tuple(out))
    return Program(schedule=schedule, actions=tuple(lowered), send_window=send_window)


def _messages(
    schedule: Schedule,
) -> tuple[dict[Action, list[Action]], dict[tuple[int, int], list[_Message]]]:
    """The sends after each action, and the messages of each channel in the order in which they are sent."""
    sends: dict[Action, list[Action]] = defaultdict(list)
    consumer_positions: dict[Action, int] = {}
    for row in schedule.actions:
        for position, action in enumerate(row):
            for producer in dependencies(action, schedule):
                send = send_between(producer, action, schedule)
                if send is not None:
                    sends[producer].append(send)
                    consumer_positions[send] = position
    channels: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    for row in schedule.actions:
        for action in row:
            for send in sends[action]:
                message = _Message(send, action, consumer_positions[send])
                channels[channel(send, schedule)].append(message)
    return sends, channels


def _place_receives(
    schedule: Schedule, channels: dict[tuple[int, int], list[_Message]], recv_prefetch: int
) -> list[list[list[Action]]]:
    """Per rank and position, the receives to post before the action there."""
    # Equal lengths are what the proof needs; backwards of two slots, near to real ones, keep senders from waiting.
    clocks = [_Clock(schedule, backward) for backward in (1, 2)]
    receives: list[list[list[Action]]] = [[[] for _ in row] for row in schedule.actions]
    for (_, destination), messages in channels.items():
        # Backwards, because a receive must precede the consumers of all later messages of its channel too: they
        # may be consumed in another order than they are sent.
        positions = []
        latest = len(schedule.actions[destination])
        for message in reversed(messages):
            latest = min(latest, message.consumer_position)
            sent = min(clock.position(message.producer, destination) for clock in clocks)
            positions.append(min(max(latest - recv_prefetch, 0), sent))
        for position, message in zip(reversed(positions), messages, strict=True):
            receives[destination][position].append(other_end(message.send))
    return receives


class _Clock:
    """The run with whole slots: says where in its list a rank is when another's action ends."""

    def __init__(self, schedule: Schedule, backward: int) -> None:
        self.length = {Kind.F: 1, Kind.B: backward}
        self.slots = unit_slots(schedule, backward=backward)
        never = 1 + (1 + backward) * schedule.num_stages * schedule.num_microbatches
        self.starts = [[self.slots.get(action, never) for action in row] for row in schedule.actions]

    def position(self, producer: Action, rank: int) -> int:
        """The first position of the rank that starts when the producer has ended, or later."""
        if producer not in self.slots:
            return len(self.starts[rank])
        return bisect_left(self.starts[rank], self.slots[producer] + self.length[producer.kind])
