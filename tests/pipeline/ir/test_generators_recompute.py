"""Recompute-ahead: the positions of R, its time and its memory."""

from dataclasses import replace
from itertools import pairwise

import pytest

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.generators import (
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved,
    loop_placement,
    one_f_one_b,
    with_recompute_ahead,
    zb_h1,
    zb_h2,
    zb_v,
)
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Sizes, memory_peaks
from megalite.pipeline.ir.schedule import GRADIENTS, Action, Kind, Schedule
from megalite.pipeline.ir.simulate import Costs, simulate


def with_r_everywhere(schedule: Schedule) -> Schedule:
    """Put an R before each backward, even if its forward has just run: the form of the published percentages."""
    rows = tuple(
        tuple(
            each
            for action in row
            for each in ((Action(Kind.R, *action[1:]), action) if action.kind in GRADIENTS else (action,))
        )
        for row in schedule.actions
    )
    return replace(schedule, actions=rows)


def makespan(schedule: Schedule, forward: float = 1.0, backward: float = 2.0) -> float:
    """Return the makespan if a recomputation costs a forward."""
    costs = Costs.uniform(schedule.num_stages, forward=forward, backward=backward, recompute=forward)
    return simulate(lower(schedule), costs).makespan


def test_expected_orders() -> None:
    def rows(schedule: Schedule) -> list[str]:
        return [" ".join(map(str, row)) for row in with_recompute_ahead(schedule).actions]

    assert rows(one_f_one_b(2, 3)) == [
        "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",  # each backward follows its forward: the graph is kept
    ]
    assert rows(zb_h1(2, 3))[1] == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    assert rows(gpipe(1, 2)) == ["0F0 0F1 0R0 0B0 0R1 0B1"]


@pytest.mark.parametrize(
    "schedule",
    [gpipe(3, 4), one_f_one_b(3, 6), interleaved(2, 2, 4), zb_h1(3, 5), zb_h2(3, 5), zb_v(3, 6), dualpipe_v(3, 7)],
    ids=lambda schedule: schedule.name,
)
def test_each_backward_follows_its_forward_or_recomputation(schedule: Schedule) -> None:
    """Only R is added, and at most one graph is live per rank."""
    ahead = with_recompute_ahead(schedule)
    for row, before in zip(ahead.actions, schedule.actions, strict=True):
        assert tuple(action for action in row if action.kind is not Kind.R) == before
        for earlier, action in pairwise(row):
            if action.kind in GRADIENTS:
                assert earlier[1:] == action[1:] and earlier.kind in (Kind.F, Kind.R)
    graphs = memory_peaks(lower(ahead), Sizes.uniform(schedule.num_stages))
    assert [peak.size for peak in graphs] == [1.0] * schedule.num_ranks
    assert makespan(ahead) <= makespan(schedule)


def test_1f1b_makespan_equals_the_formula() -> None:
    for ranks in range(2, 5):
        for microbatches in range(2, 8):
            for forward, backward in ((1, 1), (1, 2), (2, 3)):
                wanted = microbatches * (2 * forward + backward) + (ranks - 1) * (forward + backward)
                schedule = one_f_one_b(ranks, microbatches)
                assert makespan(with_r_everywhere(schedule), forward, backward) == wanted
                assert makespan(with_recompute_ahead(schedule), forward, backward) == wanted - 2 * forward


def test_only_training_schedules_without_recomputation_are_accepted() -> None:
    with pytest.raises(ConfigError, match=r"forward_only has no backward.*use a training schedule"):
        with_recompute_ahead(forward_only(loop_placement(2, 1), 3))
    with pytest.raises(ConfigError, match=r"gpipe recomputes already.*without any R"):
        with_recompute_ahead(with_recompute_ahead(gpipe(2, 3)))
