"""The simulation equals the schedule simulator without shared links, and is right with shared ones."""

import random

import pytest

from megalite.pipeline.ir.generators import one_f_one_b
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.simulate import Costs, Link, simulate
from megalite.planner.chain.plan import (
    ChainPlan,
    Judge,
    PlanCosts,
    Problem,
    Stage,
    all_reduce_seconds,
    device_ids,
    hop_seconds,
    memory_bytes,
    plan_costs,
    run,
    shares,
    timeline,
)
from megalite.planner.chain.planning import straight
from tests.planner.chain.chains import all_stages, chain, cluster, random_chain


def by_the_schedule_simulator(plan: ChainPlan, costs: PlanCosts) -> float:
    """The end of the last backward if nothing is shared and no message is delayed."""
    count = len(plan.stages)
    program = lower(one_f_one_b(count, plan.microbatches, plan.warm_up), recv_prefetch=10_000, send_window=10_000)
    links = {}
    for hop, seconds in enumerate(costs.hops):
        links[hop, hop + 1] = links[hop + 1, hop] = Link(0.0, seconds)
    return simulate(program, Costs(forward=costs.forward, backward=costs.backward, links=links)).makespan


@pytest.mark.parametrize("warm_up", ["pa", "pb"])
@pytest.mark.parametrize("seed", range(3))
def test_simulation_equals_the_schedule_simulator(seed: int, warm_up: str) -> None:
    machines = cluster(1, 4, latency_us=500.0)
    profile = random_chain(seed, 6)
    stages = tuple(Stage(*ends, (1,)) for ends in ((0, 1), (1, 3), (3, 5), (5, 6)))
    plan = ChainPlan(stages, 7, 1, warm_up)
    costs = plan_costs(plan, profile, machines)
    found = run(plan, costs, machines)
    assert max(found.backwards_done) == pytest.approx(by_the_schedule_simulator(plan, costs), rel=1e-12)
    assert found.seconds == max(found.reduced) == max(found.backwards_done)


def test_messages_share_the_network_of_a_machine() -> None:
    # Three machines in a row: the middle one sends activations forward and gradients back through one network.
    profile = chain([(1.0, 3.0, 0.0)] * 3)
    machines = cluster(3, 1)
    stages = tuple(Stage(s, s + 1, tuple(int(m == s) for m in range(3))) for s in range(3))
    plan = ChainPlan(stages, 12, 1)
    costs = plan_costs(plan, profile, machines)
    assert costs.hops == pytest.approx([3e-3, 3e-3])
    shared = run(plan, costs, machines).seconds
    assert shared > by_the_schedule_simulator(plan, costs) + 1e-3
    # It sends 24 messages of 3 ms, one after another.
    assert shared >= 24 * 3e-3


def test_messages_share_the_outgoing_network() -> None:
    # Forwards of the first stage (machine 0 to 0 and 1) and of the second (0 and 1 to 2) meet only where they leave
    # machine 0: half of 6 MB and half of 2 MB per microbatch.
    profile = chain([(0.01, 6.0, 0.0), (0.01, 2.0, 0.0), (0.01, 0.0, 0.0)])
    stages = (Stage(0, 1, (2, 0, 0)), Stage(1, 2, (1, 1, 0)), Stage(2, 3, (0, 0, 1)))
    plan = ChainPlan(stages, 3, 1, "pb")
    machines = cluster(3, 3)
    costs = plan_costs(plan, profile, machines)
    assert costs.hops == pytest.approx([3e-3, 2e-3])
    # The first three messages were queued before the fourth, and occupy the outgoing network for 3 ms each.
    assert run(plan, costs, machines).starts[2][0] == pytest.approx(11e-3, rel=0.01)


def test_formula_is_a_lower_bound_of_the_simulation() -> None:
    draw = random.Random(1)
    every = list(all_stages(4, 2, 2))
    tight = 0
    for seed in range(120):
        machines = cluster(2, 2, message=10 ** draw.uniform(-1, 1), latency_us=draw.choice([0.0, 1000.0]))
        judge = Judge(Problem(random_chain(seed, 4), machines, 8, float("inf")))
        plan = judge.problem.plan(draw.choice(every), draw.choice([1, 2, 4, 8]), draw.choice(["pa", "pb"]))
        assert judge.bound(plan) <= judge.seconds(plan) * (1 + 1e-12), plan
        tight += judge.bound(plan) > 0.97 * judge.seconds(plan)
    assert tight > 80, "and usually close to it"


def test_reductions_on_one_network_queue() -> None:
    profile = chain([(1.0, 0.0, 80.0), (1.0, 0.0, 80.0)])
    machines = cluster(2, 2, network=1.0)
    scattered = ChainPlan((Stage(0, 1, (1, 1)), Stage(1, 2, (1, 1))), 1, 2)
    together = ChainPlan((Stage(0, 1, (2, 0)), Stage(1, 2, (0, 2))), 1, 2)
    over_network = run(scattered, plan_costs(scattered, profile, machines), machines)
    # F F B B of 1, 1, 2 and 2 ms: the last stage ends at 4, the first at 6; 80 ms each.
    assert over_network.backwards_done == pytest.approx([6e-3, 4e-3])
    assert over_network.reduced == pytest.approx([164e-3, 84e-3])
    inside = run(together, plan_costs(together, profile, machines), machines)
    assert inside.reduced == pytest.approx([6e-3 + 0.8e-3, 4e-3 + 0.8e-3])


def test_messages_within_machines_and_rings_across_the_network() -> None:
    machines = cluster(2, 4)
    # Half of each stage on each machine: nothing crosses the network; two links carry half each.
    parts = shares((2, 2), (2, 2))
    assert [part.leaving for part in parts] == [0.0, 0.0]
    assert hop_seconds(parts, 1e9, machines) == pytest.approx(0.25 / 25.0)
    # A quarter of the samples leaves the second machine.
    parts = shares((1, 1), (3, 1))
    assert (parts[1].leaving, parts[0].entering) == (0.25, 0.25)
    assert hop_seconds(parts, 1e9, machines) == pytest.approx(0.25)
    assert hop_seconds(shares((4, 0), (0, 4)), 1e9, machines) == pytest.approx(1.0)
    for devices, seconds in (((1, 0), 0.0), ((4, 0), 1.5 / 100.0), ((2, 2), 1.5 / 3.0)):
        assert all_reduce_seconds(devices, 1e9, machines) == pytest.approx(seconds)


def test_memory_includes_microbatches_in_flight() -> None:
    profile = chain([(1.0, 1.0, 10.0)] * 2, kept=5e6)
    stages = (Stage(0, 1, (2,)), Stage(1, 2, (1,)))
    # Two microbatches of 4 samples, half on each replica; then three with the deeper warm-up, and all with GPipe.
    assert memory_bytes(ChainPlan(stages, 8, 4), profile) == (40e6 + 2 * 2 * 5e6, 40e6 + 4 * 5e6)
    for plan, held in (((8, 4, "pb"), 3), ((1, 4), 1), ((8, 4, "all"), 8)):
        assert memory_bytes(ChainPlan(stages, *plan), profile)[0] == 40e6 + held * 2 * 5e6
    profile = chain([(1.0, 0.0, 1.0)] * 4)
    judge = Judge(Problem(profile, cluster(1, 4), 8, float("inf")))
    ahead, usual = (judge.problem.plan(straight(profile, cluster(1, 4)), 8, warm_up) for warm_up in ("all", "pa"))
    assert judge.seconds(ahead) == pytest.approx(judge.seconds(usual)), "if messages are free"


def test_timeline_has_milliseconds_and_device_numbers() -> None:
    profile = chain([(1.0, 0.0, 0.0)] * 2)
    machines = cluster(1, 2)
    plan = ChainPlan((Stage(0, 1, (1,)), Stage(1, 2, (1,))), 3, 1)
    costs = plan_costs(plan, profile, machines)
    drawn = timeline(plan, costs, run(plan, costs, machines))
    # (M + p - 1) (F + B) of 1 and 2 ms.
    assert drawn.makespan == max(event.end for event in drawn.events) == pytest.approx(12.0)
    assert drawn.busy == pytest.approx((9.0, 9.0))
    assert drawn.peak_activations == (2, 1)
    stages = (Stage(0, 1, (2, 0)), Stage(1, 2, (1, 1)), Stage(2, 3, (1, 3)))
    assert device_ids(stages, 4) == [(0, 1), (2, 4), (3, 5, 6, 7)]
