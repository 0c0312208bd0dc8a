"""The pipeline benchmark, without its timings."""

import pytest
import torch

from benchmarks.live_bytes import LiveBytes
from benchmarks.pipeline.fidelity import AUTO, NAMED, bench_dapple
from benchmarks.pipeline.sleep import Durations, SleepingRank, costs_of, measured_durations
from megalite.pipeline.ir.generators import SCHEDULES
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Kind, Schedule
from megalite.pipeline.ir.simulate import simulate

NOTHING = Durations.equal(0.0)


def test_dapple_headline_is_reproduced_by_simulator_and_replay() -> None:
    """Throughput 1.6 times as high with 12 % less memory; DAPPLE omits GPipe with a third microbatch."""
    found = bench_dapple()["ratios"]
    assert list(found["simulated"].values()) == pytest.approx([1.530, 1.604, 1.328, -0.124], abs=5e-4)
    assert list(found["paper"].values()) == [
        pytest.approx(1.604, abs=5e-4),
        pytest.approx(1.604, abs=5e-4),
        None,
        pytest.approx(-0.124, abs=5e-4),
    ]


def test_sleep_per_kind_of_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of action sleeps for its parts: a B for both halves of the backward."""
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.pipeline.sleep.time.sleep", slept.append)
    durations = Durations(forward=1.0, input_grad=2.0, weight_grad=4.0)
    program = lower(Schedule.from_csv("0F0,0I0,0W0,0F1,0R1,0B1\n"))
    SleepingRank(program, 0, {}, durations).executor.run()
    assert slept == [1.0, 2.0, 4.0, 1.0, 1.0, 6.0]


def test_durations_cover_every_kind_of_action() -> None:
    took = measured_durations(NOTHING, microbatches=2)
    assert took.keys() == {Kind.F, Kind.B, Kind.I, Kind.W, Kind.R}


def test_costs_are_sums_of_measured_durations() -> None:
    """The simulator sums the measured durations, including recomputation where there is one."""
    took = {Kind.F: 1.0, Kind.R: 1.5, Kind.I: 2.25, Kind.W: 3.0, Kind.B: 5.0}
    for csv, split, recomputed, seconds in (
        ("0F0,0B0\n", False, False, 6.0),
        ("0F0,0I0,0W0\n", True, False, 6.25),
        ("0F0,0R0,0B0\n", False, True, 7.5),
    ):
        costs = costs_of(took, 1, split=split, recomputed=recomputed, p2p=0.0)
        assert simulate(lower(Schedule.from_csv(csv)), costs).makespan == seconds


def test_every_schedule_is_measured() -> None:
    assert {family for family, _, _ in NAMED.values()} == set(SCHEDULES)
    assert set(AUTO.values()) == {1, 2}


def test_live_bytes_counts_live_storages() -> None:
    outside = torch.zeros(1000)
    with LiveBytes() as live:
        kept = outside + 1.0
        view = kept[:10]
        outside.add_(1.0)
        temporary = torch.cat([kept, kept])
        del temporary
    assert (live.now, live.peak) == (4000, 12000)
    del kept
    assert live.now == 4000, "the view keeps the storage alive"
    del view
    assert live.now == 0
