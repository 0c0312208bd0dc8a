"""What a run left behind, read: measured numbers, or why there are none."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.sweep.candidates import Run
from megalite.sweep.results import FAILED, OK, OOM, REFUSED, TIMEOUT, Result, measure, outcome, steps_made
from megalite.training.sinks import JsonLines
from tests.sweep.sweeps import read_runs, write_sweep

TORCHRUN = """
E1121 23:00:00.000000 140 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: {status}) local_rank: 1
Traceback (most recent call last):
  File "run.py", line 900, in main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
  exitcode  : {status} (pid: 1)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Any run of 128 tokens a step."""
    _, runs = read_runs(write_sweep(tmp_path))
    assert runs[0].tokens_per_step == 128
    return runs[0]


def write_metrics(folder: Path, milliseconds: list[float]) -> None:
    """As training writes them, a validation record among them."""
    sink = JsonLines(folder / "metrics.jsonl", step=0)
    for step, time in enumerate(milliseconds, 1):
        place = {"step": step, "consumed_samples": 8 * step}
        record: dict[str, Any] = {"kind": "train", **place, "loss": 5.0 - step, "ms_per_step": time}
        sink.write(record | {"memory_bytes": 1000 * step})
        sink.write({"kind": "valid", **place, "valid_loss": 5.0})
    sink.close()


def end(run: Run, folder: Path, log: str, status: int = 1, timed_out: float | None = None) -> Result:
    """How a run with this log ended."""
    (folder / "log.txt").write_text(log)
    return outcome(run, folder, status=status, timed_out=timed_out, seconds=12.3456, warm_up=1)


def test_median_after_the_warm_up(run: Run, tmp_path: Path) -> None:
    write_metrics(tmp_path, [900.0, 20.0, 40.0, 10.0])
    result = end(run, tmp_path, "", status=0)
    assert (result.status, result.error) == (OK, None)
    assert (result.steps, result.step_seconds) == (3, 0.02)
    assert (result.step_seconds_low, result.step_seconds_high) == (0.01, 0.04)
    assert result.tokens_per_second == pytest.approx(128 / 0.02)
    assert (result.memory_bytes, result.loss, result.seconds) == (4000, 1.0, 12.346)
    assert steps_made(tmp_path) == 4


def test_metrics_that_are_damaged_or_missing(run: Run, tmp_path: Path) -> None:
    assert measure(tmp_path / "metrics.jsonl", warm_up=0)["steps"] == 0
    write_metrics(tmp_path, [10.0, 20.0])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "train", "step": 3, "ms_per_step": "nan"}\n\xff{"kind')
    assert measure(path, warm_up=0)["step_seconds"] == 0.015
    write_metrics(tmp_path, [])
    path.unlink()
    result = end(run, tmp_path, "", status=0)
    assert (result.status, result.error) == (FAILED, "ended well but wrote no step after the first 1")


@pytest.mark.parametrize(
    ("log", "status", "error"),
    [
        (
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
            OOM,
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory\n", OOM, None),
        ("error: x\nMemoryError\n", OOM, "MemoryError"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n", OOM, None),
        ("Signal 9 (SIGKILL) received by PID 77\n", OOM, "a rank was ended by SIGKILL"),
        ("slurmstepd: error: *** JOB 7 CANCELLED DUE TO TIME LIMIT ***\n", TIMEOUT, None),
        ("error: tp 3 does not divide 4\n" + TORCHRUN.format(status=2), REFUSED, "tp 3 does not divide 4"),
        ("error: the loss is nan\n" + TORCHRUN.format(status=3), FAILED, "the loss is nan"),
        (
            "Traceback (most recent call last):\n  File x\n[rank0]: ValueError: first: of two\nRuntimeError: second\n"
            + TORCHRUN.format(status=1),
            FAILED,
            "ValueError: first: of two",
        ),
        (TORCHRUN.format(status=-9), OOM, None),
        (TORCHRUN.format(status=7), FAILED, "exit status 1; log.txt of the run has no error line"),
        ("no word\n", FAILED, "exit status 1; log.txt of the run has no error line"),
        ("RuntimeError: " + 900 * "x", FAILED, None),
    ],
)
def test_why_a_run_failed(log: str, status: str, error: str | None, run: Run, tmp_path: Path) -> None:
    result = end(run, tmp_path, log)
    assert result.status == status
    assert result.error is not None
    assert len(result.error) <= 500
    if error is not None:
        assert result.error.startswith(error)
    json.dumps(vars(result))


def test_a_run_that_was_ended_keeps_what_it_measured(run: Run, tmp_path: Path) -> None:
    write_metrics(tmp_path, [900.0, 20.0])
    result = end(run, tmp_path, "Signal 15 (SIGTERM) received", timed_out=7.0)
    assert (result.status, result.error, result.steps) == (TIMEOUT, "had not ended after 7 s", 1)
    assert result.tokens_per_second is None
