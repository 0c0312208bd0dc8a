"""Plans that need no branch and bound: PipeDream's, data parallelism, straight and even pipelines."""

from itertools import pairwise

import numpy as np

from megalite.planner.chain.inputs import Array, ChainCluster, ChainProfile
from megalite.planner.chain.plan import GIGA, Stage, Stages, append_first, hop_seconds, shares, taken_from


def pipedream_plan(profile: ChainProfile, cluster: ChainCluster) -> Stages:
    """The stages that minimise PipeDream's objective, on all devices of the cluster.

    For m components of a level with bandwidth B, layers i..j, a component's own time U (the layer sum, or what the
    level below found for its whole machine), weights w and outputs a (of a microbatch of the profile's batch size):

        T(i, j, m) = (U(i, j) + 4 (m - 1) w / (B m)) / m
        A(i, j, m) = min(T(i, j, m), min over s, m' of max(A(i, s, m - m'), 2 a_s / (B m'), T(s, j, m')))

    A of one level is U of the next. It is the time between microbatches of a pipeline that never drains and reduces
    gradients after every microbatch; the bubble of a synchronous step and its one reduction do not occur in it.

    Source: Narayanan et al., "PipeDream" (SOSP 2019), section 3.1.
    """
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
    """One level of the dynamic program, all intervals of layers at once."""

    def __init__(self, profile: ChainProfile, own: Array, components: int, reduce: float, message: float) -> None:
        layers = len(profile.layers)
        weights = profile.parameters[None, :] - profile.parameters[:, None]
        m = np.arange(1, components + 1)
        replicated = (own[:, :, None] + 4.0 * (m - 1) * weights[:, :, None] / (reduce * m)) / m
        # Intervals that hold no layer are no stage.
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
        """Plans with a last stage that has `tail` of `total` components."""
        head = np.maximum(self.best[:, :, total - tail - 1], self._hops[None, :] / tail)
        # [i, s, j]: head of i..s, then a stage s..j.
        slowest = np.maximum(head[:, :, None], self._alone[None, :, :, tail - 1])
        cut = slowest.argmin(axis=1)
        value = np.take_along_axis(slowest, cut[:, None, :], axis=1)[:, 0, :]
        better = value < self.best[:, :, total - 1]
        self.best[:, :, total - 1][better] = value[better]
        self._cut[:, :, total - 1][better] = cut[better]
        self._tail[:, :, total - 1][better] = tail

    def stages(self, first: int, last: int, components: int) -> list[tuple[int, int, int]]:
        """(first layer, end, components) of each stage of the best plan, in order."""
        found: list[tuple[int, int, int]] = []
        while True:
            cut = int(self._cut[first, last, components - 1])
            if cut < 0:
                return [(first, last, components), *reversed(found)]
            tail = int(self._tail[first, last, components - 1])
            found.append((cut, last, tail))
            last, components = cut, components - tail


def data_parallel(profile: ChainProfile, cluster: ChainCluster) -> Stages:
    """Every device has the whole chain."""
    return (Stage(0, len(profile.layers), cluster.empty),)


def straight(profile: ChainProfile, cluster: ChainCluster) -> Stages:
    """One device a stage, as many as there are layers for, cut so that the slowest stage or message is as
    fast as it can be."""
    return even_stages(profile, cluster, min(cluster.num_gpus, len(profile.layers)), each=1)


def even_stages(profile: ChainProfile, cluster: ChainCluster, count: int, *, each: int | None = None) -> Stages:
    """`count` stages on `each` devices (default: all devices, shared out as evenly as they go, early stages more).

    Machines are filled one after another. The cut makes the slowest as fast as it can be, stage or message.
    """
    devices = cluster.num_gpus
    sizes = [each or devices // count + (number < devices % count) for number in range(count)]
    free, places = cluster.empty, []
    for size in sizes:
        places.append(append_first(free, size, whole=cluster.gpus_per_machine))
        free = taken_from(free, places[-1])
    hops = [hop_seconds(shares(here, there), 1.0, cluster) for here, there in pairwise(places)]
    cuts = cut(profile, sizes, hops)
    return tuple(map(Stage, cuts, cuts[1:], places))


def cut(profile: ChainProfile, devices: list[int], hops: list[float]) -> list[int]:
    """Where stages begin and end, at least a layer each: the least possible maximum over stages and messages.

    Args:
        devices: Per stage.
        hops: Between stages, the seconds of a byte.
    """
    work = profile.forward + profile.backward
    layers, count = len(profile.layers), len(devices)
    best = np.full((count + 1, layers + 1), np.inf)
    best[0, 0] = 0.0
    begin = np.zeros((count + 1, layers + 1), dtype=int)
    for number, (size, hop) in enumerate(zip(devices, [*hops, 0.0], strict=True)):
        # [i, j]: stages before it end at i, it ends at j.
        slowest = np.maximum(best[number][:, None], (work[None, :] - work[:, None]) / size)
        slowest = np.maximum(slowest, hop * profile.outputs[None, :])
        slowest[np.tri(layers + 1, dtype=bool)] = np.inf
        begin[number + 1] = slowest.argmin(axis=0)
        best[number + 1] = slowest.min(axis=0)
    cuts = [layers]
    for number in range(count, 0, -1):
        cuts.append(int(begin[number, cuts[-1]]))
    return cuts[::-1]
