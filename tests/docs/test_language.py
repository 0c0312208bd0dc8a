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

PACKAGES = sorted(path.parent for path in (REPOSITORY / "megalite").glob("*/__init__.py"))


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


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_code_has_no_dialect(package: Path) -> None:
    assert {
        path: found for path in package.rglob("*.py") if (found := found_in(path.read_text(encoding="utf-8")))
    } == {}


OPENING = re.compile(r'^ *"""((?:In place|Of(?! several)|That|Those|Who|Whom|It|So)\b.*)', re.MULTILINE)
"""Docstrings that begin with a reference to something unnamed, such as "Of all ranks" or "Those of the stage"."""


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_docstring_opens_with_a_reference(package: Path) -> None:
    found = {path.name: OPENING.findall(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")}
    assert {name: texts for name, texts in found.items() if texts} == {}
