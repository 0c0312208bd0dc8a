"""Plans that need no search: pure data parallelism, a straight pipeline, pipelines of stages that are alike."""

from itertools import pairwise

import numpy as np

from megalite.planner.chain.cluster import ChainCluster
from megalite.planner.chain.costs import hop_seconds, shares
from megalite.planner.chain.placement import append_first, taken_from
from megalite.planner.chain.plan import Stage, Stages
from megalite.planner.chain.profile import ChainProfile


def data_parallel(profile: ChainProfile, cluster: ChainCluster) -> Stages:
    """Every device has the whole chain."""
    return (Stage(0, len(profile.layers), cluster.empty),)


def straight(profile: ChainProfile, cluster: ChainCluster) -> Stages:
    """One device a stage, as many as there are layers for, cut so that the slowest stage or message is as
    fast as it can be."""
    return even_stages(profile, cluster, min(cluster.num_gpus, len(profile.layers)), each=1)


def even_stages(
    profile: ChainProfile, cluster: ChainCluster, count: int, *, each: int | None = None
) -> Stages:
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
