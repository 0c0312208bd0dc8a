"""Runs of forked ranks, one of which stops in the midst of a step, and how they came to their end."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.e2e.forked import fork_rank
from tests.e2e.hanging import STEP, installing

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


def hang(folder: Path, fault: str, rank: int, flags: Sequence[str], ranks: int = 2, step: int = STEP) -> End:
    """Train until one rank does something that stops the run."""
    store = dist.TCPStore("localhost", 0, ranks, is_master=True, wait_for_workers=False)
    run_dir, private = folder / "run", folder / "tmp"
    private.mkdir()
    words, more = ([*FLAGS, *flags, "--run-dir", str(run_dir)], {"TMPDIR": str(private), "TORCH_FR_BUFFER_SIZE": "100"})
    processes = [
        fork_rank(
            *(each, ranks, store.port, words, folder / str(each)), before=installing(fault, rank, step), more=more
        )
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
    assert not left, f"it did not end\n{_said(folder, ranks)}"
    wait_until_gone(private)
    reports = [json.loads(path.read_text()) for path in run_dir.glob("hang-*.json")]
    return End(
        statuses=[process.exitcode for process in processes],
        said=_said(folder, ranks),
        seconds=ended - (run_dir / "metrics.jsonl").stat().st_mtime,
        report=reports[0] if reports else {},
        folder=run_dir,
    )


def _said(folder: Path, ranks: int) -> str:
    return "".join((folder / f"{rank}.err").read_text() for rank in range(ranks))


def wait_until_gone(private: Path) -> None:
    """The watching process removes its folder, as the last thing that it does."""
    end = time.monotonic() + 5
    while any(private.glob("megalite-*")):
        assert time.monotonic() < end, list(private.iterdir())
        time.sleep(0.02)
