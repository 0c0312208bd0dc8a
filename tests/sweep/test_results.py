"""Reading a run's output; the folder of a sweep: written results survive a crash, and a folder belongs to one sweep."""

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import ConfigError
from megalite.sweep.candidates import Run
from megalite.sweep.results import (
    FAILED,
    OK,
    OOM,
    REFUSED,
    TIMEOUT,
    Result,
    Store,
    measure,
    outcome,
    refused,
    steps_made,
    table,
)
from megalite.training.records import JsonLines
from tests.sweep.sweeps import MODEL, measured, read_runs, write_sweep


def test_results_survive_the_process_and_a_truncated_line(tmp_path: Path) -> None:
    spec, runs = read_runs(write_sweep(tmp_path))
    folder = tmp_path / "out"
    store = Store.open(folder, spec, "local")
    store.append(measured(runs[0], 0.5))
    store.append(measured(runs[1], 0.25))
    store.close()
    path = folder / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-30])  # as after a crash
    again = Store.open(folder, spec, "local")
    assert list(again.results.values()) == [measured(runs[0], 0.5)]
    assert again.is_done(runs[0].key)
    assert not again.is_done(runs[1].key)
    again.append(measured(runs[1], 0.3))
    again.close()
    third = Store.open(folder, spec, "local")
    assert [result.step_seconds for result in third.results.values()] == [0.5, 0.3]
    third.close()
    assert len(path.read_text().splitlines()) == 3, "existing lines are unchanged"


def test_records_keep_the_types_of_settings(tmp_path: Path) -> None:
    """Varying settings that are lists, numbers, text or unset."""
    entries = [{"pp": 2, "pipeline_layers": [1, 3]}, {"hidden_dropout": 0.25, "add_bias_linear": False}, {"tp": 3}]
    spec, runs = read_runs(write_sweep(tmp_path, grid=None, list=entries))
    store = Store.open(tmp_path / "out", spec, "local")
    for run in runs:
        store.append(measured(run, 0.5) if run.refused is None else refused(run))
    store.close()
    again = Store.open(tmp_path / "out", spec, "local")
    again.close()
    first, second, third = (again.results[run.key].settings for run in runs)
    assert first == {"tp": 1, "pp": 2, "pipeline_layers": [1, 3], "hidden_dropout": 0.0, "add_bias_linear": True}
    assert second == {"tp": 1, "pp": 1, "pipeline_layers": None, "hidden_dropout": 0.25, "add_bias_linear": False}
    assert third["tp"] == 3 and again.results[runs[2].key].status == REFUSED


def test_append_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, runs = read_runs(write_sweep(tmp_path))
    store = Store.open(tmp_path / "out", spec, "local")
    synced: list[str] = []
    path = tmp_path / "out" / "results.jsonl"
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(path.read_text()), fsync(descriptor)))
    store.append(measured(runs[0], 0.5))
    assert json.loads(synced[0])["key"] == runs[0].key
    store.append(measured(runs[0], 0.5))
    assert len(synced) == 1, "the same result is one line"
    store.close()


def test_finished_and_unfinished_runs(tmp_path: Path) -> None:
    spec, runs = read_runs(write_sweep(tmp_path))
    store = Store.open(tmp_path / "out", spec, "local")
    store.append(measured(runs[0], 0.5))
    store.append(measured(runs[1], 0.5, status=FAILED))
    store.append(measured(runs[2], 0.5, status=REFUSED, launched=False))
    assert [store.is_done(run.key) for run in runs] == [True, True, False, False]
    assert [store.is_done(run.key, retry=True) for run in runs] == [True, False, False, False]
    store.close()


def test_folder_belongs_to_one_sweep_and_process(tmp_path: Path) -> None:
    spec, _ = read_runs(write_sweep(tmp_path))
    folder = tmp_path / "out"
    store = Store.open(folder, spec, "local")
    with pytest.raises(ConfigError, match="another sweep uses"):
        Store.open(folder, spec, "local")
    store.close()
    longer, _ = read_runs(write_sweep(tmp_path, steps=9))
    with pytest.raises(ConfigError, match="has a sweep with steps 3, not 9; change --output"):
        Store.open(folder, longer, "local")
    with pytest.raises(ConfigError, match="has a sweep with launcher local, not sbatch"):
        Store.open(folder, spec, "sbatch")
    wider, _ = read_runs(write_sweep(tmp_path, settings=MODEL | {"hidden_size": 64}))
    with pytest.raises(ConfigError, match="has a sweep with settings"):
        Store.open(folder, wider, "local")
    more, _ = read_runs(write_sweep(tmp_path, grid={"tp": [1, 2, 4]}, timeout=7))
    Store.open(folder, more, "local").close()  # configurations may be added
    (folder / "sweep.json").write_text("{")
    with pytest.raises(ConfigError, match=r"sweep.json is damaged"):
        Store.open(folder, spec, "local")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="contains files but no sweep"):
        Store.open(tmp_path / "other", spec, "local")
    with pytest.raises(ConfigError, match=r"cannot write .*thesis.txt"):
        Store.open(tmp_path / "other" / "thesis.txt", spec, "local")


def test_table_of_results(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, grid={"tp": [1, 2], "pipeline_layers": [None, [4]]})
    _, runs = read_runs(path)
    results = {runs[0].key: measured(runs[0], 0.5), runs[2].key: measured(runs[2], 0.5, error="a, b")}
    rows = list(csv.DictReader(io.StringIO(table(runs, results))))
    assert [row["tp"] for row in rows] == ["1", "1", "2", "2"]
    assert [row["pipeline_layers"] for row in rows] == ["", "[4]", "", "[4]"]
    assert [row["status"] for row in rows] == ["ok", "", "ok", ""]
    assert [row["step_seconds"] for row in rows] == ["0.5", "", "0.5", ""]
    assert rows[2]["error"] == "a, b"
    assert float(rows[1]["predicted_memory_bytes"]) > 0


TORCHRUN = """
E1121 23:00:00.000000 140 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: {status}) local_rank: 1
Traceback (most recent call last):
  File "run.py", line 900, in main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
  exitcode  : {status} (pid: 1)"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with 128 tokens per step."""
    _, runs = read_runs(write_sweep(tmp_path))
    assert runs[0].tokens_per_step == 128
    return runs[0]


def write_metrics(folder: Path, milliseconds: list[float]) -> None:
    """Write metrics as training does, with a validation record."""
    sink = JsonLines(folder / "metrics.jsonl", step=0)
    for step, time in enumerate(milliseconds, 1):
        place = {"step": step, "consumed_samples": 8 * step}
        record: dict[str, Any] = {"kind": "train", **place, "loss": 5.0 - step, "ms_per_step": time}
        sink.write(record | {"memory_bytes": 1000 * step})
        sink.write({"kind": "valid", **place, "valid_loss": 5.0})
    sink.close()


def end(run: Run, folder: Path, log: str, status: int = 1, timed_out: float | None = None) -> Result:
    """The outcome of a run with this log."""
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
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(f'{{"kind": "train", "step": 9{" " * 20000}}}\n{metrics.read_text()}')
    assert steps_made(tmp_path) == 4  # only the end is read
    assert steps_made(tmp_path / "absent") == 0


def test_damaged_or_missing_metrics(run: Run, tmp_path: Path) -> None:
    assert measure(tmp_path, warm_up=0)["steps"] == 0
    write_metrics(tmp_path, [10.0, 20.0])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "train", "step": 3, "ms_per_step": "nan"}\n\xff{"kind')
    assert measure(tmp_path, warm_up=0)["step_seconds"] == 0.015
    write_metrics(tmp_path, [])
    path.unlink()
    result = end(run, tmp_path, "", status=0)
    assert (result.status, result.error) == (FAILED, "exited with status 0 but wrote no step after the first 1")


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
        ("Signal 9 (SIGKILL) received by PID 77\n", OOM, "a rank was killed by SIGKILL"),
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
        (TORCHRUN.format(status=7), FAILED, "exit status 1; log.txt has no error line"),
        ("no word\n", FAILED, "exit status 1; log.txt has no error line"),
        ("RuntimeError: " + 900 * "x", FAILED, None),
    ],
)
def test_reason_of_a_failed_run(log: str, status: str, error: str | None, run: Run, tmp_path: Path) -> None:
    result = end(run, tmp_path, log)
    assert result.status == status
    assert result.error is not None
    assert len(result.error) <= 500
    if error is not None:
        assert result.error.startswith(error)
    json.dumps(vars(result))


def test_stopped_run_keeps_its_measurements(run: Run, tmp_path: Path) -> None:
    write_metrics(tmp_path, [900.0, 20.0])
    result = end(run, tmp_path, "Signal 15 (SIGTERM) received", timed_out=7.0)
    assert (result.status, result.error, result.steps) == (TIMEOUT, "did not end within 7 s", 1)
    assert result.tokens_per_second is None
