"""examples/mup: the program of its page, with little text, two rates and a few steps."""

import runpy
from pathlib import Path

import pytest

from tests.e2e.commands import commands_in
from tests.e2e.programs import REPOSITORY


def test_few_steps_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    page = (REPOSITORY / "examples/mup/README.md").read_text(encoding="utf-8")
    (command,) = [command.words for command in commands_in(page, "README.md")]
    assert command == ["python", "examples/mup/width.py"]
    prepare = runpy.run_path("examples/shakespeare/prepare.py")["main"]
    assert prepare(["--input", str(REPOSITORY / "LICENSE")]) == 0
    capsys.readouterr()
    few = ["--steps", "2", "--widths", "64", "96", "--rates", "0.01"]
    assert runpy.run_path(command[1])["main"](few) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    found = {(row[0], row[-3]): row[-2] for row in rows}
    assert found["without", "64"] == found["with", "64"], "at the base width muP has no effect"
    assert found["without", "96"] != found["with", "96"]
