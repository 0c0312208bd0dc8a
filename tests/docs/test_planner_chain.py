"""docs/planner_chain.md and examples/chain: the commands run and print what the page shows; the table is what was measured."""

import json
import re

import pytest

from megalite.cli.plan_chain import main
from megalite.planner.chain.twins import TWINS
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
    assert status == (2 if "2y8" in command.words else 0), said.err
    if command.source == PAGES[0]:
        (shown,) = re.findall(rf"^\$ {re.escape(command.line)}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
        assert (said.out + said.err).split("\n") == shown.split("\n")
    else:
        assert re.search(r"^this plan +0\.89", said.out, re.MULTILINE)


def test_the_table_is_what_was_measured() -> None:
    result = json.loads((REPOSITORY / "benchmarks/results/planner-chain.json").read_text())
    cells = {
        (row["model"], row["cluster"]): f"{row['step_s']:.3f} s: "
        + " / ".join(f"{ratio:.2f}" for ratio in row["times_longer"].values())
        for row in result["rows"]
    }
    assert {model for model, _ in cells} == set(TWINS) and len(cells) == 24
    for cell in cells.values():
        assert f"| {cell} |" in PAGE
    assert all(ratio >= 1.0 for row in result["rows"] for ratio in row["times_longer"].values())
    assert max(row["times_longer"]["PipeDream"] for row in result["rows"]) >= 3.23
    assert result["planning_cpu_s"] < 60
