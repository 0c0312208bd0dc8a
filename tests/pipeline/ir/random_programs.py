"""Random valid schedules, and random changes of programs: some are harmless, some fatal."""

import random
from collections import defaultdict
from dataclasses import replace

from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import COMPUTE, RECVS, Action, Kind, Program, Schedule


def random_schedule(
    rng: random.Random, *, max_ranks: int = 4, max_stages: int = 6, max_microbatches: int = 4
) -> Schedule:
    """Draw a schedule: each rank's list is cut from one order of all actions that respects their dependencies."""
    num_ranks, num_stages = rng.randint(1, max_ranks), rng.randint(1, max_stages)
    num_microbatches = rng.randint(1, max_microbatches)
    placement = tuple(rng.randrange(num_ranks) for _ in range(num_stages))
    forward_only = rng.random() < 0.1
    split, again = rng.choice((0.0, 0.5, 1.0)), rng.choice((0.0, 0.0, 0.5, 1.0))
    needs: dict[Action, list[Action]] = {}
    gradient: dict[tuple[int, int], Action] = {}
    for stage in reversed(range(num_stages)):
        for index in range(num_microbatches):
            forward = Action(Kind.F, stage, index)
            needs[forward] = [Action(Kind.F, stage - 1, index)] if stage else []
            if forward_only:
                continue
            kind = Kind.I if rng.random() < split else Kind.B
            backward = gradient[stage, index] = Action(kind, stage, index)
            needs[backward] = [forward, *([gradient[stage + 1, index]] if stage + 1 < num_stages else [])]
            if kind is Kind.I:
                needs[Action(Kind.W, stage, index)] = [backward]
            if rng.random() < again:
                recompute = Action(Kind.R, stage, index)
                needs[recompute] = [forward]
                needs[backward].append(recompute)
    # Draw kinds with a bias to one end or the other, so that schedules with all backwards late or early both occur.
    liking = {kind: rng.random() for kind in Kind}
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    done: set[Action] = set()
    while len(done) < len(needs):
        ready = [action for action in needs if action not in done and done.issuperset(needs[action])]
        action = max(ready, key=lambda action: liking[action.kind] + rng.random())
        rows[placement[action.stage]].append(action)
        done.add(action)
    return Schedule("random", num_microbatches, placement, tuple(map(tuple, rows)), forward_only)


def rebuilt(program: Program, lists: list[list[Action]], window: int) -> Program:
    """Replace the lists of a program, and its schedule to match them."""
    computed = tuple(tuple(action for action in row if action.kind in COMPUTE) for row in lists)
    schedule = replace(program.schedule, actions=computed)
    return Program(schedule=schedule, actions=tuple(map(tuple, lists)), send_window=window)


def late(program: Program, window: int) -> Program:
    """Post each receive as late as the order on its channel allows: a naive lowering."""
    needed = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
    lists = []
    for row in program.actions:
        queues: dict[int, list[Action]] = defaultdict(list)
        for action in row:
            if action.kind in RECVS:
                sender = program.schedule.placement[action.stage + (-1 if action.kind is Kind.RECV_F else 1)]
                queues[sender].append(action)
        kept: list[Action] = []
        for action in row:
            if action.kind in needed:
                receive = Action(needed[action.kind], action.stage, action.microbatch)
                for queue in queues.values():
                    while receive in queue:
                        kept.append(queue.pop(0))
            if action.kind not in RECVS:
                kept.append(action)
        lists.append(kept)
    return rebuilt(program, lists, window)


def mutant(program: Program, rng: random.Random) -> tuple[str, Program]:
    """Apply one random change, sometimes two."""
    lists = [list(row) for row in program.actions]
    names = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        row = rng.choice([row for row in lists if row] or [[Action(Kind.F, 0, 0)]])
        i, j = rng.randrange(len(row)), rng.randrange(len(row))
        # Moves within a rank keep the set of actions and so reach the deeper checks: they are the most frequent.
        name = rng.choice(
            (
                *("delete", "duplicate", "insert", "retarget", "other rank", "halve", "recompute"),
                *("swap", "neighbours", "move") * 5,
            )
        )
        names.append(name)
        if name == "delete":
            del row[i]
        elif name == "duplicate":
            row.insert(j, row[i])
        elif name == "insert":
            stages, microbatches = (range(program.schedule.num_stages), range(program.schedule.num_microbatches))
            row.insert(i, Action(rng.choice(list(Kind)), rng.choice(stages), rng.choice(microbatches)))
        elif name == "retarget":
            kind, stage, microbatch = row[i]
            row[i] = rng.choice(
                (
                    Action(rng.choice(list(Kind)), stage, microbatch),
                    Action(kind, stage + rng.choice((-1, 1)), microbatch),
                    Action(kind, stage, microbatch + rng.choice((-1, 1))),
                )
            )
        elif name == "other rank":
            rng.choice(lists).insert(0, row.pop(i))
        elif name == "halve":
            kind, stage, microbatch = row[i]
            if kind is Kind.B:
                row[i] = Action(Kind.I, stage, microbatch)
                row.insert(rng.randint(min(i, j), len(row)), Action(Kind.W, stage, microbatch))
            elif kind is Kind.I:
                row[i] = Action(Kind.B, stage, microbatch)
                if rng.random() < 0.8 and Action(Kind.W, stage, microbatch) in row:
                    row.remove(Action(Kind.W, stage, microbatch))
        elif name == "recompute":
            row.insert(rng.randint(0, len(row)), Action(Kind.R, row[i].stage, row[i].microbatch))
        elif name == "swap":
            row[i], row[j] = row[j], row[i]
        elif name == "neighbours":
            i = max(i, 1) if len(row) > 1 else 0
            row[i - 1], row[i] = row[i], row[i - 1]
        else:
            row.insert(j, row.pop(i))
    return "+".join(names), rebuilt(program, lists, rng.choice((1, 1, 2, 3)))


def reordered(schedule: Schedule, rng: random.Random) -> tuple[str, Program]:
    """Move some computations of a schedule and lower it again: its wiring is correct, its order may deadlock."""
    lists = [list(row) for row in schedule.actions]
    for _ in range(rng.randint(0, 4)):
        row = rng.choice([row for row in lists if row])
        row.insert(rng.randrange(len(row)), row.pop(rng.randrange(len(row))))
    program = lower(replace(schedule, actions=tuple(map(tuple, lists))), recv_prefetch=rng.choice((0, 1)))
    window = rng.choice((1, 1, 2))
    return "reordered", late(program, window) if rng.random() < 0.7 else replace(program, send_window=window)
