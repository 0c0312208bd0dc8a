"""kill -9 of one rank: the others end within seconds and say who is gone, and what it was for."""

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.e2e.forked import fork_rank
from tests.e2e.test_kill import reached

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(sys.platform != "linux", reason="forks")]

FLAGS = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--vocab-size", "96", "--mock-data", "--micro-batch-size", "1", "--global-batch-size", "6"),
    *("--lr", "1e-3", "--train-iters", "100000", "--device", "cpu", "--log-interval", "1000"),
]
WITHIN = 20.0
"""Seconds; torch's own timeout is ten minutes."""


def killed(folder: Path, ranks: int, victim: int, flags: Sequence[str]) -> list[str]:
    """Train, kill one rank in the midst, and return what each said in the end."""
    store = dist.TCPStore("localhost", 0, ranks, is_master=True, wait_for_workers=False)
    words = [*FLAGS, *flags, "--run-dir", str(folder / "run")]
    processes = [fork_rank(rank, ranks, store.port, words, folder / str(rank)) for rank in range(ranks)]
    try:
        start = time.monotonic()
        while not reached(folder / "run", 3):
            time.sleep(0.02)
            assert all(process.is_alive() for process in processes), (folder / "0.err").read_text()
            assert time.monotonic() - start < 60, "the third step did not come"
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
        left = {process.sentinel for process in processes}
        end = time.monotonic() + WITHIN
        while left and (rest := end - time.monotonic()) > 0:
            left -= set(wait(list(left), timeout=rest))
        assert not left, "ranks went on without the one that is gone"
    finally:
        for process in processes:
            process.kill()
            process.join()
    statuses = [process.exitcode for process in processes]
    assert statuses[victim] == -signal.SIGKILL
    assert all(status != 0 for status in statuses)
    return [(folder / f"{rank}.err").read_text() for rank in range(ranks)]


CASES = {
    "the server": (0, ["--dp-strategy", "parameter-server"], "the parameter server of dp group [0, 1, 2]"),
    "a worker": (2, ["--dp-strategy", "parameter-server"], "a worker of dp group [0, 1, 2]"),
    "the async server": (
        *(0, ["--dp-strategy", "async-parameter-server"], "the parameter server of dp group [0, 1, 2]"),
    ),
    "an async worker": (2, ["--dp-strategy", "async-parameter-server"], "a worker of dp group [0, 1, 2]"),
    "one of three servers": (
        *(1, ["--dp-strategy", "sharded-parameter-server", "--wire-dtype", "bf16"]),
        "parameter server 1 of dp group [0, 1, 2]",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_others_name_it(tmp_path: Path, case: str) -> None:
    victim, flags, role = CASES[case]
    said = killed(tmp_path, 3, victim, flags)
    for rank, text in enumerate(said):
        if rank != victim:
            assert f"rank {victim}, {role}" in text, text
            assert re.search(r"PeerLostError: .* gone: connections were closed in step \d+\.", text), text
