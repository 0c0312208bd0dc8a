"""A complete run of `--dp-strategy async-parameter-server`, from the first log line to the last checkpoint."""

import sys
from pathlib import Path

import pytest

from tests.e2e.forked import train_forked
from tests.e2e.programs import MOCKED

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(sys.platform != "linux", reason="forks")]

FLAGS = f"{MOCKED} --global-batch-size 6 --lr 1e-3 --train-iters 12 --lr-decay-iters 12 --log-interval 2".split()
FLAGS += ["--dp-strategy", "async-parameter-server", "--eval-interval", "3", "--eval-iters", "1"]


def test_run_and_resume(tmp_path: Path) -> None:
    words: list[str | Path] = [*FLAGS, "--run-dir", tmp_path, "--save-interval", "3"]
    first = train_forked(3, *words, "--exit-interval", "6", "--async-save").require_success()
    assert "losses and norms of steps are of the samples of data-parallel rank 0" in first.out
    reports = [line for line in first.out.splitlines() if "updates, staleness" in line]
    assert [line.split()[2] for line in reports] == ["9", "9"], "3 workers, 3 steps between synchronizations"
    loads = ("--load", tmp_path / "checkpoints", "--max-staleness", "0")
    second = train_forked(3, *words, *loads).require_success()
    (last,) = [line[9:] for line in first.out.splitlines() if "step  6/12  validation" in line]
    assert last in second.out, "it resumes from the synchronized weights"
    assert "step 12/12  validation" in second.out
    assert (tmp_path / "checkpoints" / "step-0000012").exists()
