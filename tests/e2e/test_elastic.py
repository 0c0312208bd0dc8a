"""`--elastic` under torchrun: one of two "hosts" is lost, and the run continues on the other host's ranks in another
layout; the losses equal those of an uninterrupted run on one rank."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.forked import train_forked
from tests.e2e.programs import MOCKED, REPOSITORY, TORCHRUN, losses, ranks_of, reached
from tests.support.patience import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")]

STEPS, LOST_AFTER = 20, 6
FLAGS = f"{MOCKED} --global-batch-size 4 --precision fp64 --lr 1e-3 --train-iters {STEPS} --log-interval 10".split()


def agent(port: int, words: list[str | Path], log: Path, *, hosts_store: bool) -> subprocess.Popen[bytes]:
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic")
    conf = f"is_host={int(hosts_store)},keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=8"
    launch = ("--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-conf", conf)
    with log.open("ab") as file:
        return subprocess.Popen(
            [*TORCHRUN, *launch, *meet, "--local-addr", "127.0.0.1", "pretrain_gpt.py", *map(str, words)],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
        )


def lose(host: subprocess.Popen[bytes]) -> None:
    """Kill torchrun and its ranks at once."""
    for pid in (host.pid, *ranks_of(host).values()):
        os.kill(pid, signal.SIGKILL)
    host.wait()


def test_run_continues_on_remaining_host(tmp_path: Path) -> None:
    file, run_dir, whole = tmp_path / "run.yaml", tmp_path / "run", tmp_path / "whole"
    file.write_text("parallel: {tp: 2, pp: 2}\n")
    train_forked(1, *FLAGS, "--run-dir", whole, seconds=150).require_success()
    resume = ("--save-interval", "5", "--load", run_dir / "checkpoints", "--fresh-if-missing", "--elastic")
    words = [*FLAGS, "--config", file, "--run-dir", run_dir, *resume]
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    first, second = (agent(port, words, log, hosts_store=log == logs[0]) for log in logs)
    try:
        wait_until(lambda: reached(run_dir, LOST_AFTER), seconds=120, said=logs[0].read_text)
        lose(second)
        assert first.wait(timeout=150) == 0, logs[0].read_text()
    finally:
        for host in (first, second):
            if host.poll() is None:
                lose(host)
    said = logs[0].read_text()
    began = "elastic: 4 ranks; continuing as tp 2 x cp 1 x dp 1 x pp 2, micro batch 1, all-reduce, recompute none (the layout of"
    assert began in said
    assert "elastic: 2 ranks; the checkpoint of step " in said
    assert " has 4 ranks as tp 2 x cp 1 x dp 1 x pp 2" in said
    assert [step for step, _ in losses(run_dir)] == list(range(1, STEPS + 1))
    ours, theirs = ([loss for _, loss in losses(folder)] for folder in (run_dir, whole))
    assert ours == pytest.approx(theirs, rel=1e-9)
