"""Forward-only schedules on any placement."""

import random

import pytest

from megalite.pipeline.ir.generators import forward_only, loop_placement, v_placement
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.simulate import Costs, simulate
from megalite.pipeline.ir.validate import validate


def makespan(placement: tuple[int, ...], microbatches: int) -> float:
    costs = Costs.uniform(len(placement))
    return simulate(lower(forward_only(placement, microbatches)), costs).makespan


def test_expected_orders() -> None:
    def rows(placement: tuple[int, ...], microbatches: int) -> list[str]:
        return [" ".join(map(str, row)) for row in forward_only(placement, microbatches).actions]

    assert rows((0, 1), 3) == ["0F0 0F1 0F2", "1F0 1F1 1F2"]
    # Groups of p; the remainder joins the last group.
    assert rows((0, 1, 0, 1), 5)[1] == "1F0 1F1 3F0 3F1 1F2 1F3 1F4 3F2 3F3 3F4"
    # Slot 2i + s.
    assert rows((0, 1, 1, 0), 3) == ["0F0 0F1 3F0 0F2 3F1 3F2", "1F0 2F0 1F1 2F1 1F2 2F2"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_loops_have_no_bubble_for_any_number_of_microbatches(ranks: int, chunks: int) -> None:
    placement = loop_placement(ranks, chunks)
    for microbatches in range(1, 14):
        schedule = forward_only(placement, microbatches)
        assert schedule.forward_only
        report = validate(lower(schedule))
        assert report.peak_activations == (1,) * ranks
        # With fewer microbatches than ranks a chunk waits for the ring; otherwise only the ramp is idle.
        wanted = (chunks - 1) * max(microbatches, ranks) + microbatches + ranks - 1
        if microbatches >= ranks:
            assert wanted == chunks * microbatches + ranks - 1
        assert makespan(placement, microbatches) == wanted


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_v_idles_only_in_the_ramps(ranks: int) -> None:
    """The last rank's 2m forwards have p-1 steps on the way down before and p-1 on the way up after them: the minimum."""
    for microbatches in (1, 2, 3, 5, 8):
        assert makespan(v_placement(ranks), microbatches) == 2 * microbatches + 2 * (ranks - 1)
        report = validate(lower(forward_only(v_placement(ranks), microbatches)))
        assert max(report.peak_receives) <= 2
        assert report.peak_activations == (1,) * ranks


def test_rank_with_most_stages_never_idles() -> None:
    rng = random.Random(3)
    for _ in range(150):
        ranks = rng.randint(1, 4)
        placement = [*range(ranks), *(rng.randrange(ranks) for _ in range(rng.randint(0, 5)))]
        rng.shuffle(placement)
        validate(lower(forward_only(placement, rng.randint(1, 7))))
        most = max(placement.count(rank) for rank in range(ranks))
        short, long = (makespan(tuple(placement), microbatches) for microbatches in (20, 40))
        assert long - short == 20 * most, placement
