"""`megalite plot`: the picture of one run's curves, from a metrics.jsonl as training writes it."""

from pathlib import Path

import pytest

from megalite.cli.runs import METRICS, draw, plot, read_run
from megalite.training.sinks import JsonLines

Captured = pytest.CaptureFixture[str]


def write_run(folder: Path, *, steps: int = 6) -> None:
    """A run folder with `steps` training records and one validation record every second step, from step 0 on."""
    sink = JsonLines(folder / METRICS, step=0)
    for step in range(steps + 1):
        place = {"step": step, "consumed_samples": 4 * step}
        if step:
            sink.write({"kind": "train", **place, "loss": 6.0 - 0.5 * step, "tokens_per_second": 100.0})
        if step % 2 == 0:
            sink.write({"kind": "valid", **place, "valid_loss": 6.25 - 0.5 * step})
    sink.close()


def test_writes_a_picture(tmp_path: Path, capsys: Captured) -> None:
    write_run(tmp_path)
    assert plot([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'loss.png'}\n"
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert plot([str(tmp_path), "--output", str(tmp_path / "curve.svg")]) == 0
    assert "<svg" in (tmp_path / "curve.svg").read_text()


def test_a_marked_step_is_drawn(tmp_path: Path) -> None:
    write_run(tmp_path)
    pictures = {}
    for marked in ([], [2, 4]):
        draw([read_run(tmp_path, "a")], "a", tmp_path / "a.svg", marked=marked)
        pictures[len(marked)] = (tmp_path / "a.svg").read_text().count("#555555")
    assert pictures[2] == pictures[0] + 2


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1][:20] + b"\xff\x00\n"
    path.write_bytes(b"".join(lines) + b'[1]\n"text"\n{}\n' + lines[0].rstrip(b"\n"))  # the last one is cut off
    found = read_run(tmp_path, "a")
    assert list(found.losses) == [(float(step), 6.0 - 0.5 * step) for step in range(2, 7)]
    assert [step for step, _ in found.valid_losses] == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("output", ["picture.xyz", "nowhere/loss.png"])
def test_output_that_cannot_be(output: str, tmp_path: Path, capsys: Captured) -> None:
    write_run(tmp_path)
    assert plot([str(tmp_path), "--output", str(tmp_path / output)]) == 2
    assert capsys.readouterr().err.startswith(f"error: cannot write {tmp_path / output}: ")


def test_no_metrics(tmp_path: Path, capsys: Captured) -> None:
    assert plot([str(tmp_path / "nothing")]) == 2
    error = f"error: {tmp_path / 'nothing' / METRICS} does not exist; give the --run-dir of a run that"
    assert capsys.readouterr().err.startswith(error)
    (tmp_path / METRICS).write_text("")
    assert plot([str(tmp_path)]) == 2
    assert "has no records yet" in capsys.readouterr().err
    assert not (tmp_path / "loss.png").exists()
