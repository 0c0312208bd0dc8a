"""Small changes to a plan, judged by the simulator, for as long as one helps."""

from collections.abc import Iterator

from megalite.planner.chain.judging import Judge, Judged
from megalite.planner.chain.placement import Counts, placements, taken_from
from megalite.planner.chain.plan import ChainPlan, Stage, Stages


def refine(judge: Judge, start: Judged, *, work: int) -> Judged:
    """The plan, bettered by a faster neighbour again and again, until there is none or enough has been simulated.

    Neighbours are taken in the order of their latency formula; those that cannot be faster by it are not simulated.

    Args:
        work: Microbatches times stages to simulate at most.
    """
    best, last = start, judge.work + work
    while judge.work < last:
        better = _faster_neighbour(judge, best, last)
        if better is None:
            break
        best = better
    return best


def _faster_neighbour(judge: Judge, best: Judged, last: int) -> Judged | None:
    plans = dict.fromkeys(_variants(best.plan, judge))
    for bound, _, plan in sorted((judge.bound(plan), order, plan) for order, plan in enumerate(plans)):
        if bound >= best.seconds or judge.work >= last:
            break
        if judge.fits(plan) and judge.seconds(plan) < best.seconds:
            return Judged(plan, judge.seconds(plan), judge.memory(plan))
    return None


def _variants(plan: ChainPlan, judge: Judge) -> Iterator[ChainPlan]:
    """Other stages under the same schedule, and the same stages with the next number of microbatches."""
    for stages in neighbours(plan.stages, judge):
        warm_up = plan.warm_up if len(stages) > 1 else "pa"
        yield judge.problem.plan(stages, plan.microbatches, warm_up)
    counts = judge.problem.microbatch_counts()
    here = counts.index(plan.microbatches)
    for count in counts[max(0, here - 1) : here + 2]:
        yield judge.problem.plan(plan.stages, count, plan.warm_up)


def neighbours(stages: Stages, judge: Judge) -> Iterator[Stages]:
    """Cuts moved by one or two layers, two stages joined, one split, a device given to another stage or left out."""
    for s in range(len(stages) - 1):
        here, there = stages[s], stages[s + 1]
        for step in (-2, -1, 1, 2):
            middle = here.last + step
            if here.first < middle < there.last:
                moved = (here._replace(last=middle), there._replace(first=middle))
                yield (*stages[:s], *moved, *stages[s + 2 :])
        joined = Stage(here.first, there.last, _sum(here.devices, there.devices))
        yield (*stages[:s], joined, *stages[s + 2 :])
    yield from _splits(stages, judge)
    yield from _device_moves(stages, judge)


def _splits(stages: Stages, judge: Judge) -> Iterator[Stages]:
    whole = judge.problem.cluster.gpus_per_machine
    for s, stage in enumerate(stages):
        middle = (stage.first + stage.last) // 2
        if stage.replicas < 2 or middle == stage.first:
            continue
        half = stage.replicas // 2
        for wanted in (half, stage.replicas - half):
            for taken in placements(stage.devices, wanted, whole=whole):
                first = Stage(stage.first, middle, taken)
                second = Stage(middle, stage.last, taken_from(stage.devices, taken))
                yield (*stages[:s], first, second, *stages[s + 1 :])


def _device_moves(stages: Stages, judge: Judge) -> Iterator[Stages]:
    """A device left out, one taken in, one handed to the stage beside or to the slowest."""
    used: Counts = (0,) * judge.problem.cluster.machines
    for stage in stages:
        used = _sum(used, stage.devices)
    free = taken_from(judge.problem.cluster.empty, used)
    slowest = max(range(len(stages)), key=lambda s: _work(stages[s], judge))
    for giver, stage in enumerate(stages):
        for machine in range(len(free)):
            if free[machine]:
                yield _changed(stages, {giver: _with(stage, machine, 1)})
            if not stage.devices[machine] or stage.replicas == 1:
                continue
            poorer = _with(stage, machine, -1)
            yield _changed(stages, {giver: poorer})
            for taker in {giver - 1, giver + 1, slowest} & set(range(len(stages))) - {giver}:
                yield _changed(stages, {giver: poorer, taker: _with(stages[taker], machine, 1)})


def _work(stage: Stage, judge: Judge) -> float:
    """Seconds a sample, shared by the replicas."""
    profile = judge.problem.profile
    seconds = profile.forward + profile.backward
    return float(seconds[stage.last] - seconds[stage.first]) / stage.replicas


def _changed(stages: Stages, new: dict[int, Stage]) -> Stages:
    return tuple(new.get(number, stage) for number, stage in enumerate(stages))


def _sum(one: Counts, other: Counts) -> Counts:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _with(stage: Stage, machine: int, change: int) -> Stage:
    devices = stage.devices
    return stage._replace(devices=(*devices[:machine], devices[machine] + change, *devices[machine + 1 :]))
