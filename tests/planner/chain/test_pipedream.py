"""PipeDream's planner: its objective is minimal over all plans."""

from dataclasses import replace
from itertools import combinations, product

import pytest

from megalite.planner.chain.inputs import ChainCluster, ChainProfile
from megalite.planner.chain.plan import Stages
from megalite.planner.chain.planning import pipedream_plan
from tests.planner.chain.chains import chain, cluster, random_chain


def slowest(ends: tuple[int, ...], replicas: tuple[int, ...], profile: ChainProfile, machines: ChainCluster) -> float:
    """The objective on single-device machines, implemented again."""
    found = 0.0
    for number, (first, last, count) in enumerate(zip(ends, ends[1:], replicas, strict=False)):
        layers = profile.layers[first:last]
        work = sum(layer.forward_ms + layer.backward_ms for layer in layers) / 1e3
        weights = sum(layer.parameter_bytes for layer in layers)
        speed = machines.network_gb_per_s * 1e9
        found = max(found, (work + 4 * (count - 1) * weights / (speed * count)) / count)
        if number:
            output = profile.layers[first - 1].output_bytes
            found = max(found, 2 * output / (machines.message_gb_per_s * 1e9 * count))
    return found


def of(stages: Stages) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (0, *(stage.last for stage in stages)), tuple(stage.replicas for stage in stages)


@pytest.mark.parametrize("seed", range(6))
def test_planner_minimizes_its_objective(seed: int) -> None:
    profile, machines = random_chain(seed, 6), cluster(4, 1, network=1.0)
    every = [
        ((0, *cuts, 6), replicas)
        for count in range(1, 5)
        for cuts in combinations(range(1, 6), count - 1)
        for replicas in product(range(1, 5), repeat=count)
        if sum(replicas) == 4
    ]
    least = min(slowest(*plan, profile, machines) for plan in every)
    stages = pipedream_plan(profile, machines)
    assert slowest(*of(stages), profile, machines) == pytest.approx(least)


def test_plans_by_level() -> None:
    def devices(weights: float, outputs: float, layers: int, machines: ChainCluster) -> list[tuple[int, ...]]:
        return [stage.devices for stage in pipedream_plan(chain([(10.0, outputs, weights)] * layers), machines)]

    # 400 MB of weights at 1 GB/s per microbatch: replication never pays, whatever the batch.
    assert len(devices(100.0, 0.1, 4, cluster(4, 1, network=1.0))) == 4
    assert devices(0.0, 100.0, 4, cluster(4, 1, network=1.0)) == [(1, 1, 1, 1)]
    # Weights are cheap to reduce over links, not over the network: each machine is a replicated stage.
    assert devices(20.0, 0.1, 2, cluster(2, 2, network=0.1, message=1.0)) == [(2, 0), (0, 2)]
    # Between machines everything is cheap; within them, on slow links, weights are expensive.
    slow_links = replace(cluster(2, 2, network=1000.0, message=0.0001), link_gb_per_s=0.5)
    assert devices(40.0, 0.001, 2, slow_links) == [(1, 1), (1, 1)]
