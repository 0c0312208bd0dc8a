"""Every mutant can be put in and has a test; `make test-mutants` kills them all."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import ROOT, Mutant, MutantError, judge


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


def test_a_missing_or_doubled_text_is_an_error() -> None:
    mutant = Mutant("x", "a.py", "one", "two", "t", "")
    assert mutant.applied("one + 1") == "two + 1"
    for text in ("none", "", "one + one"):
        with pytest.raises(MutantError, match=r"mutant x: its old text is [02] times in a\.py, must be once"):
            mutant.applied(text.replace("none", "no"))


def _repository(folder: Path) -> Path:
    (folder / "megalite").mkdir()
    (folder / "tests").mkdir()
    for package in ("megalite", "tests"):
        (folder / package / "__init__.py").write_text("")
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (folder / "megalite" / "sum.py").write_text("def add(a, b):\n    return a + b\n")
    (folder / "tests" / "test_sum.py").write_text(
        "from megalite.sum import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    )
    return folder


def test_verdicts(tmp_path: Path) -> None:
    """A fault that the test sees, one that it does not, and one that keeps the test from running."""
    root = _repository(tmp_path)
    test = "tests/test_sum.py::test_add"

    def mutant(new: str, test: str = test) -> Mutant:
        return Mutant("sum", "megalite/sum.py", "a + b", new, test, "")

    assert judge(mutant("a - b"), root).killed
    assert not judge(mutant("b + a"), root).killed
    with pytest.raises(MutantError, match="pytest ended with"):
        judge(mutant("a +"), root)
    with pytest.raises(MutantError, match="pytest ended with"):
        judge(mutant("a - b", "tests/test_sum.py::test_other"), root)
    assert (root / "megalite" / "sum.py").read_text().endswith("a + b\n"), "the original is left alone"
