"""kill -9 of one rank under torchrun: the job ends at once, and the same command resumes with identical losses. Also tests
the listening sockets of a run.

`tests/faults` kills ranks at many other moments, without torchrun."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.e2e.forked import train_forked
from tests.e2e.programs import MODEL, TRAINING, Corpus, finish, ranks_of, reached, records, start, train_command
from tests.support.listeners import Listener, listeners
from tests.support.patience import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")]

STEPS, SAVE_INTERVAL, KILL_AFTER = 20, 4, 10
SCHEDULED = f"--train-iters {STEPS} --tp 2 --attention-dropout 0.1".split()


def flags(corpus: Corpus, run_dir: Path) -> list[str | Path]:
    resume = ("--save-interval", str(SAVE_INTERVAL), "--load", run_dir / "checkpoints", "--fresh-if-missing")
    return [*MODEL, *TRAINING, *SCHEDULED, *corpus.flags, "--run-dir", run_dir, *resume]


def checkpoints(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


def check_listeners(found: list[Listener]) -> None:
    """Expect torchrun's two stores on all addresses, and gloo's groups in the ranks only on the address of the host's name
    (`tests/training/test_instruments.py` tests that no rank has others)."""
    stores = [one for one in found if "torch.distributed.run" in one.command]
    others = [one for one in found if one not in stores]
    assert 1 <= len(stores) <= 2 and len({one.process for one in stores}) == 1
    assert all("pretrain_gpt.py" in one.command for one in others), found
    assert len({one.process for one in others}) == 2
    assert not any(one.on_all_addresses for one in others)


def test_killed_run_resumes_with_identical_losses(corpus: Corpus, folder: Path) -> None:
    process = start(train_command(2, *flags(corpus, folder)))
    try:
        wait_until(lambda: reached(folder, 1), running=lambda: process.poll() is None)
        ranks = ranks_of(process)
        assert sorted(ranks) == [0, 1]
        check_listeners(listeners(process.pid))
        wait_until(lambda: reached(folder, KILL_AFTER), running=lambda: process.poll() is None)
    except BaseException:
        process.terminate()
        raise
    os.kill(ranks[1], signal.SIGKILL)
    died = finish(process, seconds=60)
    assert died.status != 0
    assert died.seconds < 25  # torchrun waits 30 s for ranks that do not end on request
    root = died.err.split("Root Cause")[1]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", root) and "Signal 9 (SIGKILL)" in root, died.err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    before = records(folder, "train")
    assert KILL_AFTER <= len(before) < STEPS
    newest = max(checkpoints(folder) - {"latest"})
    assert int(newest.removeprefix("step-")) >= KILL_AFTER // SAVE_INTERVAL * SAVE_INTERVAL

    again = train_forked(2, *flags(corpus, folder)).require_success()
    assert f"{newest} (written by" in again.out
    after = records(folder, "train")
    assert [row["step"] for row in after] == list(range(1, STEPS + 1))
    for field in ("step", "loss", "grad_norm", "lr", "consumed_samples"):  # also of repeated steps, bit for bit
        ours, theirs = ([row[field] for row in rows] for rows in (after[: len(before)], before))
        assert ours == theirs
    steps = range(SAVE_INTERVAL, STEPS + 1, SAVE_INTERVAL)
    assert checkpoints(folder) == {"latest", *(f"step-{step:07}" for step in steps)}
