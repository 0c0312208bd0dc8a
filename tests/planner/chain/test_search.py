"""The branch and bound finds the lowest latency of its family; placements and cuts."""

import random
from itertools import combinations

import pytest

from megalite.planner.chain.dapple import Search
from megalite.planner.chain.inputs import ChainCluster
from megalite.planner.chain.plan import (
    Judge,
    Judged,
    Problem,
    Stage,
    Stages,
    append_first,
    fresh_first,
    placements,
    plan_costs,
    scatter_first,
    taken_from,
)
from megalite.planner.chain.planning import cut, data_parallel, even_stages, refine, straight
from tests.planner.chain.chains import chain, cluster, random_chain


def family(problem: Problem, begin: int, free: tuple[int, ...]) -> list[Stages]:
    """All plans of the layers from `begin` with stages placed by the three policies."""
    layers, whole = len(problem.profile.layers), problem.cluster.gpus_per_machine
    found: list[Stages] = []
    for wanted in range(1, sum(free) + 1):
        for devices in placements(free, wanted, whole=whole):
            found.append((Stage(begin, layers, devices),))
            for last in range(begin + 1, layers):
                rest = family(problem, last, taken_from(free, devices))
                found.extend((Stage(begin, last, devices), *tail) for tail in rest)
    return found


def pivots(problem: Problem, stages: Stages, count: int) -> float:
    """The latency with stages and messages as pivots, implemented again."""
    costs = plan_costs(problem.plan(stages, count), problem.profile, problem.cluster)
    longest = 0.0
    for q, (forward, backward) in enumerate(zip(costs.forward, costs.backward, strict=True)):
        entry = sum(costs.forward[:q]) + sum(costs.hops[:q])
        ending = max(sum(costs.backward[s:q]) + sum(costs.hops[s:q]) + costs.reduce[s] for s in range(q + 1))
        steady = count * (forward + backward)
        if q:
            steady = max(steady, (count - 1) * costs.hops[q - 1] + forward + backward)
        longest = max(longest, entry + steady + ending)
    return longest


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("machines", [cluster(2, 2), cluster(3, 1, message=0.3), cluster(1, 3)], ids=str)
def test_search_is_exact_in_its_family(machines: ChainCluster, seed: int) -> None:
    problem = Problem(random_chain(seed, 5), machines, 8, float("inf"))
    count = random.Random(seed).choice([2, 4, 8])
    every = {stages: pivots(problem, stages, count) for stages in family(problem, 0, machines.empty)}
    found = Search(problem, count, limit=100_000, keep=3).run(float("inf"))
    assert found.complete
    seconds, stages = found.plans[0]
    assert seconds == pytest.approx(min(every.values()))
    assert every[stages] == pytest.approx(seconds)


def test_search_stops_at_its_limit_or_a_known_bound() -> None:
    problem = Problem(random_chain(1, 8), cluster(2, 4), 16, float("inf"))
    short = Search(problem, 8, limit=3, keep=5).run(float("inf"))
    assert not short.complete and short.nodes == 3 and short.plans
    best = Search(problem, 8, limit=100_000, keep=1).run(float("inf")).plans[0][0]
    nothing = Search(problem, 8, limit=100_000, keep=5).run(best * 0.999)
    assert nothing.complete and not nothing.plans
    coarse = Search(problem, 4, limit=100_000, keep=5, grain=4).run(float("inf")).plans
    assert coarse and all(stage.replicas % 4 == 0 for _, stages in coarse for stage in stages)


def test_local_search_finds_the_best_cut_and_devices() -> None:
    judge = Judge(Problem(chain([(1.0, 0.0, 0.0)] * 8), cluster(1, 2), 16, float("inf")))
    start = judge.problem.plan((Stage(0, 1, (1,)), Stage(1, 8, (1,))), 2)
    found = refine(judge, Judged(start, judge.seconds(start), judge.memory(start)), work=10_000)
    # Without weights to reduce, both devices on all layers, or 4 and 4 layers, are optimal.
    assert found.seconds == pytest.approx(16 * 24e-3 / 2)
    assert refine(judge, Judged(start, judge.seconds(start), (0.0,)), work=0).plan == start


def test_three_placement_policies() -> None:
    free = (2, 4, 4)
    assert fresh_first(free, 5, whole=4) == (0, 4, 1)
    assert append_first(free, 3, whole=4) == (2, 1, 0)
    assert scatter_first(free, 5, whole=4) == (1, 2, 2)
    assert scatter_first((1, 4, 4), 7, whole=4) == (1, 3, 3)
    assert placements((1, 1, 1), 1, whole=1) == ((1, 0, 0),)
    assert taken_from(free, (1, 0, 4)) == (1, 4, 0)


def test_cuts_are_optimal() -> None:
    draw = random.Random(0)
    for seed in range(10):
        profile = random_chain(seed, 7)
        devices = [draw.randint(1, 3) for _ in range(3)]
        hops = [draw.uniform(0.0, 2e-9) for _ in range(2)]

        def slowest(cuts: tuple[int, ...] | list[int]) -> float:
            work = profile.forward + profile.backward  # noqa: B023
            stages = [
                (work[b] - work[a]) / size
                for a, b, size in zip(cuts, cuts[1:], devices, strict=False)  # noqa: B023
            ]
            messages = [hop * profile.outputs[end] for hop, end in zip(hops, cuts[1:], strict=False)]  # noqa: B023
            return float(max(stages + messages))

        every = [(0, *inner, 7) for inner in combinations(range(1, 7), 2)]
        assert slowest(cut(profile, devices, hops)) == pytest.approx(min(map(slowest, every)))


def test_straight_plans_without_a_search() -> None:
    profile, machines = chain([(1.0, 0.0, 1.0)] * 6), cluster(2, 2)
    assert data_parallel(profile, machines) == (Stage(0, 6, (2, 2)),)
    # Neighbours stay on a machine.
    assert [stage.devices for stage in straight(profile, machines)] == [(1, 0), (1, 0), (0, 1), (0, 1)]
    assert [stage.last - stage.first for stage in even_stages(profile, machines, 2)] == [3, 3]
    assert [stage.replicas for stage in even_stages(profile, machines, 3)] == [2, 1, 1]
    assert len(straight(chain([(1.0, 0.0, 1.0)] * 3), machines)) == 3
