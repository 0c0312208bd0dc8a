"""Test the scheduling policy of CPU ranks, in separate Linux processes."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from megalite.topology.topology import Launch, start_distributed
from tests.e2e.forked import train_forked
from tests.support.ranks import RankContext, run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")


def start(words: list[str]) -> int:
    """Print the policy of each of three processes that have tried to join a job."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for size, chosen in ((1, None), (2, None), (2, os.SCHED_IDLE)):
        if os.fork() == 0:
            if chosen is not None:
                os.sched_setscheduler(0, chosen, os.sched_param(0))
            os.environ |= {"WORLD_SIZE": str(size), "RANK": "0"}
            launch = Launch(rank=0, world_size=size, local_rank=0)
            with suppress(Exception):  # no other rank joins
                start_distributed(launch, torch.device("cpu"), backend="gloo", timeout_minutes=0.001)
            print(os.sched_getscheduler(0), flush=True)
            os._exit(0)
        os.wait()
    return 0


def test_only_several_ranks_with_the_default_policy_are_batch_jobs() -> None:
    made = train_forked(1, command=f"{__name__}:start")
    assert made.out.split() == [str(policy) for policy in (os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE)]


def _policies(context: RankContext) -> set[int]:
    """Return the policies of all threads of this rank, after gloo has started its threads."""
    context.topology(dp=2).world.all_reduce(torch.zeros(1))
    return {os.sched_getscheduler(int(thread.name)) for thread in Path("/proc/self/task").iterdir()}


def test_gloo_threads_inherit_the_policy() -> None:
    for policies in run_ranks(2, _policies):
        assert policies == {os.SCHED_BATCH}
