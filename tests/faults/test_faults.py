"""Runs killed at seven points of different kinds, with checks that nothing is lost."""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from megalite.config.errors import REQUEUE
from tests.e2e.forked import forked
from tests.faults import __main__ as kills
from tests.faults import cycles, life
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


def fresh_prefix_store(words: list[str]) -> None:
    """On rank 0 wait for a peer, and end half a second after a signal; rank 1 ends at once."""
    faulthandler.register(life.STACKS)

    def leave(*_: object) -> None:
        time.sleep(0.5)
        sys.exit(REQUEUE)

    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, leave)
        Path(words[0]).write_text('{"kind": "train", "step": 1, "loss": 1.0}\n')
    signal.pause()


def test_rank_that_was_asked_to_stop_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it waits for a peer that has ended, the launcher's end is not needed."""
    monkeypatch.setattr(life, "FIRST_STACKS", 0.05)
    metrics, kill = tmp_path / "metrics.jsonl", life.Kill((0, 1), after_step=1, number=signal.SIGTERM)
    with forked(2, [metrics], tmp_path, command="tests.faults.test_faults:fresh_prefix_store") as processes:
        found = life._Following(processes, metrics, None, tmp_path, kill).to_the_end()
        statuses = [process.exitcode for process in processes]
    assert (statuses, found.hung, found.launcher_ended) == ([REQUEUE, -signal.SIGTERM], (), False)
