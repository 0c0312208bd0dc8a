"""Random valid schedules: any placement, any order that can run, backwards whole, split or recomputed."""

import random

from megalite.pipeline.ir.schedule import Action, Kind, Schedule


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
