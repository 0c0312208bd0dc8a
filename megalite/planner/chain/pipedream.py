"""PipeDream's planner, the baseline: the slowest stage of an asynchronous pipeline, level by level of the cluster."""

import numpy as np

from megalite.planner.chain.cluster import ChainCluster
from megalite.planner.chain.plan import Stage, Stages
from megalite.planner.chain.profile import Array, ChainProfile

_GIGA = 1e9


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
        level = _Solver(profile, own, components, reduce * _GIGA, message * _GIGA)
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

    def __init__(
        self, profile: ChainProfile, own: Array, components: int, reduce: float, message: float
    ) -> None:
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
        """Plans whose last stage has `tail` of `total` components."""
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
