"""Microbatches in flight: closed forms against a replay of the real schedules."""

import numpy as np
import pytest

from megalite.pipeline.ir.generators import SCHEDULES, build_schedule
from megalite.pipeline.ir.memory import Sizes, memory_peaks
from megalite.pipeline.ir.schedule import Program
from megalite.planner.search.features import in_flight, steady
from megalite.planner.search.space import ONE_CHUNK, Pipeline

WEIGHTS = [(1.0, 0.0), (1.0, 0.6), (0.1, 1.0)]  # of (a graph, an input that waits for a W)


def shapes(schedule: str) -> list[tuple[int, int, int]]:
    """Yield the supported (pp, vpp, microbatches)."""
    chunks = (1,) if schedule in ONE_CHUNK else (2, 3) if schedule in ("interleaved", "looped-bfs") else (2,)
    least = {"dualpipe-v": 2}.get(schedule, 0)
    return [(p, v, m) for p in (2, 3, 4) for v in chunks for m in (1, 2, 3, 5, 8, 13) if m >= least * p]


def replayed(pipeline: Pipeline, graph: float, waiting: float) -> list[float]:
    schedule, p, v, m, _ = pipeline
    found = build_schedule(schedule, num_ranks=p, num_chunks=v, num_microbatches=m)
    sizes = Sizes.uniform(p * v, activation=graph, deferred=waiting)
    return [peak.size for peak in memory_peaks(Program(found, found.actions), sizes)]


def counted(pipeline: Pipeline, graph: float, waiting: float) -> list[float]:
    held = in_flight(pipeline, np.arange(pipeline.pp))
    sums = held.graphs.sum(2) * graph + held.deferred.sum(2) * waiting
    return sums.max(0).tolist()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_peaks_equal_the_replay(schedule: str) -> None:
    for p, v, m in shapes(schedule):
        for weights in WEIGHTS:
            pipeline = Pipeline(schedule, p, v, m)
            assert counted(pipeline, *weights) == pytest.approx(replayed(pipeline, *weights)), pipeline


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
def test_peaks_are_constant_once_the_schedule_is_steady(schedule: str) -> None:
    chunks = 1 if schedule in ONE_CHUNK else 2
    for p in (2, 4):
        pipeline = Pipeline(schedule, p, chunks, 100 * p)
        few = steady(pipeline)
        assert few.microbatches < pipeline.microbatches
        for one, other in zip(in_flight(pipeline, np.arange(p)), in_flight(few, np.arange(p)), strict=True):
            assert np.array_equal(one, other)


def test_pb_warm_up_is_twice_as_deep() -> None:
    held = in_flight(Pipeline("1f1b", 4, 1, 20), np.arange(4), warm_up="pb")
    assert held.graphs[0, :, 0].tolist() == [7, 5, 3, 1]


def test_peaks_with_a_microbatch_group_size() -> None:
    pipeline = Pipeline("interleaved", 2, 2, 8)
    found = build_schedule("interleaved", num_ranks=2, num_chunks=2, num_microbatches=8, group=4)
    peaks = [peak.size for peak in memory_peaks(Program(found, found.actions), Sizes.uniform(4))]
    assert in_flight(pipeline, np.arange(2), group=4).graphs.sum(2).max(0).tolist() == peaks
