"""A rank that stands still is named, and all of the run ends with a status of its own within T + 5 s."""

import json
import re
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megalite.watchdog.signals import HUNG, supported
from tests.e2e.forked import fork_rank
from tests.e2e.hanging import installing
from tests.e2e.programs import TORCHRUN, run

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not supported(), reason="the watch needs Linux")]

SECONDS = 2.5
FLAGS = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--vocab-size", "96", "--mock-data", "--micro-batch-size", "1", "--global-batch-size", "4"),
    *("--lr", "1e-3", "--train-iters", "100000", "--device", "cpu", "--log-interval", "1"),
    *("--hang-timeout-minutes", str(SECONDS / 60)),
]


@dataclass
class End:
    """How a run came to its end."""

    statuses: list[int | None]
    said: str
    """By the ranks and who watched them, on stderr."""
    seconds: float
    """From the last step's line in metrics.jsonl."""
    report: dict[str, Any]
    folder: Path


def hang(folder: Path, fault: str, rank: int, flags: list[str], ranks: int = 2) -> End:
    """Train until one rank does something that stops the run."""
    store = dist.TCPStore("localhost", 0, ranks, is_master=True, wait_for_workers=False)
    run_dir, private = folder / "run", folder / "tmp"
    private.mkdir()
    words, more = [*FLAGS, *flags, "--run-dir", str(run_dir)], {"TMPDIR": str(private)}
    processes = [
        fork_rank(each, ranks, store.port, words, folder / str(each), before=installing(fault, rank), more=more)
        for each in range(ranks)
    ]
    try:
        left = {process.sentinel for process in processes}
        end = time.monotonic() + 60
        while left and (rest := end - time.monotonic()) > 0:
            left -= set(wait(list(left), timeout=rest))
        ended = time.time()
    finally:
        for process in processes:
            process.kill()
            process.join()
    said = "".join((folder / f"{each}.err").read_text() for each in range(ranks))
    assert not left, f"it did not end\n{said}"
    wait_until_gone(private)
    reports = [json.loads(path.read_text()) for path in run_dir.glob("hang-*.json")]
    return End(
        statuses=[process.exitcode for process in processes],
        said=said,
        seconds=ended - (run_dir / "metrics.jsonl").stat().st_mtime,
        report=reports[0] if reports else {},
        folder=run_dir,
    )


def wait_until_gone(private: Path) -> None:
    """The watching process removes its folder, as the last thing that it does."""
    end = time.monotonic() + 5
    while any(private.glob("megalite-*")):
        assert time.monotonic() < end, list(private.iterdir())
        time.sleep(0.02)


CASES = {
    "asleep, tp 2": ("sleep", 1, ["--tp", "2"], "it waits for no other rank"),
    "asleep, pp 2, the first stage": ("sleep", 0, ["--pp", "2"], "it waits for no other rank"),
    "stopped, pp 2": ("stop", 1, ["--pp", "2"], "its process is stopped"),
    "holds Python's lock, dp 2": ("hold", 0, ["--dp", "2"], "it waits for no other rank"),
    "left one out, tp 2": ("skip", 1, ["--tp", "2"], "it has gone past all_reduce"),
    "left one out, dp 2": ("skip", 0, ["--dp", "2"], "it has gone past all_reduce"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_named(tmp_path: Path, case: str) -> None:
    fault, rank, flags, why = CASES[case]
    end = hang(tmp_path, fault, rank, flags)
    assert end.statuses == [HUNG, HUNG], end.said
    assert end.report["culprits"] == [rank], end.said
    assert f"megalite: rank {rank} stands still: {why}" in end.said
    assert end.seconds < SECONDS + 5
    assert "step 3" in end.said
    (text,) = end.folder.glob("hang-*.txt")
    stacks = end.report["stacks"]
    assert "hanging.py" in stacks[str(rank)] or fault == "skip", text.read_text()
    assert len(stacks) == 2 and all("most recent call first" in stack for stack in stacks.values())


def test_torchrun_names_it_too(tmp_path: Path) -> None:
    """Rank 1 holds the lock; without --run-dir all is said on stderr."""
    script = str(Path(__file__).with_name("hanging.py"))
    words = [*TORCHRUN, "--nproc-per-node", "2", script, "hold", "1", *FLAGS, "--dp", "2"]
    ended = run(*words, seconds=60)
    assert ended.status == 1  # torchrun's own
    assert "megalite: rank 1 stands still: it waits for no other rank" in ended.err
    root = ended.err.split("Root Cause")[1]
    assert re.search(r"rank +: 1 \(local_rank: 1\)\n +exitcode +: 44", root), ended.err
    assert "rank 1 stood still: it waits for no other rank; step 3" in root
    assert "rank 0 was not the first (1 is to blame)" in ended.err.split("Root Cause")[0]
    assert "===== all threads of rank 1 =====" in ended.err


@pytest.mark.parametrize(("fault", "flags"), [("fail", "--pp"), ("kill", "--tp")])
def test_the_first_that_fails_is_named(fault: str, flags: str) -> None:
    script = str(Path(__file__).with_name("hanging.py"))
    words = [*TORCHRUN, "--nproc-per-node", "2", script, fault, "1", *FLAGS, flags, "2"]
    ended = run(*words, seconds=60)
    assert ended.status == 1
    root = ended.err.split("Root Cause")[1]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", root), ended.err
    assert ("KeyError: 'boom on purpose'" if fault == "fail" else "Signal 9 (SIGKILL)") in root
