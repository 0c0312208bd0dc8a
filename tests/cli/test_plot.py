"""The picture of a loss curve, from a metrics.jsonl as training writes it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.lines import Line2D

from megalite.cli.plot import figure, main, plot, read_metrics
from megalite.config.errors import ConfigError
from megalite.training.sinks import JsonLines

Captured = pytest.CaptureFixture[str]


def write_run(folder: Path, *, steps: int = 6) -> list[dict[str, Any]]:
    """A run folder with `steps` training records and one validation record every second step, from step 0 on."""
    folder.mkdir(exist_ok=True)
    records: list[dict[str, Any]] = []
    for step in range(steps + 1):
        place = {"step": step, "consumed_samples": 4 * step}
        if step:
            records.append({"kind": "train", **place, "loss": 6.0 - 0.5 * step})
        if step % 2 == 0:
            records.append({"kind": "valid", **place, "valid_loss": 6.25 - 0.5 * step})
    sink = JsonLines(folder / "metrics.jsonl", step=0)
    for record in records:
        sink.write(record)
    sink.close()
    return records


def points(line: Line2D) -> tuple[list[float], list[float]]:
    """Its x and y."""
    x, y = np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)
    return x.tolist(), y.tolist()


def test_every_record_is_a_point(tmp_path: Path) -> None:
    write_run(tmp_path)
    (axes,) = figure(read_metrics(tmp_path), switches=[2, 4]).axes
    train, valid, *switches = map(points, axes.lines)
    assert train == ([1, 2, 3, 4, 5, 6], [5.5, 5.0, 4.5, 4.0, 3.5, 3.0])
    assert valid == ([0, 2, 4, 6], [6.25, 5.25, 4.25, 3.25])
    assert [steps for steps, _ in switches] == [[2, 2], [4, 4]]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["training", "validation", "layout switch"]


def test_a_loss_that_is_no_number_leaves_a_gap(tmp_path: Path) -> None:
    records = [{"kind": "train", "step": step, "loss": loss} for step, loss in ((1, 5.0), (2, "nan"), (3, 4.0))]
    (axes,) = figure(records).axes
    assert str(points(axes.lines[0])) == "([1.0, 2.0, 3.0], [5.0, nan, 4.0])"


def test_writes_a_picture(tmp_path: Path, capsys: Captured) -> None:
    write_run(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'loss.png'}\n"
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert main([str(tmp_path), "--output", str(tmp_path / "curve.svg")]) == 0
    assert "<svg" in (tmp_path / "curve.svg").read_text()


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    records = write_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1][:20] + b"\xff\x00\n"
    path.write_bytes(b"".join(lines) + b'[1]\n"text"\n{}\n' + lines[0].rstrip(b"\n"))  # the last one is cut off
    assert read_metrics(tmp_path) == [record for number, record in enumerate(records) if number != 1]
    sink = JsonLines(path, step=3)  # a run that resumes there has no trouble either
    sink.write({"kind": "train", "step": 4, "loss": 1.0})
    sink.close()
    kept = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert kept == [0, 2, 2, 3, 4]


@pytest.mark.parametrize("output", ["picture.xyz", "nowhere/loss.png"])
def test_output_that_cannot_be(output: str, tmp_path: Path, capsys: Captured) -> None:
    records = write_run(tmp_path)
    with pytest.raises(ConfigError, match=f"cannot write .*{output}: "):
        plot(records, tmp_path / output)
    assert main([str(tmp_path), "--output", str(tmp_path / output)]) == 2
    assert capsys.readouterr().err.startswith(f"error: cannot write {tmp_path / output}: ")


def test_no_metrics(tmp_path: Path, capsys: Captured) -> None:
    assert main([str(tmp_path / "nothing")]) == 2
    error = f"error: {tmp_path / 'nothing' / 'metrics.jsonl'} does not exist; give the --run-dir of a run that"
    assert capsys.readouterr().err.startswith(error)
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([str(tmp_path)]) == 2
    assert "has no records yet" in capsys.readouterr().err
    assert not (tmp_path / "loss.png").exists()
