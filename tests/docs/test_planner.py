"""docs/plan.md, docs/planner.md, docs/planner_chain.md and examples/chain: commands run, and every key is explained."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from megalite.cli.tool_commands import PLAN, PLAN_CHAIN
from megalite.planner.hardware import Accelerator, Cluster, Efficiency, Network, Node, SoftwareStack, cluster_names
from tests.e2e.commands import Command, commands_in
from tests.e2e.programs import REPOSITORY


def page(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def commands(name: str, program: str) -> list[Command]:
    return [command for command in commands_in(page(name), name) if command.words[:2] == ["megalite", program]]


PLANS = commands("docs/plan.md", "plan")
CHAINS = [*commands("docs/planner_chain.md", "plan-chain"), *commands("examples/chain/README.md", "plan-chain")]


@pytest.mark.parametrize("command", PLANS, ids=lambda command: " ".join(command.words[2:8]))
def test_plan_commands_run(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a quarter of the GPUs, for a faster search."""
    monkeypatch.chdir(tmp_path)
    words = [*command.words[2:], *([] if "--top" in command.words else ["--top", "1"])]
    at = words.index("--gpus") + 1
    words[at] = str(max(8, int(words[at]) // 4))
    assert PLAN(words) == 0
    assert capsys.readouterr().err == ""
    if "--output" in words:
        assert (tmp_path / "plan.yaml").is_file() and (tmp_path / "plan-alternatives.yaml").is_file()


@pytest.mark.parametrize("command", CHAINS, ids=lambda command: f"{command.source}: {command.line}"[:70])
def test_plan_chain_commands_run(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    status = PLAN_CHAIN(command.words[2:])
    said = capsys.readouterr()
    assert status == 0, said.err
    if command.source == "docs/planner_chain.md":
        pattern = rf"^\$ {re.escape(command.line)}\n(.*?)^```"
        (shown,) = re.findall(pattern, page(command.source), re.MULTILINE | re.DOTALL)
        assert said.out.startswith(shown.removesuffix("...\n")) and said.err == ""
    else:
        assert re.search(r"^this plan +0\.89", said.out, re.MULTILINE)


def test_every_key_and_cluster_is_explained() -> None:
    assert len(PLANS) == 4
    kinds = (Cluster, Accelerator, Node, Network, Efficiency, SoftwareStack)
    names = [field.name for kind in kinds for field in fields(kind)]
    assert [name for name in (*names, *cluster_names()) if f"`{name}`" not in page("docs/planner.md")] == []
