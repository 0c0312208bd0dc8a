"""Runs killed at seven points of different kinds, with checks that nothing is lost."""

import json
import sys
from pathlib import Path

import pytest

from tests.faults import __main__ as kills
from tests.faults import cycles
from tests.faults.scenarios import LAYOUTS, SAVINGS

ON_TWO_RANKS = {layout.name for layout in LAYOUTS if layout.ranks == 2}

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="finds the victims' files in /proc"), pytest.mark.e2e]


@pytest.mark.timeout(600)
def test_killed_runs_equal_uninterrupted_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every layout of two ranks, and every way to save: no loss, no hang, the same bits. `make test-faults` makes more kills.

    With this seed the first kills are of many kinds."""
    status = kills.main(["7", "--seed", "10", "--folder", str(tmp_path / "runs")])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (status, found["failures"]) == (0, [])
    assert found["kills"] >= 7 and len(found["by_kind"]) >= 5, found
    met = [name.split("; ") for name in found["by_run"]]
    assert {layout for layout, _ in met} == ON_TWO_RANKS
    assert {saving for _, saving in met} == {saving.name for saving in SAVINGS}
    assert found["tensors_compared"] > 70 * found["runs"]


@pytest.mark.timeout(300)
def test_stopped_runs_leave_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    """Starts, most of them stopped by a signal: nothing is lost and nothing remains. `make test-cycles` makes more."""
    status = cycles.main(["4", "--seed", "0"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (status, found["cycles"], found["failure"]) == (0, 4, "")
    assert any(name.endswith("saved") for name in found["ended"]), found
