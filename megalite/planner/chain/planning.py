"""The planner for chains: all ways of planning, one judge, the fastest, and small changes for as long as one helps."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megalite.config.byte_size import format_bytes
from megalite.config.errors import ConfigError
from megalite.planner.chain.baselines import data_parallel, even_stages, pipedream_plan, straight
from megalite.planner.chain.dapple import Search
from megalite.planner.chain.inputs import ChainCluster, ChainProfile
from megalite.planner.chain.judge import Judge, Judged, Problem
from megalite.planner.chain.plan import ChainPlan, Counts, Stage, Stages, placements, taken_from


def refine(judge: Judge, start: Judged, *, work: int) -> Judged:
    """The plan, bettered by a faster neighbour again and again, until there is none or enough has been simulated.

    Neighbours are taken in the order of their latency formula; those that cannot be faster by it are not simulated, and at
    most `work` microbatches times stages are.
    """
    best: Judged | None = start
    last = judge.work + work
    while best is not None and judge.work < last:
        start, best = best, _faster_neighbour(judge, best, last)
    return best or start


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

    def moved(machine: int, changes: dict[int, int]) -> Stages:
        """Each stage with so many devices of a machine more."""
        unit = tuple(int(m == machine) for m in range(len(free)))
        return tuple(
            stage._replace(devices=_sum(stage.devices, tuple(changes.get(s, 0) * one for one in unit)))
            for s, stage in enumerate(stages)
        )

    for giver, stage in enumerate(stages):
        for machine in range(len(free)):
            if free[machine]:
                yield moved(machine, {giver: 1})
            if not stage.devices[machine] or stage.replicas == 1:
                continue
            yield moved(machine, {giver: -1})
            for taker in {giver - 1, giver + 1, slowest} & set(range(len(stages))) - {giver}:
                yield moved(machine, {giver: -1, taker: 1})


def _work(stage: Stage, judge: Judge) -> float:
    """Seconds a sample, shared by the replicas."""
    profile = judge.problem.profile
    seconds = profile.forward + profile.backward
    return float(seconds[stage.last] - seconds[stage.first]) / stage.replicas


def _sum(one: Counts, other: Counts) -> Counts:
    return tuple(a + b for a, b in zip(one, other, strict=True))


PIPEDREAM, DATA_PARALLEL, STRAIGHT = "PipeDream", "data parallel", "straight pipeline"
BASELINES = (PIPEDREAM, DATA_PARALLEL, STRAIGHT)
_NODES = 2000  # partial plans that the search looks into for each number of microbatches
_KEEP = 20  # plans that it hands to the judge
_REFINED = 6  # of its plans, how many are changed a little
_WORK = 40_000  # microbatches times stages that are simulated for each of these
_MOST_COUNTS = 48
_REACH = 1.1  # a plan this much slower than the fastest may still be the one that small changes make the fastest


class Planned(NamedTuple):
    """What `plan_chain` found.

    The baselines have the microbatches and the warm-up that suit them best; where none of these fits the memory, those that
    are fastest if there were enough. Complete: the search never stopped at its limit, so memory aside no plan placed in
    the three ways has a lower latency formula than those that were judged.
    """

    best: Judged  # the fastest plan that fits the memory
    baselines: Mapping[str, Judged]
    nodes: int  # partial plans that the search looked into
    complete: bool
    simulations: int  # plans that were simulated


def plan_chain(
    profile: ChainProfile, cluster: ChainCluster, global_batch: int, *, memory: float | None = None
) -> Planned:
    """The fastest plan of synchronous training: stages, replicas, placement and microbatches.

    Judged are the baselines, pipelines of equal stages, what the branch and bound finds for each number of
    microbatches, and small changes to the best of these: so the result is never slower than a baseline that fits.

    `memory` is bytes of a device (default what the cluster has; `inf` lifts the limit). Raises ConfigError if the batch
    cannot be used, or no plan fits the memory (the nearest miss is named).
    """
    limit = cluster.memory_gb * 1e9 if memory is None else memory
    if global_batch < 1:
        raise ConfigError(f"global_batch_size is {global_batch}; it must be 1 or more, such as {profile.batch_size}")
    problem = Problem(profile, cluster, global_batch, limit)
    counts = problem.microbatch_counts()
    if len(counts) > _MOST_COUNTS:
        raise ConfigError(
            f"global_batch_size {global_batch} can be cut into microbatches in {len(counts)} ways, more than the "
            f"{_MOST_COUNTS} that are searched; use a power of 2 near it, such as {1 << global_batch.bit_length() - 1}"
        )
    judge = Judge(problem)
    stages_of = {
        PIPEDREAM: pipedream_plan(profile, cluster),
        DATA_PARALLEL: data_parallel(profile, cluster),
        STRAIGHT: straight(profile, cluster),
    }
    baselines = {}
    for name, stages in stages_of.items():
        plan = judge.best(stages) or judge.best(stages, within_memory=False)
        assert plan is not None
        baselines[name] = plan
    candidates = dict.fromkeys(stages_of.values())
    for count in range(2, min(cluster.num_gpus, len(profile.layers)) + 1):
        candidates[even_stages(profile, cluster, count)] = None
        candidates[even_stages(profile, cluster, count, each=1)] = None
    judged = _judge(judge, candidates, {})
    nodes, complete, whole = 0, True, cluster.gpus_per_machine
    # Whole machines, then halves of them, single devices: what a coarse search finds lets a fine one drop most prefixes.
    for grain in sorted({whole, max(1, whole // 2), 1}, reverse=True):
        complete = True
        for count in counts:
            fastest = min((plan.seconds for plan in judged.values()), default=float("inf"))
            found = Search(problem, count, limit=_NODES, keep=_KEEP, grain=grain).run(fastest)
            nodes, complete = nodes + found.nodes, complete and found.complete
            judged = _judge(judge, dict.fromkeys(stages for _, stages in found.plans), judged)
    if not judged:
        raise _nothing_fits(judge, candidates)
    # The fastest plan of each number of stages: small changes seldom lead from one number to another.
    unlike: dict[int, Judged] = {}
    for plan in sorted(judged.values(), key=lambda plan: plan.seconds):
        unlike.setdefault(len(plan.plan.stages), plan)
    refined = [refine(judge, plan, work=_WORK) for plan in list(unlike.values())[:_REFINED]]
    best = min([*judged.values(), *refined], key=lambda plan: plan.seconds)
    return Planned(best, baselines, nodes, complete, len(judge.known))


def _judge(judge: Judge, candidates: dict[Stages, None], judged: dict[Stages, Judged]) -> dict[Stages, Judged]:
    """With the candidates that may come within reach of the fastest."""
    judged = dict(judged)
    fastest = min((plan.seconds for plan in judged.values()), default=float("inf"))
    for promise, stages in sorted((judge.promise(stages), stages) for stages in candidates):
        if stages in judged or promise == float("inf"):
            continue
        found = judge.best(stages, below=_REACH * fastest)
        if found is not None:
            judged[stages] = found
            fastest = min(fastest, found.seconds)
    return judged


def _nothing_fits(judge: Judge, candidates: dict[Stages, None]) -> ConfigError:
    problem = judge.problem
    counts = problem.microbatch_counts()
    needs = [(max(judge.memory(problem.plan(stages, count))), len(stages)) for stages in candidates for count in counts]
    least, stages = min(needs)
    return ConfigError(
        f"no plan for {problem.profile.name} on {problem.cluster.name} fits {format_bytes(problem.memory)} a device: the "
        f"nearest, in {stages} stage{'s' * (stages > 1)}, needs {format_bytes(least)}; give more memory, more devices or smaller layers"
    )
