"""Words of an old private dialect do not come back: none in the pages, and in the code never more than a ceiling.

`CEILINGS` says how many each package still has. A ceiling may only fall: when a package is cleaned, lower its number to the
count that the failing test names. Once all are 0 the table goes.
"""

import re
from pathlib import Path

import pytest

from tests.e2e.programs import REPOSITORY

WORDS = {
    r"told|tells": "says, reports, names",
    r"mend(?:s|ed|ing)?": "fix",
    r"whose": "of which, or another sentence",
    r"lest": "so that ... not",
    r"anew": "again",
    r"nobody": "no one, no rank",
    r"of (?:its|their|our|your) own": "own, separate",
    r"whichever|whoever": "the one that",
    r"(?:goes|go|going|went) on": "continues",
    r"(?:bytes|stages?|chunks?|memory|parameters|layers|batch(?:es)?|ms|[KMG]iB|tokens|actions|lists?|FLOP/s|units|threads) a rank": "per rank",
    r"for ever": "forever",
}
"""Pattern -> what to write."""

DIALECT = re.compile(rf"\b(?:{'|'.join(WORDS)})\b".replace(" ", r"\s+"), re.IGNORECASE)

PAGES = sorted((*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")))

OF_OTHER_PAGES = {"config.md": 13, "data_parallel.md": 7, "kernels.md": 5}
"""Page -> words of the list that it still has; docs/config.md is made from the docstrings of settings."""

CEILINGS = {
    "checkpoint": 0,
    "cli": 3,
    "config": 36,
    "context_parallel": 0,
    "conversion": 0,
    "data": 4,
    "data_parallel": 0,
    "doctor": 11,
    "generation": 3,
    "kernels": 0,
    "models": 0,
    "optimizers": 0,
    "parity": 3,
    "partition": 0,
    "pipeline": 22,
    "planner": 27,
    "preprocess": 4,
    "profiling": 9,
    "sweep": 21,
    "tensor_parallel": 0,
    "tokenizers": 1,
    "topology": 18,
    "training": 34,
    "watchdog": 27,
}
"""Package -> words of the list in its sources."""


def found_in(text: str) -> list[str]:
    """The words of the list in a text, as they stand there."""
    return [" ".join(match.group().split()) for match in DIALECT.finditer(text)]


def prose(page: Path) -> str:
    """A page without code, and without the tables that are made from the code."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page: Path) -> None:
    found = found_in(prose(page))
    assert len(found) <= OF_OTHER_PAGES.get(page.name, 0), sorted(set(found))


@pytest.mark.parametrize("package", sorted(CEILINGS))
def test_code(package: str) -> None:
    files = sorted((REPOSITORY / "megalite" / package).rglob("*.py"))
    found = [word for path in files for word in found_in(path.read_text(encoding="utf-8"))]
    assert len(found) <= CEILINGS[package], f"write plain English, then lower the ceiling: {sorted(set(found))}"


def test_every_package_has_a_ceiling() -> None:
    assert sorted(CEILINGS) == sorted(path.parent.name for path in (REPOSITORY / "megalite").glob("*/__init__.py"))


def test_what_is_found() -> None:
    text = "Nobody is told; it goes\non, 3 GiB a rank, weights of its own"
    assert found_in(text) == ["Nobody", "told", "goes on", "GiB a rank", "of its own"]
    assert found_in("if a rank fails, recommend the amended tellers; a molested layer; ongoing") == []
