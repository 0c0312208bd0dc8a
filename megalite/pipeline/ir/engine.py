"""The core loop that runs a program on a clock: the same one proves it free of deadlock and predicts its time."""

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.pipeline.ir.wiring import Wiring


@dataclass(frozen=True)
class Execution:
    """What happened."""

    starts: list[float]
    """By index, when each action starts. Waiting is not part of an action, but lies before its start. 0 for those
    never reached."""
    reached: list[int]
    """Per rank, the index of the action at which it waits for ever, or one beyond its last."""
    finished: bool
    """Every rank came to its end."""


def execute(
    wiring: Wiring,
    durations: Sequence[float],
    *,
    links: Sequence[tuple[float, float]] | None = None,
    rendezvous: bool = True,
) -> Execution:
    """Runs the lists to the end or until no rank can go on, in time linear in the number of actions.

    A message is there once both its send and its receive have been posted, those before it on its channel have left
    the link, and then the link's occupancy and latency have passed. A computation starts when its rank is free and its
    message is there. A send that finds the window full waits for the oldest pending send of its channel: with
    `rendezvous` until that message is there (gloo; NCCL with large messages), else not at all, sends completing at once.

    Args:
        durations: By index, how long each action takes; 0 or more, and 0 of all but computations.
        links: Per channel of the wiring, (latency, occupancy); all 0 if left out.
    """
    table = wiring.table
    waits, posts = wiring.awaited(rendezvous=rendezvous).tolist(), wiring.posted().tolist()
    channel = wiring.channel.tolist()
    speeds = links or [(0.0, 0.0)] * len(wiring.channels)
    left = [0.0] * len(wiring.channels)  # when the last message so far left the channel's link
    half_posted = [-1.0] * len(channel)  # when the first of a message's ends was posted; negative: not yet
    arrivals = [-1.0] * len(channel)
    sleepers = [-1] * len(
        channel
    )  # the rank that waits for a message: one at most, since posting the other end wakes it
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
