"""docs/plan.md: every command runs, and every flag is in its table."""

from pathlib import Path

import pytest

from megalite.cli.plan import main
from tests.e2e.commands import Command, commands_in
from tests.e2e.programs import REPOSITORY

PAGE = (REPOSITORY / "docs" / "plan.md").read_text(encoding="utf-8")
COMMANDS = [command for command in commands_in(PAGE, "docs/plan.md") if command.words[:2] == ["megalite", "plan"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.words[2:8]))
def test_command_runs(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command.words[2:], *([] if "--top" in command.words else ["--top", "1"])]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    if "--output" in command.words:
        assert (tmp_path / "plan.yaml").is_file() and (tmp_path / "plan-alternatives.yaml").is_file()


def test_every_flag_is_explained() -> None:
    assert len(COMMANDS) == 4
    assert all(f"`{flag}" in PAGE for flag in main.spellings)
