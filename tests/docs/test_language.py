"""Words of an old private dialect must not return to pages and code."""

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
    r"(?:bytes|tokens|samples|seconds|ms|s|MB|GB|[KMG]iB|FLOPs|nats|once|twice) an? (?:step|token|layer|second|parameter|value|device)"
    r"(?! over)": "per step",
    r"for ever": "forever",
}
"""Pattern -> what to write."""

DIALECT = re.compile(rf"\b(?:{'|'.join(WORDS)})\b".replace(" ", r"\s+"), re.IGNORECASE)

PAGES = sorted((*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")))

FOLDERS = sorted(
    path.parent for top in ("megalite", "tests", "benchmarks") for path in (REPOSITORY / top).glob("*/__init__.py")
)
FOLDERS += [REPOSITORY / "examples", REPOSITORY / "tools"]


def found_in(text: str) -> list[str]:
    """Words of the list in a text, as written."""
    return [" ".join(match.group().split()) for match in DIALECT.finditer(text)]


def prose(page: Path) -> str:
    """Text of a page without code and without tables generated from code."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_no_dialect(page: Path) -> None:
    assert found_in(prose(page)) == []


def sources(folder: Path) -> dict[str, str]:
    """Return path -> text of the Python files except this one, which lists the words."""
    return {str(path): path.read_text(encoding="utf-8") for path in folder.rglob("*.py") if path != Path(__file__)}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(REPOSITORY)))
def test_code_has_no_dialect(folder: Path) -> None:
    assert {path: found for path, text in sources(folder).items() if (found := found_in(text))} == {}


OPENING = re.compile(r'^ *"""((?:In place|Of(?! several)|That|Those|Who|Whom|It|So)\b.*)', re.MULTILINE)
"""Docstrings that begin with a reference to something unnamed, such as "Of all ranks" or "Those of the stage"."""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(REPOSITORY)))
def test_no_docstring_opens_with_a_reference(folder: Path) -> None:
    assert {path: found for path, text in sources(folder).items() if (found := OPENING.findall(text))} == {}
