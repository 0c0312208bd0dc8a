"""DAPPLE's planner: branch and bound over cuts, replication and placement for the lowest synchronous latency."""

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
    complete: bool  # the search did not stop at its limit, so no plan of this family is faster
    nodes: int  # partial plans that were expanded


class _Node(NamedTuple):
    """The first stages of a plan. Later stages depend only on `entry`, `ending` and `last`."""

    begin: int  # first layer without a stage
    free: plans.Counts
    stages: plans.Stages
    entry: float  # time at which the first microbatch leaves the last stage
    ending: float  # from a gradient's arrival at the last stage until all stages have finished and reduced
    pivot: float  # largest latency with one of these stages as the pivot


class _Options(NamedTuple):
    """Possible placements of a stage on the free devices."""

    devices: list[plans.Counts]
    left: list[plans.Counts]
    replicas: Array  # [options, 1]
    samples: Array  # [options, 1]: per microbatch on the slowest replica
    reduce: Array  # [options, 1]: seconds to reduce a byte of parameters
    free: Array  # [options, 1]: devices left; at least 1, as it is a divisor
    none_left: npt.NDArray[np.bool_]


class _Grown(NamedTuple):
    """All extensions of a node as [option, end] arrays: nodes are built only for the few that the search visits."""

    node: _Node
    options: _Options
    ends: npt.NDArray[np.int64]
    entry: Array
    ending: Array
    pivot: Array

    def child(self, row: int, column: int) -> _Node:
        """Return the prefix with one further stage."""
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
    """Search plans with a number of microbatches: lowest bound first, without dominated prefixes.

    A plan's latency is the maximum over pivots (`latency`), and a stage's pivot does not depend on later stages:

        L_q = entry_q + M (F_q + B_q) + ending_q

    So the maximum over a prefix only grows. Some later stage has at least an even share of the remaining work on the
    remaining devices. A prefix with a bound not below the best plan is dropped. Bounds are admissible: unless `limit` is
    reached, no plan with stages placed by `placements` has a lower latency.

    With `grain` above 1, a stage has a multiple of that many devices: a coarse, fast search.

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
        self._numbers = itertools.count()  # breaks ties between equal bounds

    def run(self, best: float) -> Found:
        """Return the plans with a latency below `best` that were found."""
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
        # A message is a pivot too: M messages, and once the work after it.
        pivot = np.maximum(pivot, entry + (self._count - 1) * hops + forward + backward + ending)
        rest = (profile.forward[-1] - profile.forward[ends]) + (profile.backward[-1] - profile.backward[ends])
        after = entry + forward + self._count * self._size * rest / options.free + backward + ending
        self._close(node, options, pivot[:, -1])
        bound = np.maximum(pivot, after)
        # No devices are left for later layers, or `_close` has completed the plan.
        bound[options.none_left, :] = np.inf
        bound[:, -1] = np.inf
        bound[~self._fits(node.begin, ends, options)] = np.inf
        grown = _Grown(node, options, ends, entry + forward, ending + backward, pivot)
        rows, columns = np.nonzero(bound < self._best)
        for bounded, row, column in zip(bound[rows, columns].tolist(), rows.tolist(), columns.tolist(), strict=True):
            heappush(self._queue, (bounded, next(self._numbers), grown, row, column))

    def _dominated(self, node: _Node) -> bool:
        """Test whether another prefix of the same layers on the same devices is at least as good in every respect."""
        if not node.stages:
            return False
        entry, ending, pivot = node.entry, node.ending, node.pivot
        rivals = self._seen.setdefault((node.begin, node.free, node.stages[-1].devices), [])
        if any(a <= entry and b <= ending and c <= pivot for a, b, c in rivals):
            return True
        rivals.append((entry, ending, pivot))
        return False

    def _close(self, node: _Node, options: _Options, latencies: Array) -> None:
        """Complete the node to plans: a last stage has all other layers, on any number of devices."""
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
                # A sorted list is a heap.
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
        """Return the seconds of a message from the previous stage per option; 0 for the first stage."""
        if not node.stages:
            return np.zeros(len(options.devices))
        cluster = self._problem.cluster
        size = float(self._problem.profile.outputs[node.begin]) * self._size
        source = node.stages[-1].devices
        rates = [_byte_seconds(source, target, cluster) for target in options.devices]
        return np.array([size * rate for rate in rates]) + cluster.latency_us * 1e-6

    def _fits(self, begin: int, ends: npt.NDArray[np.int64], options: _Options) -> npt.NDArray[np.bool_]:
        """Return [options, ends]: whether a device could store the stage, if another stage follows."""
        profile = self._problem.profile
        state = profile.state_factor * (profile.parameters[ends] - profile.parameters[begin])
        samples = np.ceil(self._size / options.replicas) * min(2, self._count)
        kept = samples * (profile.activations[ends] - profile.activations[begin])
        return state + kept <= self._problem.memory


@lru_cache(maxsize=100_000)
def _byte_seconds(source: plans.Counts, target: plans.Counts, cluster: ChainCluster) -> float:
    return plans.hop_seconds(plans.shares(source, target), 1.0, cluster)


def _column(values: Sequence[float]) -> Array:
    return np.array(values, dtype=np.float64)[:, None]
