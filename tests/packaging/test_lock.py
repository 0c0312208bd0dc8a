"""Packages that `make` installs are pinned."""

import itertools
import re
import tomllib
from importlib.metadata import distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.e2e.programs import REPOSITORY
from tools.lock import LOCK, PYTHONS, lock, needed, pins

PINNED = dict(pins(LOCK.read_text(encoding="utf-8")))


@pytest.mark.parametrize("python", PYTHONS)
def test_all_packages_of_the_dev_extra_are_pinned(python: str) -> None:
    names = needed(python)
    assert {"torch", "numpy", "markupsafe", "mkdocs", "setuptools"} <= names
    assert names - {*PINNED} == set(), "run make lock"


def test_nothing_else_is_pinned() -> None:
    assert {*PINNED} == set().union(*map(needed, PYTHONS))
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"#.*|[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []


def test_pins_are_in_the_supported_range() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    stated = [*project["dependencies"], *itertools.chain.from_iterable(extras)]
    for requirement in map(Requirement, stated):
        version = PINNED.get(canonicalize_name(requirement.name))
        assert version is None or version in requirement.specifier, requirement


def test_lock_equals_the_installed_packages() -> None:
    """Without local versions, which depend on the index."""
    written = dict(pins(lock()))
    assert written["torch"] == distribution("torch").version.partition("+")[0]
    assert {*written} == {*PINNED}
