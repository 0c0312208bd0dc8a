"""A rank that hangs is named, and the whole run ends with its own exit status within T + 5 s."""

import json
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import HUNG
from megalite.watchdog.processes import supported
from tests.e2e.forked import forked, still_running
from tests.e2e.hanging import install
from tests.e2e.programs import MOCKED, TORCHRUN, run
from tests.support.patience import wait_until

SECONDS = 2.5
FLAGS = f"{MOCKED} --global-batch-size 4 --lr 1e-3 --train-iters 100000 --log-interval 1".split()
FLAGS += ["--hang-timeout-minutes", str(SECONDS / 60)]


@dataclass
class End:
    """How a run ended."""

    statuses: list[int | None]
    said: str
    """Output on stderr of the ranks and their watchdog."""
    seconds: float
    """Seconds since the last step's line in metrics.jsonl."""
    report: dict[str, Any]
    folder: Path


def hang(folder: Path, fault: str, rank: int, flags: Sequence[str]) -> End:
    run_dir, private = folder / "run", folder / "tmp"
    private.mkdir()
    words, more = [*FLAGS, *flags, "--run-dir", run_dir], {"TMPDIR": str(private), "TORCH_FR_BUFFER_SIZE": "100"}
    with forked(2, words, folder, before=partial(install, fault, rank), more=more) as processes:
        left = still_running(processes, 60)
        ended = time.time()
    # The watchdog reports after the ranks have ended, and removes its folder last.
    wait_until(lambda: left or not any(private.glob("megalite-*")), seconds=5)
    said = "".join((folder / f"{each}.err").read_text() for each in range(2))
    assert not left, f"it did not end\n{said}"
    reports = [json.loads(path.read_text()) for path in run_dir.glob("hang-*.json")]
    return End(
        statuses=[process.exitcode for process in processes],
        said=said,
        seconds=ended - (run_dir / "metrics.jsonl").stat().st_mtime,
        report=reports[0] if reports else {},
        folder=run_dir,
    )


pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not supported(), reason="the watch needs Linux")]

SOCKETS = "--no-shared-memory-collectives"
CASES = {
    "its device stands still, dp 2": ("device", 1, ["--dp", "2"], "its device has not finished what it has to do"),
    "stopped, pp 2, the first stage": ("stop", 0, ["--pp", "2"], "its process is stopped"),
    "holds Python's lock, dp 2": ("hold", 0, ["--dp", "2"], "it waits for no other rank"),
    "left one out, tp 2 on gloo": ("skip", 1, ["--tp", "2", SOCKETS], "its operation "),
    "another shape, dp 2": ("reshape", 0, ["--dp", "2"], "its operation "),
}


@pytest.mark.parametrize("case", CASES)
def test_hanging_rank_is_named(tmp_path: Path, case: str) -> None:
    fault, rank, flags, why = CASES[case]
    end = hang(tmp_path, fault, rank, flags)
    assert end.statuses == [HUNG, HUNG], end.said
    assert end.report["culprits"] == [rank], end.said
    assert f"megalite: rank {rank} stands still: {why}" in end.said
    assert end.seconds < SECONDS + 5
    assert "step 3" in end.said
    (text,) = end.folder.glob("hang-*.txt")
    stacks = end.report["stacks"]
    assert "hanging.py" in stacks[str(rank)] or fault in ("skip", "reshape"), text.read_text()
    # A thread answers for the flight recorder; it needs the GIL.
    assert fault != "hold" or str(rank) not in end.report["flight"]
    assert "gloo:all_reduce" in str(end.report["flight"][str(1 - rank)])
    waits = re.search(r"flight recorder: (gloo:\w+ \d+ of .*) has not finished on rank (\d)", end.said)
    # The flight recorder has no gloo messages and no collectives through shared memory.
    assert fault in ("hold", "skip", "reshape") or flags[0] != "--dp" or (waits and waits.group(2) == str(1 - rank)), (
        end.said
    )
    assert len(stacks) == 2 and all("most recent call first" in stack for stack in stacks.values())


@pytest.mark.parametrize(("flags", "status"), [([SOCKETS], -signal.SIGABRT), ([], 1)])
def test_mismatched_rank_is_named_if_gloo_aborts_another(tmp_path: Path, flags: list[str], status: int) -> None:
    """gloo aborts the rank that receives more than its buffer holds; rank 1 sent twice as much as it should. Through shared
    memory both ranks detect the mismatch."""
    end = hang(tmp_path, "reshape", 1, ["--tp", "2", *flags])
    assert end.statuses[0] == status and end.report == {}, end.said
    assert re.search(
        r"megalite: rank 1 does not fit the others: its operation (\d+) of tp \[0, 1\] is all_reduce of 8192 bytes, but "
        r"all_reduce of 4096 bytes on rank 0",
        end.said,
    ), end.said


def test_torchrun_reports_the_hanging_rank(tmp_path: Path) -> None:
    """Rank 1 holds the lock; without --run-dir the report goes to stderr."""
    script = str(Path(__file__).with_name("hanging.py"))
    words = [*TORCHRUN, "--nproc-per-node", "2", script, "hold", "1", *FLAGS, "--dp", "2"]
    ended = run(*words, seconds=60)
    assert ended.status == 1  # torchrun's own status
    assert "megalite: rank 1 stands still: it waits for no other rank" in ended.err
    root = ended.err.split("Root Cause")[1]
    assert re.search(r"rank +: 1 \(local_rank: 1\)\n +exitcode +: 44", root), ended.err
    assert "rank 1 stood still: it waits for no other rank; step 3" in root
    assert "rank 0 did not cause the hang (culprit: 1)" in ended.err.split("Root Cause")[0]
    assert "===== all threads of rank 1 =====" in ended.err
