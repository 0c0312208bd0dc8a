"""Every mutant can be put in and has a test; `make test-mutants` kills them all."""

import ast
from functools import cache

import pytest

from tests.e2e.forked import train_forked
from tests.mutants.mutant import MUTANTS, ROOT, Mutant


def test_there_are_many_and_each_has_its_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@cache
def original(file: str) -> tuple[str, str]:
    """Its text and its syntax."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return text, ast.dump(ast.parse(text))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_can_be_put_in(mutant: Mutant) -> None:
    text, syntax = original(mutant.file)
    assert ast.dump(ast.parse(mutant.applied(text))) != syntax, "code, not a comment"


def test_every_test_is_there() -> None:
    tests = list(dict.fromkeys(mutant.test for mutant in MUTANTS))
    words = ("--collect-only", "-p", "no:cacheprovider", *tests)
    done = train_forked(1, *words, seconds=250, command="pytest:main", more={"PYTEST_ADDOPTS": ""}).require_success()
    assert {line for line in done.out.splitlines() if "::" in line} == set(tests)
