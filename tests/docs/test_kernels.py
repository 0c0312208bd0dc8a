"""docs/kernels.md: its commands run, its table equals the code, and its example of a rule is valid."""

import re
from pathlib import Path

import pytest
import torch

from megalite.cli.main import main
from megalite.config.compute import BACKENDS, OPERATIONS
from megalite.config.errors import ConfigError
from megalite.kernels.registry import IMPLEMENTATIONS, Kernels, read_preferences
from tests.e2e.commands import Command, commands_in
from tests.e2e.programs import REPOSITORY

PAGE = (REPOSITORY / "docs" / "kernels.md").read_text(encoding="utf-8")
COMMANDS = list(commands_in(PAGE, "docs/kernels.md"))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.words[1:4]))
def test_command_of_the_page_runs(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.words[1:]) == 0
    assert capsys.readouterr().err == ""


def test_page_has_all_commands() -> None:
    assert len(COMMANDS) == 4


def test_table_equals_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \|([^|\n]+)" + 4 * r"\|([^|\n]*)" + r"\|$", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == list(OPERATIONS)
    for operation, _, *cells in rows:
        has = dict(zip(("torch", "onednn", "triton", "apex"), cells, strict=True))
        found = IMPLEMENTATIONS[operation]
        assert {backend for backend in BACKENDS if has[backend].strip()} == set(found), operation
        if "apex" in found:
            assert f"`{found['apex'].extension}`" in has["apex"], operation


def test_example_rule_is_valid() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (rule,) = read_preferences(text, "docs/kernels.md").rules
    assert rule.order == ("triton", "torch", "apex") and rule.from_size == 2048


def test_shown_error_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.kernels.registry.why_not_triton", lambda device: "not interpreted")
    (message,) = re.findall(r"^error: (.*)$", PAGE, re.MULTILINE)
    with pytest.raises(ConfigError) as error:
        Kernels({"adam": "apex"}).check(torch.device("cpu"))
    assert str(error.value) == message
