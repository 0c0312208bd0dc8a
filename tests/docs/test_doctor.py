"""docs/doctor.md: its topics are those of the code, and its error is said so."""

import re

import pytest

from megalite.cli.main import main
from tests.cli.test_doctor import TOPICS
from tests.e2e.commands import check, commands_in
from tests.e2e.programs import REPOSITORY

PAGE = (REPOSITORY / "docs" / "doctor.md").read_text(encoding="utf-8")


def test_topics() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == TOPICS


def test_commands() -> None:
    commands = list(commands_in(PAGE, "docs/doctor.md"))
    assert len(commands) == 3
    for command in commands:
        check(command)


def test_the_error_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = re.findall(r"^error: .*(?:\n- .*)*$", PAGE, re.MULTILINE)
    assert main(["train", "--num-layer", "4"]) == 2
    assert capsys.readouterr().err == f"{text}\n"
