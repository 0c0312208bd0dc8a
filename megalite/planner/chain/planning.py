"""Plan a chain: candidates from all methods are simulated, and small changes improve the fastest ones."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megalite.config.errors import ConfigError
from megalite.config.numbers import format_bytes
from megalite.planner.chain.dapple import Search
from megalite.planner.chain.inputs import Array, ChainCluster, ChainProfile
from megalite.planner.chain.plan import (
    GIGA,
    ChainPlan,
    Counts,
    Judge,
    Judged,
    Problem,
    Stage,
    Stages,
    append_first,
    hop_seconds,
    placements,
    shares,
    taken_from,
)


def pipedream_plan(profile: ChainProfile, cluster: ChainCluster) -> Stages:
    """Return the stages that minimise PipeDream's objective on all devices of the cluster.

    For m components of a level with bandwidth B and layers i..j: U is the time of one component (the sum of its layers,
    or the lower level's optimum for a whole machine), w weights, a outputs (of a microbatch of the profile's batch
    size):

        T(i, j, m) = (U(i, j) + 4 (m - 1) w / (B m)) / m
        A(i, j, m) = min(T(i, j, m), min over s, m' of max(A(i, s, m - m'), 2 a_s / (B m'), T(s, j, m')))

    A of one level is U of the next. The objective is the time between microbatches of a pipeline that never drains and
    reduces gradients after each microbatch; it ignores a synchronous step's bubble and its single reduction.

    Source: Narayanan et al., "PipeDream" (SOSP 2019), section 3.1."""
    layers, size = len(profile.layers), profile.batch_size
    work = (profile.forward + profile.backward) * size
    own = work[None, :] - work[:, None]
    levels = []
    for components, reduce, message in (
        (cluster.gpus_per_machine, cluster.link_gb_per_s, cluster.link_gb_per_s),
        (cluster.machines, cluster.network_gb_per_s, cluster.message_gb_per_s),
    ):
        level = _Solver(profile, own, components, reduce * GIGA, message * GIGA)
        levels.append(level)
        own = level.best[:, :, components - 1]
    found: list[Stage] = []
    inner, outer = levels
    machine = 0
    for first, last, machines in outer.stages(0, layers, cluster.machines):
        for begin, end, devices in inner.stages(first, last, cluster.gpus_per_machine):
            counts = [0] * cluster.machines
            counts[machine : machine + machines] = [devices] * machines
            found.append(Stage(begin, end, tuple(counts)))
        machine += machines
    return tuple(found)


class _Solver:
    """One level of the dynamic program, for all intervals of layers at once."""

    def __init__(self, profile: ChainProfile, own: Array, components: int, reduce: float, message: float) -> None:
        layers = len(profile.layers)
        weights = profile.parameters[None, :] - profile.parameters[:, None]
        m = np.arange(1, components + 1)
        replicated = (own[:, :, None] + 4.0 * (m - 1) * weights[:, :, None] / (reduce * m)) / m
        # An empty interval of layers is not a stage.
        legal = np.arange(layers + 1)[:, None] < np.arange(layers + 1)[None, :]
        replicated[~legal] = np.inf
        self._alone = replicated
        self._hops = 2.0 * profile.outputs * profile.batch_size / message
        self.best = replicated.copy()
        self._cut = np.full(replicated.shape, -1)
        self._tail = np.zeros(replicated.shape, dtype=int)
        for total in range(2, components + 1):
            for tail in range(1, total):
                self._try(total, tail)

    def _try(self, total: int, tail: int) -> None:
        """Improve the optimum of `total` components by plans with `tail` of them in the last stage."""
        head = np.maximum(self.best[:, :, total - tail - 1], self._hops[None, :] / tail)
        # [i, s, j]: the optimum of i..s, then a stage s..j.
        slowest = np.maximum(head[:, :, None], self._alone[None, :, :, tail - 1])
        cut = slowest.argmin(axis=1)
        value = np.take_along_axis(slowest, cut[:, None, :], axis=1)[:, 0, :]
        better = value < self.best[:, :, total - 1]
        self.best[:, :, total - 1][better] = value[better]
        self._cut[:, :, total - 1][better] = cut[better]
        self._tail[:, :, total - 1][better] = tail

    def stages(self, first: int, last: int, components: int) -> list[tuple[int, int, int]]:
        """Return (first layer, end, components) of the best plan's stages, in order."""
        found: list[tuple[int, int, int]] = []
        while True:
            cut = int(self._cut[first, last, components - 1])
            if cut < 0:
                return [(first, last, components), *reversed(found)]
            tail = int(self._tail[first, last, components - 1])
            found.append((cut, last, tail))
            last, components = cut, components - tail


def data_parallel(profile: ChainProfile, cluster: ChainCluster) -> Stages:
    return (Stage(0, len(profile.layers), cluster.empty),)


def straight(profile: ChainProfile, cluster: ChainCluster) -> Stages:
    """Return one device per stage, as many stages as possible, cut to minimise the slowest stage or message."""
    return even_stages(profile, cluster, min(cluster.num_gpus, len(profile.layers)), each=1)


def even_stages(profile: ChainProfile, cluster: ChainCluster, count: int, *, each: int | None = None) -> Stages:
    """Return `count` stages on `each` devices (default: all devices, evenly; early stages have more). Machines are
    filled one after another. The cut minimises the slowest stage or message."""
    devices = cluster.num_gpus
    sizes = [each or devices // count + (number < devices % count) for number in range(count)]
    free, places = cluster.empty, []
    for size in sizes:
        places.append(append_first(free, size, whole=cluster.gpus_per_machine))
        free = taken_from(free, places[-1])
    hops = [hop_seconds(shares(source, target), 1.0, cluster) for source, target in pairwise(places)]
    cuts = cut(profile, sizes, hops)
    return tuple(map(Stage, cuts, cuts[1:], places))


def cut(profile: ChainProfile, devices: list[int], hops: list[float]) -> list[int]:
    """Return the stages' boundaries, with at least one layer each, that minimise the maximum over stages and messages.
    `devices`: number per stage. `hops`: seconds per byte between stages."""
    work = profile.forward + profile.backward
    layers, count = len(profile.layers), len(devices)
    best = np.full((count + 1, layers + 1), np.inf)
    best[0, 0] = 0.0
    begin = np.zeros((count + 1, layers + 1), dtype=int)
    for number, (size, hop) in enumerate(zip(devices, [*hops, 0.0], strict=True)):
        # [i, j]: previous stages end at i, this one at j.
        slowest = np.maximum(best[number][:, None], (work[None, :] - work[:, None]) / size)
        slowest = np.maximum(slowest, hop * profile.outputs[None, :])
        slowest[np.tri(layers + 1, dtype=bool)] = np.inf
        begin[number + 1] = slowest.argmin(axis=0)
        best[number + 1] = slowest.min(axis=0)
    cuts = [layers]
    for number in range(count, 0, -1):
        cuts.append(int(begin[number, cuts[-1]]))
    return cuts[::-1]


def refine(judge: Judge, start: Judged, *, work: int) -> Judged:
    """Move to a faster neighbour repeatedly, until none is faster or `work` microbatches times stages were simulated.
    Neighbours are tried in the order of their latency formula, which rules out those that cannot be faster."""
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
    """Yield plans with changed stages, and with the next lower or higher number of microbatches."""
    for stages in neighbours(plan.stages, judge):
        warm_up = plan.warm_up if len(stages) > 1 else "pa"
        yield judge.problem.plan(stages, plan.microbatches, warm_up)
    counts = judge.problem.microbatch_counts()
    place = counts.index(plan.microbatches)
    for count in counts[max(0, place - 1) : place + 2]:
        yield judge.problem.plan(plan.stages, count, plan.warm_up)


def neighbours(stages: Stages, judge: Judge) -> Iterator[Stages]:
    """Yield stages with a cut moved by one or two layers, two joined, one split, or a device moved, added or removed."""
    for s in range(len(stages) - 1):
        left, right = stages[s], stages[s + 1]
        for step in (-2, -1, 1, 2):
            middle = left.last + step
            if left.first < middle < right.last:
                moved = (left._replace(last=middle), right._replace(first=middle))
                yield (*stages[:s], *moved, *stages[s + 2 :])
        joined = Stage(left.first, right.last, _sum(left.devices, right.devices))
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
    """Yield stages with one device removed, added, or moved to an adjacent stage or the slowest."""
    used: Counts = (0,) * judge.problem.cluster.machines
    for stage in stages:
        used = _sum(used, stage.devices)
    free = taken_from(judge.problem.cluster.empty, used)
    work = judge.problem.profile.forward + judge.problem.profile.backward  # seconds per sample before each cut
    slowest = max(range(len(stages)), key=lambda s: (work[stages[s].last] - work[stages[s].first]) / stages[s].replicas)

    def moved(machine: int, changes: dict[int, int]) -> Stages:
        """Add `changes` to the numbers of devices per stage on a machine."""
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


def _sum(one: Counts, other: Counts) -> Counts:
    return tuple(a + b for a, b in zip(one, other, strict=True))


PIPEDREAM, DATA_PARALLEL, STRAIGHT = "PipeDream", "data parallel", "straight pipeline"
_NODES = 2000  # partial plans that the search expands per number of microbatches
_KEEP = 20  # plans per search that are judged
_REFINED = 6  # number of plans that are refined
_WORK = 40_000  # microbatches times stages simulated per refinement
_MOST_COUNTS = 48
_REACH = 1.1  # slower plans, up to this factor, may become the fastest by refinement


class Planned(NamedTuple):
    """Result of `plan_chain`. Baselines have their best microbatches and warm-up that fit into memory, or the fastest
    ones if none fits. Complete: the search never stopped at its limit, so apart from memory no plan placed by the three
    policies has a lower latency formula than the judged ones."""

    best: Judged  # the fastest plan that fits the memory
    baselines: Mapping[str, Judged]
    nodes: int  # partial plans that the search expanded
    complete: bool
    simulations: int  # plans that were simulated


def plan_chain(
    profile: ChainProfile, cluster: ChainCluster, global_batch: int, *, memory: float | None = None
) -> Planned:
    """Return the fastest plan for synchronous training: stages, replicas, placement and microbatches.

    Candidates are the baselines, pipelines of equal stages, the results of branch and bound per number of microbatches,
    and small changes to the best of these; so the result is never slower than a baseline that fits.

    `memory`: bytes per device (default: the cluster's; `inf`: no limit). Raises ConfigError if the batch cannot be
    used, or no plan fits (with the least memory needed)."""
    limit = cluster.memory_gb * 1e9 if memory is None else memory
    if global_batch < 1:
        raise ConfigError(f"global_batch_size is {global_batch}; it must be 1 or more, such as {profile.batch_size}")
    problem = Problem(profile, cluster, global_batch, limit)
    counts = problem.microbatch_counts()
    if len(counts) > _MOST_COUNTS:
        raise ConfigError(
            f"global_batch_size {global_batch} has {len(counts)} divisors; use {1 << global_batch.bit_length() - 1}"
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
    # From whole machines to single devices: results of a coarse search let a fine one drop most prefixes.
    for grain in sorted({whole, max(1, whole // 2), 1}, reverse=True):
        complete = True
        for count in counts:
            fastest = min((plan.seconds for plan in judged.values()), default=float("inf"))
            found = Search(problem, count, limit=_NODES, keep=_KEEP, grain=grain).run(fastest)
            nodes, complete = nodes + found.nodes, complete and found.complete
            judged = _judge(judge, dict.fromkeys(stages for _, stages in found.plans), judged)
    if not judged:
        least = min(max(judge.memory(problem.plan(each, count))) for each in candidates for count in counts)
        what = f"no plan for {profile.name} on {cluster.name} fits {format_bytes(problem.memory)} per device"
        raise ConfigError(f"{what}: the smallest needs {format_bytes(least)}; use more memory or more devices")
    # The fastest plan per number of stages: small changes seldom lead from one number to another.
    fastest_by_count: dict[int, Judged] = {}
    for plan in sorted(judged.values(), key=lambda plan: plan.seconds):
        fastest_by_count.setdefault(len(plan.plan.stages), plan)
    refined = [refine(judge, plan, work=_WORK) for plan in list(fastest_by_count.values())[:_REFINED]]
    best = min([*judged.values(), *refined], key=lambda plan: plan.seconds)
    return Planned(best, baselines, nodes, complete, len(judge.known))


def _judge(judge: Judge, candidates: dict[Stages, None], judged: dict[Stages, Judged]) -> dict[Stages, Judged]:
    """Add the candidates that may come within `_REACH` of the fastest."""
    judged = dict(judged)
    fastest = min((plan.seconds for plan in judged.values()), default=float("inf"))
    for bound, stages in sorted((judge.lower_bound(stages), stages) for stages in candidates):
        if stages in judged or bound == float("inf"):
            continue
        found = judge.best(stages, below=_REACH * fastest)
        if found is not None:
            judged[stages] = found
            fastest = min(fastest, found.seconds)
    return judged
