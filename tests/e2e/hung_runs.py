"""Runs of forked ranks, one of which hangs in the middle of a step, and how they ended."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.forked import forked, still_running
from tests.e2e.hanging import install
from tests.e2e.programs import MOCKED
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
    """Train on two ranks; `rank` hangs by `fault`."""
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
