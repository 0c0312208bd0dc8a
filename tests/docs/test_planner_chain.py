"""docs/planner_chain.md and examples/chain: the commands run and print what the page shows."""

import re

import pytest

from megalite.cli.plan_chain import main
from tests.e2e.commands import Command, commands_in
from tests.e2e.programs import REPOSITORY

PAGES = ("docs/planner_chain.md", "examples/chain/README.md")
PAGE = (REPOSITORY / PAGES[0]).read_text(encoding="utf-8")
COMMANDS = [command for page in PAGES for command in commands_in((REPOSITORY / page).read_text(encoding="utf-8"), page)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.source}: {command.line}"[:70])
def test_command(command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert command.words[:2] == ["megalite", "plan-chain"]
    status = main(command.words[2:])
    said = capsys.readouterr()
    assert status == 0, said.err
    if command.source == PAGES[0]:
        (shown,) = re.findall(rf"^\$ {re.escape(command.line)}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
        assert (said.out + said.err).split("\n") == shown.split("\n")
    else:
        assert re.search(r"^this plan +0\.89", said.out, re.MULTILINE)
