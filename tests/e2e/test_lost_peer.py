"""kill -9 of one rank: the others end within seconds and name the lost rank and its role."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.forked import forked, still_running
from tests.e2e.programs import MOCKED, reached
from tests.support.patience import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(sys.platform != "linux", reason="forks")]

FLAGS = f"{MOCKED} --global-batch-size 6 --lr 1e-3 --train-iters 100000 --log-interval 1000".split()
WITHIN = 20.0
"""Seconds; torch's own timeout is ten minutes."""


def output_after_kill(folder: Path, ranks: int, victim: int, flags: Sequence[str]) -> list[str]:
    with forked(ranks, [*FLAGS, *flags, "--run-dir", folder / "run"], folder) as processes:
        wait_until(
            lambda: reached(folder / "run", 3),
            running=lambda: all(process.is_alive() for process in processes),
            said=(folder / "0.err").read_text,
        )
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
        assert not still_running(processes, WITHIN), "ranks continued without the lost one"
    statuses = [process.exitcode for process in processes]
    assert statuses[victim] == -signal.SIGKILL
    assert all(status != 0 for status in statuses)
    return [(folder / f"{rank}.err").read_text() for rank in range(ranks)]


CASES = {
    "the server": (0, ["--dp-strategy", "parameter-server"]),
    "the async server": (0, ["--dp-strategy", "async-parameter-server"]),
    "an async worker": (2, ["--dp-strategy", "async-parameter-server"]),
    "one of three servers": (1, ["--dp-strategy", "sharded-parameter-server", "--wire-dtype", "bf16"]),
}


@pytest.mark.parametrize("case", CASES)
def test_lost_rank_is_named_by_the_others(tmp_path: Path, case: str) -> None:
    victim, flags = CASES[case]
    said = output_after_kill(tmp_path, 3, victim, flags)
    for rank, text in enumerate(said):
        if rank != victim:
            assert f"rank {victim} of dp group [0, 1, 2]" in text, text
            assert re.search(r"PeerLostError: .* gone: connections were closed in step \d+\.", text), text
