"""examples/six_strategies: its command, for a few steps on two ranks."""

import runpy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megalite.config.files import CONFIG_NAME
from megalite.sweep.candidates import Run
from megalite.sweep.execute import Launched, LocalLauncher
from tests.e2e.commands import commands_in
from tests.e2e.forked import forked
from tests.e2e.programs import REPOSITORY

HERE = REPOSITORY / "examples" / "six_strategies"
pytestmark = pytest.mark.e2e


class Forks(Launched):
    """A run of the sweep with forked ranks instead of torchrun."""

    def __init__(self, run: Run, folder: Path) -> None:
        super().__init__()
        self._stack = ExitStack()
        words = ["--config", str(folder / CONFIG_NAME)]
        self._processes = self._stack.enter_context(forked(run.ranks, words, folder))
        self.mark_started()

    def look(self) -> int | None:
        statuses = [process.exitcode for process in self._processes]
        return None if None in statuses else max(map(abs, statuses))  # type: ignore[arg-type]

    def end(self) -> None:
        self._stack.close()


def test_few_steps_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first, the second and the last strategy; the dry run of all six is among the commands of the pages."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(LocalLauncher, "start", lambda self, run, folder, *, timeout: Forks(run, folder))
    page = (HERE / "README.md").read_text(encoding="utf-8")
    _, command = [command.words for command in commands_in(page, "README.md")]
    assert command == ["python", "examples/six_strategies/study.py"]
    study = runpy.run_path(command[1])["main"].__globals__
    write_sweep = study["write_sweep"]

    def three(path: Path, text: Path, **sizes: Any) -> None:
        write_sweep(path, text, **sizes)
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert len(tree["list"]) == 6
        tree["list"] = [tree["list"][number] for number in (0, 1, 5)]
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")

    study["write_sweep"] = three
    assert study["main"](["--steps", "4", "--ranks", "2", "--output", str(tmp_path / "six")]) == 0
    lines = (tmp_path / "six.md").read_text(encoding="utf-8").splitlines()
    assert capsys.readouterr().out.splitlines()[-5:] == lines
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    rows = {name: [float(cell) for cell in rest] for name, *rest in cells}
    shown = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ") and "loss" not in line]
    assert list(rows) == [shown[number] for number in (0, 1, 5)], "the page has the rows of the command"
    alone, server, apex = rows.values()
    for speed, _, memory, loss, _ in rows.values():
        assert speed > 0.0 and memory <= alone[2] and loss == pytest.approx(alone[3], abs=0.01)
    assert server[3] == pytest.approx(alone[3], abs=1e-4)
    # With two ranks the server sends all weights, an all-reduce half of both gradients and weights, Apex in 2 bytes.
    assert alone[1] == 0.0 and apex[1] == pytest.approx(server[1] / 2, abs=0.01)
    for unit in ("steps", "seconds"):
        assert "single process" in (tmp_path / f"six_{unit}.svg").read_text(encoding="utf-8")


def test_figure_equals_the_table() -> None:
    picture = (HERE / "losses.svg").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in picture
    page = (HERE / "README.md").read_text(encoding="utf-8").splitlines()
    for row in (line.split("|") for line in page if " MB |" in line and "GB" in line):
        name, sent, memory = row[1].strip(), row[5].split()[0], row[6].split()[0]
        assert f"{name} {float(sent):.2f} and {memory}" in picture
