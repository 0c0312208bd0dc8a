"""Test `megalite runs` on runs in every state, and its pictures."""

import json
import math
import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from megalite.cli.runs import find_runs, read_run, status_of
from megalite.cli.tool_commands import RUNS as main
from megalite.config import files
from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.planner.page import Line, draw_curves
from megalite.training.records import METRICS, JsonLines, Session

NOW = 1_750_000_000.0


def write_run(folder: Path, *, steps: int = 30, speed: float = 800.0, sessions: list[Session] | None = None) -> None:
    folder.mkdir(parents=True)
    sink = JsonLines(folder / "metrics.jsonl", step=0)
    for step in range(1, steps + 1):
        place = {"step": step, "consumed_samples": 8 * step}
        loss = math.nan if step == 7 else 2.0 + 4.0 / step
        sink.write({"kind": "train", **place, "loss": loss, "tokens_per_second": speed, "ms_per_step": 100.0})
        if step % 10 == 0:
            sink.write({"kind": "valid", **place, "valid_loss": 2.5 + 4.0 / step})
    sink.close()
    if sessions is not None:
        tree = {"sessions": [vars(one) for one in sessions]}
        (folder / "sessions.json").write_text(json.dumps(tree))
    (folder / "config.yaml").write_text(files.dump(replace(RunConfig(), train_iters=40)))


def session(**changes: Any) -> Session:
    values = {"started": NOW, "seen": NOW + 4.0, "ended": "finished", "ranks": 4, "layout": "tp 2 pp 2"}
    return Session(**{**values, "steps_seconds": 3.0, "host": platform.node(), **changes})


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_run(tmp_path / "a", sessions=[session()])
    write_run(tmp_path / "sweep" / "b<&>", speed=400.0, sessions=[session(ended=None, pid=os.getpid())])
    write_run(
        tmp_path / "c", steps=3, sessions=[session(ended=None, pid=ended.pid), session(ended=None, pid=ended.pid)]
    )
    write_run(tmp_path / "old", steps=2)
    (tmp_path / "starting").mkdir()
    (tmp_path / "starting" / "sessions.json").write_text("{")
    (tmp_path / "a" / "checkpoints").mkdir()
    (tmp_path / "a" / "checkpoints" / "metrics.jsonl").write_text("")  # checkpoints are not searched
    return tmp_path


def test_list_of_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert " ".join(head.split()) == "run status layout ranks step loss valid loss tokens/s goodput starts started"
    cells = {row.split()[0]: re.split(r"\s{2,}", row) for row in rows}
    assert list(cells) == ["a", "c", "old", "starting", "sweep/b<&>"]
    assert cells["a"][1:9] == ["finished", "tp 2 pp 2", "4", "30/40", "2.1333", "2.6333", "800", "75.0%"]
    assert cells["c"][1] == "killed" and cells["c"][-2] == "2"
    assert cells["sweep/b<&>"][1] == "running" and "400" in cells["sweep/b<&>"]
    assert cells["old"][1] == cells["starting"][1] == "unknown"


def test_json_contains_the_curves(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs / "a"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["step"], found["goodput"]) == ("a", 30, 0.75)
    assert found["losses"][:1] == [[1, 6.0]] and found["losses"][6] == [7, "NaN"]
    assert found["valid_losses"] == [[10, 2.9], [20, 2.7], [30, pytest.approx(2.6333, abs=1e-4)]]


def test_page_is_standalone(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main([str(runs), "--html", str(page)]) == 0
    text = page.read_text()
    assert (
        "://" not in text
        and not re.search("<script [^>]*src|@import|url[(]", text)
        and "b<&>" not in text
        and "b&lt;&amp;&gt;" in text
    )
    pictures = re.findall(r"<svg viewBox.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 3
    for picture, count in zip(pictures, (4, 2, 4)):
        drawn = ElementTree.fromstring(picture)
        curves = [path for path in drawn.iter("path") if "curve" in (path.get("class") or "")]
        assert len(curves) == count
        assert len({(path.get("stroke"), path.get("stroke-dasharray")) for path in curves}) == count


def test_png_output(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs), "--png", str(tmp_path / "runs.png")]) == 0
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.endswith(f"wrote {tmp_path / 'runs.png'}\n")
    assert main([str(runs / "a"), "--png", str(tmp_path / "a.svg")]) == 0, "the suffix gives the format"
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_unit_of_the_loss_is_that_of_cross_entropy(runs: Path, tmp_path: Path) -> None:
    def has_unit() -> bool:
        page, plot = tmp_path / "page.html", tmp_path / "plot.svg"
        assert main([str(runs / "a"), "--html", str(page), "--png", str(plot)]) == 0
        (found,) = {"loss (nats per token)" in path.read_text() for path in (page, plot)}
        return found

    write_run(runs / "a" / "other", steps=2)
    assert has_unit()
    config = runs / "a" / "config.yaml"
    config.write_text(config.read_text().replace("loss: cross-entropy", "loss: focal"))
    assert not has_unit()


@pytest.mark.parametrize(
    "words, error",
    [
        ("none", "none does not exist; give a folder with runs in it"),
        ("a/config.yaml", "a/config.yaml is a file; give a folder"),
        ("a/checkpoints/empty", "there is no run in a/checkpoints/empty: no metrics.jsonl or sessions.json"),
        ("a --html missing/page.html", "cannot write missing/page.html: No such file or directory; give a path"),
        ("a --png missing/a.png", "cannot write missing/a.png: No such file or directory; give a file"),
        ("a --png a.bmpp", "cannot write a.bmpp: "),
    ],
)
def test_mistakes_are_errors(
    words: str, error: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    (runs / "a" / "checkpoints" / "empty").mkdir()
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {error}")


def test_state_of_a_run_on_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.cli.runs.time.time", lambda: NOW)
    away = [session(ended=None, host="elsewhere", pid=1)]
    assert status_of(away, NOW - 60.0) == "running"
    assert status_of(away, NOW - 3600.0) == "silent for 60 min"
    assert status_of(away, NOW - 10_800.0) == "silent for 3 h"


def test_live_run_has_current_goodput(tmp_path: Path) -> None:
    write_run(tmp_path / "a", sessions=[session(ended=None, pid=os.getpid(), steps_seconds=1.0)])
    for name in ("metrics.jsonl", "sessions.json"):
        os.utime(tmp_path / "a" / name, (NOW + 10.0, NOW + 10.0))
    (found,) = find_runs(tmp_path)
    assert found.goodput == pytest.approx(0.1)


def test_non_finite_values_are_gaps() -> None:
    points = [(1.0, 1.0), (2.0, math.nan), (3.0, 2.0), (4.0, 3.0)]
    path = re.search(r'class="curve c0"[^>]* d="(.*?)"', draw_curves([Line("a", points, 0)], x_label="x", y_label="y"))
    assert path is not None
    assert re.sub(r"[\d. ]+", "", path[1]) == "MhML"
    assert draw_curves([Line("a", [(1.0, math.nan)], 0)], x_label="x", y_label="y") == ""


def test_damaged_lines_are_ignored(tmp_path: Path) -> None:
    """Including deeply nested ones."""
    run = tmp_path / "run"
    write_run(run, steps=6)
    (run / "sessions.json").write_text("[" * 200_000)
    path = run / METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = (
        lines[1][:20] + b"\xff\x00\n" + b'{"step": 2, "kind": "train", "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n"
    )
    path.write_bytes(b"".join(lines) + b'[1]\n"text"\n{}\n' + lines[0].rstrip(b"\n"))  # the last line is truncated
    assert list(read_run(run, "a").losses) == [(float(step), 2.0 + 4.0 / step) for step in (1, 3, 4, 5, 6)]
