"""Runs that are killed at seven instants, of as many sorts, and what finds out whether something was lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.scenarios import LAYOUTS, SAVINGS

ROOT = Path(__file__).parents[2]
ON_TWO_RANKS = {layout.name for layout in LAYOUTS if layout.ranks == 2}

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="finds the victims' files in /proc"), pytest.mark.e2e]


def report(*words: str, seconds: float) -> dict[str, Any]:
    """What a long check says in its last line."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(600)
def test_no_kill_changes_a_run(tmp_path: Path) -> None:
    """Every layout of two ranks, and every way to save: no loss, no hang, the same bits. `make test-faults` makes more kills.

    With this seed the first kills are of many kinds.
    """
    found = report("tests.faults", "7", "--seed", "10", "--folder", str(tmp_path / "runs"), seconds=580)
    assert found["failures"] == []
    assert found["kills"] >= 7 and len(found["by_kind"]) >= 5, found
    met = [name.split("; ") for name in found["by_run"]]
    assert {layout for layout, _ in met} == ON_TWO_RANKS
    assert {saving for _, saving in met} == {saving.name for saving in SAVINGS}
    assert found["tensors_compared"] > 70 * found["runs"]


@pytest.mark.timeout(300)
def test_no_stop_leaves_anything() -> None:
    """Starts, most of them stopped by a signal: nothing is lost and nothing is left. `make test-cycles` makes more."""
    found = report("tests.faults.cycles", "4", "--seed", "0", seconds=280)
    assert found["cycles"] == 4 and not found["failure"]
    assert any(name.endswith("saved") for name in found["ended"]), found
