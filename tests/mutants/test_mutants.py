"""Every mutant can be inserted and has a test; `make test-mutants` runs them all."""

import ast
from functools import cache

import pytest

from tests.e2e.forked import train_forked
from tests.mutants.mutant import MUTANTS, ROOT, Mutant


def test_mutants_are_many_with_unique_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@cache
def original(file: str) -> tuple[str, str]:
    """Text and syntax tree of a file."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return text, ast.dump(ast.parse(text))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_can_be_inserted(mutant: Mutant) -> None:
    text, syntax = original(mutant.file)
    assert ast.dump(ast.parse(mutant.applied(text))) != syntax, "code, not a comment"


def test_every_test_exists() -> None:
    tests = list(dict.fromkeys(mutant.test for mutant in MUTANTS))
    words = ("--collect-only", "-p", "no:cacheprovider", *tests)
    done = train_forked(1, *words, seconds=250, command="pytest:main", more={"PYTEST_ADDOPTS": ""}).require_success()
    assert {line for line in done.out.splitlines() if "::" in line} == set(tests)
