"""Files around the code (make help, pre-commit, workflows, containers, templates) name existing things."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from megalite.cli.main import COMMANDS
from tests.e2e.programs import REPOSITORY

MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
TARGETS = {*re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)}
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def make_targets(text: str) -> set[str]:
    """Targets of the `make TARGET` commands in a text."""
    return {*re.findall(r"(?:`|\$ |run: |entry: |^)make ([a-z][a-z-]*)\b", text, re.MULTILINE)}


def test_make_help_names_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert make_targets(shown) == TARGETS - {"help"}
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None and {*phony[1].split()} == TARGETS


@pytest.mark.parametrize(
    "name",
    [
        ".github/workflows/tests.yml",
        ".github/pull_request_template.md",
        ".pre-commit-config.yaml",
        "CONTRIBUTING.md",
        "README.md",
    ],
)
def test_named_targets_exist(name: str) -> None:
    named = make_targets(read(name))
    assert named and named <= TARGETS


def test_pre_commit_only_calls_make() -> None:
    (repository,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local", "other hooks would duplicate versions"
    for hook in repository["hooks"]:
        assert shlex.split(hook["entry"])[0] == "make"
        assert (hook["language"], hook["pass_filenames"]) == ("system", False)


def test_workflow_runs_ci_on_every_python_and_torch() -> None:
    job: dict[str, Any] = yaml.safe_load(read(".github/workflows/tests.yml"))["jobs"]["tests"]
    steps = [step["run"] for step in job["steps"] if step.get("run", "").startswith("make")]
    assert steps == re.findall(r"^make [a-z]+", read(".ci/run"), re.MULTILINE)
    matrix = job["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13"]
    assert all(version in SpecifierSet(PROJECT["requires-python"]) for version in matrix["python"])
    (oldest,) = (case["torch"] for case in matrix["include"])
    assert f"torch>={oldest.removesuffix('.0')}" in PROJECT["dependencies"], "the oldest that is supported"


def test_dockerfile_copies_existing_files_and_installs_the_lock() -> None:
    text = read("Dockerfile").replace("\\\n", " ")
    instructions = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert instructions[0][0] == "FROM"
    version = instructions[0][1].split(":")[1].split("-")[0]
    assert version in SpecifierSet(PROJECT["requires-python"])
    copied = [name for kind, rest in instructions if kind == "COPY" for name in rest.split()[:-1]]
    assert [name for name in copied if not (REPOSITORY / name).exists()] == []
    ignored = read(".dockerignore").split()
    assert not {*copied} & {*ignored} and ".venv" in ignored
    (installs,) = (rest for kind, rest in instructions if kind == "RUN" and "pip install" in rest)
    assert all("--constraint constraints.txt" in command for command in installs.split("&&"))
    extra = re.search(r"'\.\[(.*)\]'", installs)
    assert extra is not None and extra[1] in PROJECT["optional-dependencies"]
    command = json.loads(next(rest for kind, rest in instructions if kind == "CMD"))
    assert command[0] in PROJECT["scripts"]


def test_devcontainer_uses_make() -> None:
    settings = json.loads(read(".devcontainer/devcontainer.json"))
    assert settings["postCreateCommand"] == "make help && make .venv/.installed"
    version = settings["image"].split(":")[1]
    assert version in SpecifierSet(PROJECT["requires-python"])


@pytest.mark.parametrize("path", sorted((REPOSITORY / ".github/ISSUE_TEMPLATE").iterdir()), ids=lambda path: path.name)
def test_issue_templates_are_valid(path: Path) -> None:
    _, front, body = path.read_text(encoding="utf-8").split("---\n", 2)
    assert {"name", "about", "labels"} <= yaml.safe_load(front).keys()
    for command in re.findall(r"`megalite ([a-z-]+)`", body):
        assert command in COMMANDS
