"""When each action runs if all take one slot and messages take none: the picture a schedule's author has in mind."""

from collections import defaultdict

from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.dependencies import dependencies
from megalite.pipeline.ir.schedule import Schedule


def unit_slots(schedule: Schedule, *, backward: int = 1) -> dict[Action, int]:
    """The slot in which each action starts, as early as order and dependencies allow, if a B takes `backward` slots.

    Actions that can never start (the schedule deadlocks or misses something they need) are not in the result.
    """
    slots: dict[Action, int] = {}
    length = {Kind.F: 1, Kind.B: backward}
    cursors = [0] * schedule.num_ranks
    free_from = [0] * schedule.num_ranks
    waiting: dict[Action, list[int]] = defaultdict(list)
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        row = schedule.actions[rank]
        while cursors[rank] < len(row):
            action = row[cursors[rank]]
            start = free_from[rank]
            for needed in dependencies(action, schedule):
                slot = slots.get(needed)
                if slot is None:
                    waiting[needed].append(rank)
                    break
                start = max(start, slot + length[needed.kind])
            else:
                slots[action] = start
                free_from[rank] = start + length[action.kind]
                cursors[rank] += 1
                ready.extend(waiting.pop(action, ()))
                continue
            break
    return slots
