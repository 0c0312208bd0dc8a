"""docs/schedules.md: every command runs, prints the shown output and draws the images of the page."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.cli.tool_commands import SCHEDULE as main
from megalite.pipeline.ir.generators import SCHEDULES
from tests.e2e.commands import Command, commands_in
from tests.e2e.programs import REPOSITORY

PAGE = (REPOSITORY / "docs" / "schedules.md").read_text(encoding="utf-8")
IMAGES = Path("docs/images/schedules")
COMMANDS = [
    command for command in commands_in(PAGE, "docs/schedules.md") if command.words[:2] == ["megalite", "schedule"]
]

DRAWN = {**{name: name for name in SCHEDULES}, "recompute-ahead": "1f1b --recompute-ahead"}
"""Image -> its schedule."""

Run = Callable[[Command], str]


def block(language: str) -> str:
    """The only block of the page in that language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found


def answers() -> dict[str, str]:
    """Command line -> output shown below it; empty for most."""
    found: dict[str, list[str]] = {}
    for text in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        line = ""
        for shown in text.replace("\\\n", " ").splitlines():
            if shown.startswith("$ "):
                line = shown[2:].strip()
                found[line] = []
            else:
                found[line].append(shown)
    return {line: "\n".join(shown) for line, shown in found.items()}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command in the page's folder and returns its output."""
    (tmp_path / IMAGES).mkdir(parents=True)
    (tmp_path / "costs.json").write_text(block("json"))
    monkeypatch.chdir(tmp_path)
    assert main(["--schedule", "1f1b", "--pp", "2", "--microbatches", "3", "--write-csv", "mine.csv"]) == 0
    capsys.readouterr()

    def run(command: Command) -> str:
        status = main(command.words[2:])
        said = capsys.readouterr()
        assert (status, said.err) == (0, "")
        return said.out

    return run


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.line[18:70])
def test_command_prints_the_shown_output(command: Command, run: Run, tmp_path: Path) -> None:
    said = run(command)
    shown = answers()[command.line]
    if shown:
        assert [line.rstrip() for line in said.strip().splitlines()] == [
            line.rstrip() for line in shown.strip().splitlines()
        ]
    for flag in ("--svg", "--trace", "--write-csv"):
        if flag in command.words:
            text = (tmp_path / command.words[command.words.index(flag) + 1]).read_text()
            assert flag != "--trace" or json.loads(text)["traceEvents"]


@pytest.mark.parametrize("name", DRAWN)
def test_image_is_up_to_date(name: str, run: Run, tmp_path: Path) -> None:
    path = IMAGES / f"{name}.svg"
    line = f"megalite schedule --schedule {DRAWN[name]} --pp 4 --microbatches 8 --svg {path}"
    run(Command("docs/schedules.md", line))
    assert (tmp_path / path).read_text() == (REPOSITORY / path).read_text(), f"out of date: run {line}"


def test_every_image_is_shown() -> None:
    there = {str(IMAGES / path.name) for path in (REPOSITORY / IMAGES).glob("*")}
    assert {f"{IMAGES}/{name}.svg" for name in DRAWN} == there
    assert {f"docs/{name}" for name in re.findall(r"!\[.*?\]\((.*?)\)", PAGE)} == there


def test_table_has_every_schedule() -> None:
    rows = re.findall(r"^\| `([a-z0-9][a-z0-9-]+)`[ |,]", PAGE, re.MULTILINE)
    assert set(rows[: rows.index("dualpipe-v") + 1]) == set(SCHEDULES)
