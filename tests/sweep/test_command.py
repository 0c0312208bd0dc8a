"""`megalite sweep`: its flags and output, and a killed sweep that continues."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from megalite.cli import sweep
from megalite.cli.output import Stopped
from megalite.cli.tool_commands import SWEEP as main
from megalite.sweep.results import OK, Store
from tests.support.patience import wait_until
from tests.sweep.sweeps import measured, read_runs, write_sweep

Captured = pytest.CaptureFixture[str]


def test_dry_run_checks_all_without_writing(tmp_path: Path, capsys: Captured) -> None:
    path = write_sweep(tmp_path, exclude=["tp == 1 and pp == 1"], cluster="cpu-box")
    assert main([str(path), "--dry-run", "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    opening, head, *rows = said.out.splitlines()
    assert opening == f"{path}: 3 configurations of 3 steps; 1 left out by exclude and only"
    assert head.split() == ["configuration", "ranks", "predicted", "measured", "tokens/s", "memory", "status"]
    assert [row.split("  ")[0] for row in rows] == ["tp 1, pp 2", "tp 2, pp 1", "tp 2, pp 2"]
    assert " ms " in rows[0]
    assert rows[0].endswith("waiting")
    assert "refused: " in rows[2]
    assert not (tmp_path / "out").exists()


def test_strict_and_empty_sweeps(tmp_path: Path, capsys: Captured) -> None:
    path = write_sweep(tmp_path)
    out = ["--output", str(tmp_path / "out")]
    assert main([str(path), *out, "--strict"]) == 2
    assert "error: 1 of 4 configurations are refused: tp 2, pp 2: " in capsys.readouterr().err
    path = write_sweep(tmp_path, grid={"tp": [3, 5]})
    assert main([str(path), *out]) == 2
    assert "error: none of 2 configurations can run; tp 3: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_report_without_running(tmp_path: Path, capsys: Captured) -> None:
    path = write_sweep(tmp_path, cluster="cpu-box")
    spec, runs = read_runs(path)
    store = Store.open(tmp_path / "out", spec, "local")
    for number, run in enumerate(runs[:3]):
        store.append(measured(run, 0.1 + 0.1 * number))
    store.close()
    words = [str(path), "--output", str(tmp_path / "out"), "--report-only"]
    assert main([*words, "--calibrate", str(tmp_path / "mine.yaml")]) == 0
    out = capsys.readouterr().out
    assert "4 configurations: 3 ok, 1 not run yet." in out
    assert f"Fastest: {runs[0].label} with 1280 tokens/s, 100 ms per step." in out
    assert "Fitted to 3 runs: mean error" in out
    for name in ("results.csv", "report.html"):
        assert f"wrote {tmp_path / 'out' / name}" in out
    assert (tmp_path / "mine.yaml").is_file()
    assert (tmp_path / "mine-stack.yaml").is_file()


def processes_with(words: str) -> list[str]:
    """Command lines of live processes that contain these words."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if words in line and int(entry.name) != os.getpid():
            found.append(line)
    return found


def test_stopped_sweep_says_how_to_continue(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "execute", Mock(side_effect=Stopped(signal.SIGINT)))
    assert main([str(write_sweep(tmp_path)), "--output", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "interrupted; the same command continues from here\n"
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the ranks of a killed sweep run on")
def test_killed_sweep_leaves_no_process_and_continues(tmp_path: Path, capsys: Captured) -> None:
    path = write_sweep(tmp_path, ranks=1, grid={"micro_batch_size": [1, 2]}, environment={"OMP_NUM_THREADS": 1})
    folder = tmp_path / "out"
    spec, runs = read_runs(path)
    store = Store.open(folder, spec, "local")
    store.append(measured(runs[0], 0.5))
    store.close()
    before = (folder / "results.jsonl").read_bytes()
    command = [sys.executable, "-m", "megalite.cli.main", "sweep", str(path), "--output", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    config = f"-m megalite.cli.main train --config {folder}"
    # The guard, torchrun and its rank.
    wait_until(lambda: len(processes_with(config)) == 3, seconds=90)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until(lambda: processes_with(config) == [], seconds=30)
    assert (folder / "results.jsonl").read_bytes() == before
    assert main([str(path), "--output", str(folder)]) == 0
    lines = (folder / "results.jsonl").read_bytes().splitlines(keepends=True)
    assert lines[0] == before
    (result,) = map(json.loads, lines[1:])
    assert (result["key"], result["status"], result["steps"]) == (runs[1].key, OK, 2)
    assert result["step_seconds"] > 0
    assert result["memory_bytes"] > 10**7
    assert "2/2 micro_batch_size 2: ok" in capsys.readouterr().out
    assert runs[1].key in (folder / "report.html").read_text()
