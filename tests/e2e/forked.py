"""`train_forked`: `megalite train` on some ranks without a launcher, forked from a process that has everything imported.

Forks of the fork server run the command as ranks of torchrun would: with the same environment, and a store outside of the
ranks."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megalite.config.registry import imported
from tests.e2e.programs import REPOSITORY, Outcome
from tests.support.fork_server import fork_server

STREAMS = ("out", "err")


def train_forked(ranks: int, *flags: str | Path, seconds: float = 60, folder: Path = REPOSITORY, **how: Any) -> Outcome:
    """Train on some ranks, started in `folder`, and wait until all have ended; `how` as for `fork_rank`.

    Returns:
        The common exit status; the output of the ranks, in rank order.

    Raises:
        AssertionError: one of the ranks was still running after `seconds`, or the statuses differ."""
    with tempfile.TemporaryDirectory() as logs:
        started = time.monotonic()
        with forked(ranks, flags, Path(logs), folder=folder, **how) as processes:
            left_over = still_running(processes, seconds)
        took = time.monotonic() - started
        out, err = ("".join(Path(f"{logs}/{rank}.{name}").read_text() for rank in range(ranks)) for name in STREAMS)
    assert left_over == [], f"ranks {left_over} were still running after {seconds} s\n{out}\n{err}"
    statuses = [process.exitcode or 0 for process in processes]
    assert len(set(statuses)) == 1, f"the ranks ended with {statuses}\n{out}\n{err}"
    return Outcome(statuses[0], out, err, took)


@contextmanager
def forked(count: int, words: Sequence[str | Path], logs: Path, **how: Any) -> Iterator[list[BaseProcess]]:
    """Start ranks of a run, `how` as for `fork_rank`; kill those that are still running at the end."""
    store = dist.TCPStore("localhost", 0, count, is_master=True, wait_for_workers=False) if count > 1 else None
    port, flags = None if store is None else store.port, [str(word) for word in words]
    processes = [fork_rank(rank, count, port, flags, logs / str(rank), **how) for rank in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def still_running(processes: Sequence[BaseProcess], seconds: float) -> list[int]:
    """Wait for the processes. Returns the ranks still running after `seconds`."""
    left, end = {process.sentinel for process in processes}, time.monotonic() + seconds
    while left and (rest := end - time.monotonic()) > 0:
        left -= set(wait(list(left), timeout=rest))
    return [rank for rank, process in enumerate(processes) if process.sentinel in left]


def fork_rank(
    rank: int,
    ranks: int,
    port: int | None,
    words: Sequence[str],
    log: Path,
    *,
    before: Callable[[], None] | None = None,
    more: Mapping[str, str] | None = None,
    folder: Path = REPOSITORY,
    command: str = "megalite.cli.train:main",
) -> BaseProcess:
    """Start one rank of a run.

    Args:
        port: of the store; None for one rank.
        log: output goes to `<log>.out` and `<log>.err`.
        before: called in the rank before the command.
        more: additional environment variables.
        folder: working directory.
        command: function called with the words."""
    variables = {"OMP_NUM_THREADS": "1"}
    if port is not None:
        variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    variables |= more or {}
    target = (words, variables, str(log), before, str(folder), command)
    process = fork_server().Process(target=_be_rank, args=target)
    process.start()
    return process


def _be_rank(
    words: Sequence[str],
    variables: dict[str, str],
    log: str,
    before: Callable[[], None] | None,
    folder: str,
    command: str,
) -> None:
    """Run the command with its output in two files."""
    for number, name in enumerate(STREAMS, start=1):
        opened = os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ.update(variables)
    tempfile.tempdir = None  # torch._dynamo has read the old TMPDIR; it may differ here
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    if before is not None:
        before()
    status = imported(command)(list(words))
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
