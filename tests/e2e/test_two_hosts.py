"""Two hosts, tensor parallelism within each and pipeline parallelism across: one is cut off, the other names it, and both
resume from the checkpoint with the losses of an uninterrupted run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.forked import train_forked
from tests.e2e.hosts import INTERFACE, Host, two_hosts, unavailable
from tests.e2e.programs import MOCKED, losses, reached
from tests.support.patience import wait_until

_WHY_NOT = unavailable()
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))]

STEPS, CUT_AFTER = 20, 6
TIMEOUT = 9.0
"""Seconds per collective: gloo cannot detect a cut link except by missing messages."""
FLAGS = f"{MOCKED} --global-batch-size 4 --lr 3e-3 --train-iters {STEPS} --save-interval 5 --keep-latest 2".split()
FLAGS += f"--tp 2 --pp 2 --log-interval 10 --distributed-timeout-minutes {TIMEOUT / 60}".split()


def launched(host: Host, head: Host, run_dir: Path, log: Path) -> subprocess.Popen[bytes]:
    """Run the command that a user starts on each host."""
    return host.start(
        ["bash", "examples/multi_node/launch.sh", *FLAGS],
        log,
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        NODES="2",
        HEAD=head.address,
        LOCAL_ADDR=host.address,
        IFNAME=INTERFACE,
        GPUS="2",
        RUN_DIR=str(run_dir),
        RDZV_CONF="keep_alive_interval=2,keep_alive_max_attempt=4",
    )


def test_run_resumes_after_a_cut_link_with_identical_losses(tmp_path: Path) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    logs = [tmp_path / f"host-{letter}.log" for letter in "ab"]

    def all_said() -> str:
        return "\n".join(log.read_text() for log in logs)

    train_forked(4, *FLAGS, "--run-dir", whole, seconds=120).require_success()
    with two_hosts() as (a, b):
        first, second = (launched(host, a, run_dir, log) for host, log in zip((a, b), logs, strict=True))
        try:
            wait_until(lambda: reached(run_dir, CUT_AFTER), seconds=120, said=all_said)
            b.link("down")
            cut = time.monotonic()
            wait_until(lambda: "not answer within" in logs[0].read_text(), seconds=TIMEOUT + 20, said=all_said)
            assert time.monotonic() - cut > TIMEOUT - 1, "only the timeout can have detected it"
            wait_until(lambda: "is cut off" in logs[1].read_text(), seconds=20, said=all_said)
            b.kill()
            second.wait()
            b.link("up")
            second = launched(b, a, run_dir, logs[1])
            statuses = [first.wait(timeout=120), second.wait(timeout=120)]
        finally:
            a.kill()
            b.kill()
    said = [log.read_text() for log in logs]
    assert statuses == [0, 0], all_said()
    assert "ranks 2, 3 on host 1 (" in said[0]
    assert "does not answer either: host 1 (" in said[1]
    assert "loaded " in said[0] and f"step {STEPS}/{STEPS}" in said[0]
    assert len(losses(run_dir)) == STEPS
    assert losses(run_dir) == losses(whole)
