"""The scheduling policy of CPU ranks, asked of Linux in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.ranks import RankContext, run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")

START = """
import os, threading, torch
{before}
from megalite.topology.topology import Launch, start_distributed
os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", WORLD_SIZE="{size}", RANK="0")
launch = Launch(rank=0, world_size={size}, local_rank=0)
try:
    start_distributed(launch, torch.device("cpu"), backend="gloo", timeout_minutes=0.001)
except Exception:  # no one else joins
    pass
print(os.sched_getscheduler(0))
"""


def policy(*, size: int, before: str = "") -> int:
    """After `start_distributed`."""
    code = START.format(size=size, before=before)
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(made.stdout)


def test_ranks_are_batch_jobs() -> None:
    assert policy(size=2) == os.SCHED_BATCH


def test_one_process_alone_is_left_as_it_is() -> None:
    assert policy(size=1) == os.SCHED_OTHER


def test_a_policy_that_somebody_chose_stays() -> None:
    assert policy(size=2, before="os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))") == os.SCHED_IDLE


def _policies(context: RankContext) -> set[int]:
    """Of all threads of this rank, once gloo has started its own."""
    context.topology(dp=2).world.all_reduce(torch.zeros(1))
    return {os.sched_getscheduler(int(thread.name)) for thread in Path("/proc/self/task").iterdir()}


def test_gloo_s_threads_inherit_it() -> None:
    for policies in run_ranks(2, _policies):
        assert policies == {os.SCHED_BATCH}
