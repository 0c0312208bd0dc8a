"""Regret, rank correlation and error, against numbers worked out by hand."""

import dataclasses
from pathlib import Path

import pytest

from megalite.sweep.candidates import Predicted, Run
from megalite.sweep.report import judge, spearman
from megalite.sweep.results import OOM
from tests.sweep.sweeps import measured, read_runs, write_sweep


def predicted(run: Run, seconds: float) -> Run:
    """The run with a predicted time."""
    return dataclasses.replace(run, predicted=Predicted(memory_bytes=1, first_rank_bytes=1, step_seconds=seconds))


def test_spearman() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    # 1 - 6 sum d^2 / (n (n^2 - 1)) with d = 0, 1, 1, 0
    assert spearman([1, 2, 3, 4], [1, 30, 20, 400]) == pytest.approx(1 - 6 * 2 / 60)
    # Ties share their rank: 0.5, 0.5, 2, 3 against 0, 1, 2, 3.
    assert spearman([5, 5, 9, 10], [1, 2, 3, 4]) == pytest.approx(0.9**0.5)
    assert spearman([1, 1], [1, 2]) is None
    assert spearman([1], [1]) is None


def test_regret_of_the_pick(tmp_path: Path) -> None:
    _, runs = read_runs(write_sweep(tmp_path, ranks=None, grid={"tp": [1, 2, 4], "pp": [1, 2]}))
    times = [(0.1, 0.25), (0.2, 0.2), (0.3, 0.4), (0.4, 0.3), (0.05, None), (0.9, 0.8)]
    runs = tuple(predicted(run, expected) for run, (expected, _) in zip(runs, times))
    results = {
        run.key: measured(run, found) if found else measured(run, 1.0, status=OOM)
        for run, (_, found) in zip(runs, times)
    }
    found = judge(runs, results)
    assert found.pick is not None
    assert found.best is not None
    assert (found.pick.run, found.best.run) == (runs[0], runs[1])
    assert found.regret == pytest.approx(0.25 / 0.2 - 1)
    assert found.missed == (runs[4],), "predicted fastest of all, and out of memory"
    assert len(found.pairs) == 5
    assert found.correlation == pytest.approx(1 - 6 * 4 / 120)  # swapped: the first two, and the next two
    errors = [0.1 / 0.25, 0.2 / 0.2, 0.3 / 0.4, 0.4 / 0.3, 0.9 / 0.8]
    assert found.mean_error == pytest.approx(sum(abs(error - 1) for error in errors) / 5)


def test_speed_is_tokens_a_second_where_batches_differ(tmp_path: Path) -> None:
    _, (small, large) = read_runs(write_sweep(tmp_path, grid={"tp": [1], "global_batch_size": [8, 32]}))
    small, large = predicted(small, 1.0), predicted(large, 2.0)
    found = judge((small, large), {small.key: measured(small, 1.0), large.key: measured(large, 3.0)})
    assert found.pick is not None
    assert found.pick.run == large
    assert found.regret == 0.0


def test_nothing_to_judge(tmp_path: Path) -> None:
    _, runs = read_runs(write_sweep(tmp_path))
    found = judge(runs, {runs[0].key: measured(runs[0], 1.0)})
    assert (found.pick, found.regret, found.correlation, found.mean_error) == (None, None, None, None)
