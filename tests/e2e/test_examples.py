"""Every YAML of the examples works, and so does every command of the documentation."""

import json
from pathlib import Path

import pytest

from megalite.cli.main import main as megalite
from megalite.cli.train import main
from megalite.config import files
from megalite.config.validate import require_startable, validate
from tests.docs.execution import in_process
from tests.e2e.commands import Command, all_commands, check, commands_in, runnable
from tests.e2e.forked import train_forked
from tests.e2e.programs import REPOSITORY

pytestmark = pytest.mark.e2e

CONFIGS = sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("examples/**/run.yaml"))
"""Training configs; sweeps and layer chains have their own tests."""
SHOWN = all_commands()
CHEAP = [command for command in SHOWN if command.is_cheap]


def name_of(command: Command) -> str:
    return f"{command.source}: {command.line[:50]}"


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run at the root: paths in commands and configs are relative to it."""
    monkeypatch.chdir(REPOSITORY)


def test_examples_have_a_readme() -> None:
    assert "examples/quickstart/run.yaml" in CONFIGS
    for config in CONFIGS:
        assert (REPOSITORY / config).with_name("README.md").is_file(), "an example needs a README"


@pytest.mark.parametrize("path", CONFIGS)
def test_config_is_valid_and_dry_runs(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = files.load(path)
    p = config.parallel
    ranks = p.tp * p.pp * p.cp * (p.dp or 1)
    require_startable(validate(config, ranks))
    size = [] if config.model.vocab_size else ["--vocab-size", "2048"]
    assert main(["--config", path, "--dry-run", "--json", *size]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["world_size"] == ranks
    assert report["batch"]["train_steps"] == config.training.train_iters


@pytest.mark.parametrize("command", SHOWN, ids=name_of)
def test_command_has_valid_flags(command: Command) -> None:
    check(command)


@pytest.mark.parametrize("command", CHEAP, ids=name_of)
def test_cheap_command_runs(command: Command) -> None:
    words = runnable(command)
    if "--import" in words:  # plugins would stay imported here
        outcome = train_forked(1, *words, command="megalite.cli.main:main")
    else:
        outcome = in_process(megalite, words)
    assert outcome.status == 0, outcome.err
    assert len(outcome.out) > 100
    assert outcome.err == ""
    if "--json" in command.words:
        json.loads(outcome.out)


def test_readme_starts_with_demo_and_test() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    lines = [command.line for command in commands_in(text, "README.md")]
    assert lines[:2] == ["make demo", "make test"]


def test_demo_config_resumes_from_its_run_folder() -> None:
    config = files.load("examples/quickstart/run.yaml")
    assert config.checkpoint.load == f"{config.logging.run_dir}/checkpoints"
    assert Path(config.data.data_path[0]).parent == Path(str(config.data.tokenizer_model)).parent
