"""Ranks that share cores: cases that can be reckoned by hand, and bounds."""

import pytest

from megalite.pipeline.ir.generators.many_chunks import interleaved
from megalite.pipeline.ir.generators.one_chunk import gpipe, one_f_one_b, zb_h1
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.simulate import Costs, shared_makespan, simulate

SCHEDULES = {"1f1b": one_f_one_b(4, 8), "gpipe": gpipe(4, 8), "interleaved": interleaved(4, 8, 2), "zb-h1": zb_h1(4, 8)}


def uneven(schedule: Schedule) -> Costs:
    stages = schedule.num_stages
    forward = tuple(1.0 + 0.5 * stage for stage in range(stages))
    return Costs(forward=forward, backward=tuple(2.0 * each for each in forward))


def test_two_ranks_on_one_core_waste_nothing() -> None:
    """Alone twice as fast: 0F0 until 1; 0F1 beside 1F0 until 3; 1B0 alone until 5; and so on, 24 s of work in 12."""
    costs = Costs(forward=(2.0, 2.0), backward=(4.0, 4.0))
    assert shared_makespan(one_f_one_b(2, 2), costs, 2.0) == pytest.approx(12.0)
    assert simulate(lower(one_f_one_b(2, 2)), costs).makespan == pytest.approx(18.0)


def test_a_heavy_rank_has_no_more_than_a_core() -> None:
    """Four ranks on two cores, 1, 1, 1 and 3 s forward; one microbatch after the other is 3 s alone at the end at twice the
    speed. In each round of a long step three light ranks end after 1 s, the heavy one 1 s later."""
    costs = Costs(forward=(1.0, 1.0, 1.0, 3.0), backward=(2.0, 2.0, 2.0, 6.0))
    rounds = (shared_makespan(one_f_one_b(4, 41), costs, 2.0) - shared_makespan(one_f_one_b(4, 1), costs, 2.0)) / 40
    assert 4.5 < rounds < 6.01  # the work of all in two cores; what the heavy one has is 9 s at half the speed at best


def test_messages_are_work_of_both_ends() -> None:
    """With no one computing each end takes half as long: together the link's time. Four ranks on one core do what there is."""
    costs = Costs.uniform(4, p2p=5.0)
    assert shared_makespan(one_f_one_b(4, 1), costs, 2.0) == pytest.approx(4 * 3.0 / 2 + 6 * 5.0)
    assert shared_makespan(one_f_one_b(4, 8), costs, 4.0) == pytest.approx(8 * (3.0 + 6 * 2 * 5.0 / 4))


@pytest.mark.parametrize("name", SCHEDULES)
def test_with_a_core_each_it_is_the_simulators(name: str) -> None:
    schedule = SCHEDULES[name]
    costs = uneven(schedule)
    assert shared_makespan(schedule, costs, 1.0) == pytest.approx(simulate(lower(schedule), costs).makespan)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks_per_core", [1.5, 2.0, 4.0])
def test_between_the_work_of_all_and_the_longest_chain(name: str, ranks_per_core: float) -> None:
    schedule = SCHEDULES[name]
    apart = simulate(lower(schedule), uneven(schedule))
    taken = shared_makespan(schedule, uneven(schedule), ranks_per_core)
    work = sum(apart.busy) / 4
    assert max(work, apart.makespan / ranks_per_core) <= taken * (1 + 1e-12)
    assert taken < apart.makespan
    if ranks_per_core == 4.0:  # one core: it is never idle
        assert taken == pytest.approx(work)
