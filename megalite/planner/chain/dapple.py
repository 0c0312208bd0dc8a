"""DAPPLE's planner: branch and bound over cuts, replication and placement, for the least synchronous latency."""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush, nsmallest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.planner.chain import plan as plans
from megalite.planner.chain.inputs import Array, ChainCluster
from megalite.planner.chain.plan import Problem


class Found(NamedTuple):
    plans: list[tuple[float, plans.Stages]]  # (latency, stages), the best first
    complete: bool  # no plan of this family has a lower latency: the search did not stop at its limit
    nodes: int  # partial plans that were looked into


class _Node(NamedTuple):
    """The first stages of a plan. What comes after them matters through `entry`, `ending` and `last` alone."""

    begin: int  # the first layer that has no stage
    free: plans.Counts
    stages: plans.Stages
    entry: float  # when the first microbatch leaves the last stage
    ending: float  # from when a gradient gets to the last stage until all are done with it, and have reduced
    pivot: float  # the latency with any of these stages as the pivot


class _Options(NamedTuple):
    """Where a stage can go, given what is free."""

    devices: list[plans.Counts]
    left: list[plans.Counts]
    replicas: Array  # [options, 1]
    samples: Array  # [options, 1]: of a microbatch, on the slowest replica
    reduce: Array  # [options, 1]: seconds that a byte of parameters takes to reduce
    free: Array  # [options, 1]: how many devices are left; at least 1, so that one can divide by it
    none_left: npt.NDArray[np.bool_]


class _Grown(NamedTuple):
    """All that can follow a node: [option, end] each. Most of it is never looked at, so it stays in arrays."""

    node: _Node
    options: _Options
    ends: npt.NDArray[np.int64]
    entry: Array
    ending: Array
    pivot: Array

    def child(self, row: int, column: int) -> _Node:
        """The prefix that is longer by one stage."""
        node, end = self.node, int(self.ends[column])
        return _Node(
            end,
            self.options.left[row],
            (*node.stages, plans.Stage(node.begin, end, self.options.devices[row])),
            float(self.entry[row, column]),
            float(self.ending[row, column]),
            float(self.pivot[row, column]),
        )


class Search:
    """For one number of microbatches: best bound first, dominated prefixes dropped.

    The latency of a plan is the maximum over pivots (`latency`), and the pivot of a stage depends on nothing behind it:

        L_q = entry_q + M (F_q + B_q) + ending_q

    So what a prefix has reached only grows. Of the rest one knows that some stage has at least an even share of its
    work on the devices that are left; a prefix with a bound not below the best plan is dropped. Bounds are
    admissible: with `limit` not reached, no plan with stages placed by `placements` has a lower latency.

    With `grain` above 1 a stage has a multiple of that many devices: a coarse search that ends soon.

    Source: Fan et al., "DAPPLE" (arXiv 2007.01045), section 4; the search is our branch and bound."""

    def __init__(self, problem: Problem, microbatches: int, *, limit: int, keep: int, grain: int = 1) -> None:
        self._problem, self._count = problem, microbatches
        self._size = problem.global_batch // microbatches
        self._limit, self._keep, self._grain = limit, keep, grain
        self._options: dict[plans.Counts, _Options] = {}
        self._best = float("inf")
        self._plans: list[tuple[float, int, plans.Stages]] = []
        self._seen: dict[tuple[int, plans.Counts, plans.Counts], list[tuple[float, float, float]]] = {}
        self._queue: list[tuple[float, int, _Grown, int, int]] = []
        self._numbers = itertools.count()  # of equal bounds the first

    def run(self, best: float) -> Found:
        """The plans with a latency below `best`, as far as they could be found."""
        self._best = best
        self._expand(_Node(0, self._problem.cluster.empty, (), 0.0, 0.0, 0.0))
        nodes = 1
        while self._queue and nodes < self._limit:
            bound, _, grown, row, column = heappop(self._queue)
            if bound >= self._best:
                self._queue.clear()
                break
            node = grown.child(row, column)
            if not self._dominated(node):
                nodes += 1
                self._expand(node)
        plans = nsmallest(self._keep, self._plans)
        return Found([(seconds, stages) for seconds, _, stages in plans], not self._queue, nodes)

    def _expand(self, node: _Node) -> None:
        profile, options = self._problem.profile, self._options_of(node.free)
        hops = self._hops(node, options)[:, None]
        ends = np.arange(node.begin + 1, len(profile.layers) + 1)
        forward = options.samples * (profile.forward[ends] - profile.forward[node.begin])
        backward = options.samples * (profile.backward[ends] - profile.backward[node.begin])
        reduce = options.reduce * (profile.parameters[ends] - profile.parameters[node.begin])
        entry = node.entry + hops
        ending = np.maximum(node.ending + hops, reduce)
        pivot = np.maximum(node.pivot, entry + self._count * (forward + backward) + ending)
        # A message is a pivot as well: M of them, and the work on its far side once.
        pivot = np.maximum(pivot, entry + (self._count - 1) * hops + forward + backward + ending)
        rest = (profile.forward[-1] - profile.forward[ends]) + (profile.backward[-1] - profile.backward[ends])
        after = entry + forward + self._count * self._size * rest / options.free + backward + ending
        self._close(node, options, pivot[:, -1])
        bound = np.maximum(pivot, after)
        # Nothing is left for the layers behind, or they have been closed above.
        bound[options.none_left, :] = np.inf
        bound[:, -1] = np.inf
        bound[~self._fits(node.begin, ends, options)] = np.inf
        grown = _Grown(node, options, ends, entry + forward, ending + backward, pivot)
        rows, columns = np.nonzero(bound < self._best)
        for bounded, row, column in zip(bound[rows, columns].tolist(), rows.tolist(), columns.tolist(), strict=True):
            heappush(self._queue, (bounded, next(self._numbers), grown, row, column))

    def _dominated(self, node: _Node) -> bool:
        """Another prefix of the same layers on the same devices is no worse in anything that matters later."""
        if not node.stages:
            return False
        mine = (node.entry, node.ending, node.pivot)
        rivals = self._seen.setdefault((node.begin, node.free, node.stages[-1].devices), [])
        if any(a <= mine[0] and b <= mine[1] and c <= mine[2] for a, b, c in rivals):
            return True
        rivals.append(mine)
        return False

    def _close(self, node: _Node, options: _Options, latencies: Array) -> None:
        """The plans with a last stage that is the rest of the chain, on any number of devices."""
        last = len(self._problem.profile.layers)
        for row in np.argsort(latencies)[: self._keep]:
            if latencies[row] >= self._best:
                break
            stages = (*node.stages, plans.Stage(node.begin, last, options.devices[row]))
            plan = self._problem.plan(stages, self._count)
            if max(plans.memory_bytes(plan, self._problem.profile)) > self._problem.memory:
                continue
            heappush(self._plans, (float(latencies[row]), next(self._numbers), stages))
            if len(self._plans) >= self._keep:
                self._plans = nsmallest(self._keep, self._plans)
                # Sorted lists are heaps.
                self._best = min(self._best, self._plans[-1][0])

    def _options_of(self, free: plans.Counts) -> _Options:
        if free not in self._options:
            whole = self._problem.cluster.gpus_per_machine
            devices = [
                counts
                for wanted in range(self._grain, sum(free) + 1, self._grain)
                for counts in plans.placements(free, wanted, whole=whole)
            ]
            left = [plans.taken_from(free, counts) for counts in devices]
            cluster, profile = self._problem.cluster, self._problem.profile
            replicas = [sum(counts) for counts in devices]
            free_after = np.array([sum(counts) for counts in left])
            self._options[free] = _Options(
                devices,
                left,
                replicas=_column(replicas),
                samples=_column([profile.slice_samples(self._size, count) for count in replicas]),
                reduce=_column([plans.all_reduce_seconds(counts, 1.0, cluster) for counts in devices]),
                free=_column(np.maximum(free_after, 1).tolist()),
                none_left=free_after == 0,
            )
        return self._options[free]

    def _hops(self, node: _Node, options: _Options) -> Array:
        """Per option, the seconds of a message from the stage before; 0 for the first stage."""
        if not node.stages:
            return np.zeros(len(options.devices))
        cluster = self._problem.cluster
        size = float(self._problem.profile.outputs[node.begin]) * self._size
        here = node.stages[-1].devices
        rates = [_byte_seconds(here, there, cluster) for there in options.devices]
        return np.array([size * rate for rate in rates]) + cluster.latency_us * 1e-6

    def _fits(self, begin: int, ends: npt.NDArray[np.int64], options: _Options) -> npt.NDArray[np.bool_]:
        """[options, ends]: a device could hold the stage, with another stage behind it."""
        profile = self._problem.profile
        state = profile.state_factor * (profile.parameters[ends] - profile.parameters[begin])
        samples = np.ceil(self._size / options.replicas) * min(2, self._count)
        kept = samples * (profile.activations[ends] - profile.activations[begin])
        return state + kept <= self._problem.memory


@lru_cache(maxsize=100_000)
def _byte_seconds(here: plans.Counts, there: plans.Counts, cluster: ChainCluster) -> float:
    return plans.hop_seconds(plans.shares(here, there), 1.0, cluster)


def _column(values: Sequence[float]) -> Array:
    return np.array(values, dtype=np.float64)[:, None]
