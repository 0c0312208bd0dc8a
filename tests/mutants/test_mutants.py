"""Every mutant can be put in and has a test; `make test-mutants` kills them all."""

import ast
import os
import subprocess
import sys

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import ROOT, Mutant


def test_there_are_many_and_each_has_its_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_can_be_put_in(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    applied = mutant.applied(text)
    assert ast.dump(ast.parse(applied)) != ast.dump(ast.parse(text)), "code, not a comment"


def test_every_test_is_there() -> None:
    tests = list(dict.fromkeys(mutant.test for mutant in MUTANTS))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line for line in done.stdout.splitlines() if "::" in line} == set(tests)
