"""examples/large_batch: the program of its page with little text and few samples, and its figure."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.commands import commands_in
from tests.e2e.forked import train_forked
from tests.e2e.programs import REPOSITORY

HERE = REPOSITORY / "examples" / "large_batch"
PAGE = (HERE / "README.md").read_text(encoding="utf-8")


def forks(words: list[str], **_: Any) -> None:
    """Fork the two ranks that torchrun would start."""
    flags = words[words.index(str(REPOSITORY / "pretrain_gpt.py")) + 1 :]
    train_forked(2, *flags, folder=Path.cwd()).require_success()


@pytest.mark.e2e
def test_few_steps_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (command,) = [command.words for command in commands_in(PAGE, "README.md")]
    assert command == ["python", "examples/large_batch/study.py"]
    prepare = runpy.run_path("examples/shakespeare/prepare.py")["main"]
    assert prepare(["--input", str(REPOSITORY / "LICENSE")]) == 0
    capsys.readouterr()
    study = runpy.run_path(command[1])["main"].__globals__
    study["RATES"].update(adam=(0.005, 0.0125), lamb=(0.0625,))
    study |= {"RANKS": 2, "EVALUATED": 64}
    study["subprocess"] = SimpleNamespace(run=forks, DEVNULL=None)
    assert study["main"](["--samples", "128", "--batches", "8", "64"]) == 0
    *rows, noise = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        [name, *sizes] for name in ("AdamW", "LAMB") for sizes in (["8", "16"], ["64", "2"])
    ]
    assert float(rows[0][3]) < float(rows[1][3]), "the loss after 16 steps is below that after 2"
    assert noise[:4] == ["gradient", "noise", "scale", "at"] and float(noise[-4]) > 0.0
    assert "AdamW" in Path("runs/large_batch/losses.svg").read_text(encoding="utf-8")


def test_figure_equals_the_table() -> None:
    picture = (HERE / "losses.svg").read_text(encoding="utf-8")
    losses = re.findall(r"^\| (?:AdamW|LAMB) \| \d+ \| \d+ \| ([0-9.]+) \|", PAGE, re.MULTILINE)
    described = re.search(r"AdamW ([0-9. ]+); LAMB ([0-9. ]+)\. ", picture)
    assert len(losses) == 8 and described is not None
    assert " ".join(described.groups()).split() == [f"{float(loss):.3f}" for loss in losses]
    (grew,) = re.findall(r"noise scale grew from (\d+ to \d+) samples", PAGE)
    assert "prefers-color-scheme: dark" in picture and f"grew from {grew} samples" in picture
