"""examples/six_strategies: its command, for a few steps on two ranks."""

import runpy
from pathlib import Path

import pytest
import torch

from tests.e2e.commands import commands_in
from tests.e2e.programs import REPOSITORY

HERE = REPOSITORY / "examples" / "six_strategies"
pytestmark = pytest.mark.e2e


def test_a_few_steps_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    page = (HERE / "README.md").read_text(encoding="utf-8")
    _, command = [command.words for command in commands_in(page, "README.md")]
    assert command == ["python", "examples/six_strategies/study.py"]
    few = ["--steps", "5", "--ranks", "2", "--output", str(tmp_path / "six")]
    assert runpy.run_path(command[1])["main"](few) == 0
    lines = (tmp_path / "six.md").read_text(encoding="utf-8").splitlines()
    assert capsys.readouterr().out.splitlines()[-8:] == lines
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    rows = {name: [float(cell) for cell in rest] for name, *rest in cells}
    shown = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ") and "loss" not in line]
    assert list(rows) == shown, "the page has the rows of the command"
    for name, (speed, sent, memory, loss, _) in rows.items():
        apex, alone = name.endswith("+ Apex"), rows["single process"]
        assert speed > 0.0 and memory <= alone[2]
        assert loss == pytest.approx(alone[3], abs=0.01 if apex else 1e-4)
        # Of two ranks each sends half of both gradients and weights, and the one server all weights.
        whole = rows["Horovod-style all-reduce"][1]
        assert sent == (0.0 if name == "single process" else pytest.approx(whole / 2 if apex else whole, abs=0.01))
    for unit in ("steps", "seconds"):
        assert "single process" in (tmp_path / f"six_{unit}.svg").read_text(encoding="utf-8")


def test_the_picture_is_of_the_pages_table() -> None:
    picture = (HERE / "losses.svg").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in picture
    page = (HERE / "README.md").read_text(encoding="utf-8").splitlines()
    for row in (line.split("|") for line in page if " MB |" in line and "GB" in line):
        name, sent, memory = row[1].strip(), row[5].split()[0], row[6].split()[0]
        assert f"{name} {float(sent):.2f} and {memory}" in picture
