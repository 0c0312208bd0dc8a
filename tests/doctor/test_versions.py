"""Packages and their versions, as pyproject.toml has them."""

import re
import tomllib
from pathlib import Path

import pytest

from megalite.doctor.host import OLDEST_PYTHON, PACKAGES, Finding, examine_versions, installed_version, worst

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEVELOPMENT = {
    *("setuptools", "hypothesis", "mypy", "pytest", "pytest-timeout"),
    *("pytest-xdist", "mkdocs", "ruff", "types-PyYAML"),
}


def stated() -> dict[str, tuple[str, str | None]]:
    """Package -> (oldest version, extra that brings it)."""
    groups = {None: PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    found = {}
    for extra, requirements in groups.items():
        for requirement in requirements:
            name, least = re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?(?:;.*)?", requirement.split("[")[0]).groups()
            if name != "megalite" and name not in DEVELOPMENT:
                found[name] = (least or "", extra)
    return found


def test_the_table_is_that_of_the_project() -> None:
    assert {package.name: (package.least, package.extra) for package in PACKAGES} == stated()
    least = PROJECT["requires-python"].removeprefix(">=")
    assert tuple(map(int, least.split("."))) == OLDEST_PYTHON


def found(**versions: str | None) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine_versions(lambda name: versions.get(name, "99.0"))}


def test_here() -> None:
    assert installed_version("torch") is not None and installed_version("no-such-package") is None
    rows = {finding.name: finding for finding in examine_versions()}
    assert worst(rows.values()) == "ok"
    assert set(rows) == {"python", "megalite", *(package.name for package in PACKAGES)}


def test_missing_and_old() -> None:
    rows = found(torch="2.9.1+cu128", safetensors=None, matplotlib=None, tokenizers="0.9", numpy="weird")
    assert (rows["torch"].level, rows["torch"].text) == ("error", "2.9.1+cu128, older than 2.11")
    assert rows["torch"].remedy == "pip install 'torch>=2.11'"
    assert (rows["safetensors"].level, rows["safetensors"].text) == ("error", "not installed")
    assert rows["matplotlib"].level == "ok"
    assert rows["matplotlib"].text == "not installed; for megalite plot: pip install 'megalite[plot]'"
    assert (rows["tokenizers"].level, rows["tokenizers"].remedy) == ("warning", "pip install 'megalite[tokenizers]'")
    assert rows["numpy"].level == "ok"
    assert found(torch="2.11.0a0+git")["torch"].level == "ok"


def test_a_finding_that_is_bad_has_a_remedy() -> None:
    with pytest.raises(ValueError, match="a warning without a remedy"):
        Finding(topic="a", name="b", level="warning", text="c")
    assert worst([]) == "ok"
    levels = [Finding(topic="a", name="b", level=level, text="c", remedy="d") for level in ("error", "ok", "warning")]
    assert worst(levels) == "error" and worst(levels[1:]) == "warning"
