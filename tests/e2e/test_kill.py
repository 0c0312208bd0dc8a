"""kill -9 of any rank at any moment: the job ends at once, and the same command goes on to the very same losses."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.programs import MODEL, TRAINING, Corpus, finish, losses, records, start, train, train_command

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc"),
]

STEPS, SAVE_INTERVAL = 16, 4
SCHEDULED = f"--train-iters {STEPS} --eval-interval 8 --eval-iters 1 --tp 2 --pp 2".split()


def flags(corpus: Corpus, run_dir: Path) -> list[str | Path]:
    """The one command of all runs here; only the run folder differs."""
    resume = ("--save-interval", str(SAVE_INTERVAL), "--load", run_dir / "checkpoints", "--fresh-if-missing")
    return [
        *MODEL,
        *TRAINING,
        *SCHEDULED,
        "--attention-dropout",
        "0.1",
        *corpus.flags,
        "--run-dir",
        run_dir,
        *resume,
    ]


@pytest.fixture(scope="module")
def uninterrupted(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run that nobody killed."""
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    train(4, *flags(corpus, run_dir)).require_success()
    return run_dir


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], *, seconds: float = 60) -> None:
    """Look again and again, often: some of what is waited for lasts a few milliseconds."""
    end = time.monotonic() + seconds
    while not condition():
        time.sleep(0.0005)
        assert process.poll() is None, "the run ended before its moment came:\n" + "".join(
            process.communicate()
        )
        assert time.monotonic() < end, "the moment did not come"


def ranks_of(torchrun: subprocess.Popen[str]) -> dict[int, int]:
    """Rank -> process id of the children that torchrun has started so far."""
    found: dict[int, int] = {}
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children")
    for child in map(int, children.read_text().split()):
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {int(variable[5:]): child for variable in variables if variable.startswith(b"RANK=")}
    return found


def alive(process: int) -> bool:
    """The process exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def reached(run_dir: Path, step: int) -> bool:
    """The step is in metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    return path.exists() and f'"kind": "train", "step": {step},' in path.read_text()


@dataclass(frozen=True)
class Kill:
    """Which rank dies and when."""

    rank: int
    moment: Callable[[Path], bool]
    newest: tuple[int, ...]
    """Steps of which one must then be the newest checkpoint."""


KILLS = {
    "rank 3 between two saves": Kill(3, lambda run_dir: reached(run_dir, 10), (8,)),
    # The staging folder is there from before the first byte is written until the checkpoint is complete, which it can
    # be by the time that the signal arrives.
    "rank 0 while it saves": Kill(
        0, lambda run_dir: (run_dir / "checkpoints" / ".tmp-step-12").exists(), (8, 12)
    ),
}


def checkpoints(run_dir: Path) -> set[str]:
    """Names in the folder of checkpoints."""
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


@pytest.mark.parametrize("name", KILLS)
def test_goes_on_to_the_same_losses(name: str, corpus: Corpus, uninterrupted: Path, folder: Path) -> None:
    kill = KILLS[name]
    process = start(train_command(4, *flags(corpus, folder)))
    try:
        wait_until(lambda: reached(folder, 1), process)
        ranks = ranks_of(process)
        assert sorted(ranks) == [0, 1, 2, 3]
        wait_until(lambda: kill.moment(folder), process)
    except BaseException:
        process.terminate()
        raise
    os.kill(ranks[kill.rank], signal.SIGKILL)
    died = finish(process, seconds=60)
    assert died.status != 0
    assert died.seconds < 25  # torchrun waits 30 s for ranks that do not end when told to
    assert "SIGKILL" in died.err
    assert not any(alive(pid) for pid in ranks.values())
    assert len(losses(folder)) < STEPS
    newest = max(
        int(entry.removeprefix("step-")) for entry in checkpoints(folder) if entry.startswith("step-")
    )
    assert newest in kill.newest

    again = train(4, *flags(corpus, folder)).require_success()
    assert f"step-{newest:07} (written by" in again.out
    assert losses(folder) == losses(uninterrupted)  # (step, loss), bit for bit
    for field in ("grad_norm", "lr", "consumed_samples"):
        ours, theirs = ([row[field] for row in records(of, "train")] for of in (folder, uninterrupted))
        assert ours == theirs
    last = [records(of, "valid")[-1]["valid_loss"] for of in (folder, uninterrupted)]
    assert last[0] == last[1]
    steps = range(SAVE_INTERVAL, STEPS + 1, SAVE_INTERVAL)
    assert checkpoints(folder) == {"latest", *(f"step-{step:07}" for step in steps)}
