"""When each action runs if all take one slot and messages take none: the picture a schedule's author has in mind."""

import numpy as np

from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.table import Table

NEVER = -1
"""The slot of an action that can never start: the schedule deadlocks or misses something that it needs."""


def unit_slots(schedule: Schedule, *, backward: int = 1) -> dict[Action, int]:
    """The slot in which each action starts, as early as order and dependencies allow, if a B takes `backward` slots.

    Actions that can never start are not in the result.
    """
    table = Table.of(schedule.actions, schedule)
    starts = iter(unit_starts(table, backward=backward))
    return {
        action: start
        for row in schedule.actions
        for action, start in zip(row, starts, strict=False)
        if start != NEVER
    }


def unit_starts(table: Table, *, backward: int = 1) -> list[int]:
    """By index in the table of a schedule, the slot in which the action starts, or NEVER.

    A B takes `backward` slots, all others take one. Linear in the number of actions.
    """
    own, remote = table.producers
    lengths = np.where(table.is_kind(Kind.B), backward, 1).tolist()
    num_actions = len(lengths)
    starts = [NEVER] * num_actions
    # Two more cells: what is not there never ends, and no need is met from the start.
    ends = [NEVER] * num_actions + [NEVER, 0]
    cursors = list(table.first[:-1])
    free_from = [0] * len(cursors)
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
