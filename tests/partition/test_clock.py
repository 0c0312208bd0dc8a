"""An extrapolated step takes as long as the whole step."""

import random
from itertools import pairwise, product

import pytest

from megalite.partition import pipeline
from megalite.partition.pipeline import Clock, Run
from megalite.pipeline.ir.generators import SCHEDULES
from megalite.pipeline.ir.schedule import Program
from megalite.pipeline.ir.simulate import Costs, Link
from megalite.planner.search.space import VEE
from tests.planner.cost.machines import config_of

CHUNKS = {
    name: (2, 3) if name in ("interleaved", "looped-bfs") else (2,) if name in VEE else (1,) for name in SCHEDULES
}


def clock_of(schedule: str, pp: int, vpp: int, microbatches: int) -> Clock:
    config = config_of(
        pp, pp=pp, vpp=vpp, num_layers=pp * vpp, pipeline_schedule=schedule, global_batch_size=microbatches
    )
    return Clock(config, pp * vpp, microbatches)


def unlike(pp: int, vpp: int, seed: int) -> list[Costs]:
    """A head much slower than the layers, one slightly slower, and stages that all differ; with and without messages."""
    draw, count = random.Random(seed), pp * vpp
    forwards = [
        [*[1.0] * (count - 1), 3.0],
        [0.5, *[1.0 + 0.01 * draw.random() for _ in range(count - 2)], 1.2],
        [draw.uniform(0.8, 1.2) for _ in range(count)],
    ]
    ranks = range(pp)
    links = {(a, b): Link(0.02, draw.choice((0.05, 0.6))) for a, b in (*pairwise(ranks), *pairwise(ranks[::-1]))}
    links |= {(pp - 1, 0): Link(0.02, 0.05), (0, pp - 1): Link(0.02, 0.05)}
    return [
        Costs(
            forward=tuple(forward),
            backward=tuple(2.0 * each for each in forward),
            weight_grad=tuple(each * draw.uniform(0.8, 1.0) for each in forward),
            links=some,
        )
        for forward, some in product(forwards, ({}, links))
    ]


def both(schedule: str, pp: int, vpp: int, count: int, costs: Costs, patch: pytest.MonkeyPatch) -> list[Run]:
    """Simulate the step whole, and extrapolate it from its first steady state."""
    found = []
    for actions in (10**9, 1):
        patch.setattr(pipeline, "SIMULATED_ACTIONS", actions)
        found.append(clock_of(schedule, pp, vpp, count).run(costs))
    return found


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_extrapolated_step_equals_the_simulated_one(schedule: str, pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for vpp, count in product(CHUNKS[schedule], (5 * pp, 11 * pp + 1)):
        for costs in unlike(pp, vpp, seed=count):
            whole, extended = both(schedule, pp, vpp, count, costs, monkeypatch)
            assert whole.shift == 0.0
            assert extended.seconds == pytest.approx(whole.seconds, rel=1e-8), (vpp, count, costs)
            assert extended.bubble == pytest.approx(whole.bubble, abs=1e-8)
            assert 0.0 <= extended.bubble < 1.0


@pytest.mark.parametrize("schedule", sorted({*SCHEDULES} - {"looped-bfs"}))
def test_equal_stages_are_steady_early(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vpp = CHUNKS[schedule][0]
    _, extended = both(schedule, 4, vpp, 400, Costs.uniform(4 * vpp), monkeypatch)
    assert extended.timeline.schedule.num_microbatches <= 64
    assert extended.scale == 400 / extended.timeline.schedule.num_microbatches


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unsteady_step_is_not_faster_than_its_busiest_rank(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MOST_ACTIONS", 1)
    for vpp in CHUNKS[schedule]:
        for costs in unlike(4, vpp, seed=3):
            whole, extended = both(schedule, 4, vpp, 250, costs, monkeypatch)
            assert extended.seconds == pytest.approx(whole.seconds, rel=0.05)
            assert extended.bubble >= 0.0


def test_other_clock_is_extrapolated_over_the_same_window(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs.uniform(4)
    monkeypatch.setattr(pipeline, "SIMULATED_ACTIONS", 1)
    mine = clock_of("1f1b", 4, 1, 100)

    def work(program: Program) -> float:
        return 3.0 * program.schedule.num_microbatches + 9.0

    assert mine.extended(mine.run(costs), work) == pytest.approx(309.0)
    few = clock_of("1f1b", 4, 1, 5)
    assert few.extended(few.run(costs), work) == pytest.approx(24.0)
