"""`train_forked`: `megalite train` on some ranks without a launcher, forked from a process that has all of it imported.

Forks of the fork server run the command as a rank of torchrun's would: the same environment, and the store is outside
of any rank.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from megalite.cli.train import main
from tests.e2e.programs import REPOSITORY, Outcome
from tests.support.fork_server import fork_server

STREAMS = ("out", "err")


def train_forked(ranks: int, *flags: str | Path, seconds: float = 60, folder: Path = REPOSITORY) -> Outcome:
    """Train on some ranks, started in `folder`, and wait for the end of all of them.

    Returns:
        The status of all ranks; what they said comes rank after rank.

    Raises:
        AssertionError: a rank had not ended by itself after `seconds`, or their statuses differ.
    """
    store = dist.TCPStore("localhost", 0, ranks, is_master=True, wait_for_workers=False) if ranks > 1 else None
    port = None if store is None else store.port
    words = [str(flag) for flag in flags]
    with tempfile.TemporaryDirectory() as logs:
        started = time.monotonic()
        processes = [fork_rank(rank, ranks, port, words, Path(logs, str(rank)), folder=folder) for rank in range(ranks)]
        running = {process.sentinel: process for process in processes}
        while running and (left := started + seconds - time.monotonic()) > 0:
            for sentinel in wait(list(running), timeout=left):
                assert isinstance(sentinel, int)
                running.pop(sentinel).join()
        for process in running.values():
            process.kill()
            process.join()
        took = time.monotonic() - started
        out, err = ("".join(Path(f"{logs}/{rank}.{name}").read_text() for rank in range(ranks)) for name in STREAMS)
    left_over = [rank for rank, process in enumerate(processes) if process in running.values()]
    assert left_over == [], f"ranks {left_over} were still running after {seconds} s\n{out}\n{err}"
    statuses = [process.exitcode or 0 for process in processes]
    assert len(set(statuses)) == 1, f"the ranks ended with {statuses}\n{out}\n{err}"
    return Outcome(statuses[0], out, err, took)


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
) -> BaseProcess:
    """One rank of a run, under way.

    Args:
        port: of the store; None for one rank.
        log: what it says goes to `<log>.out` and `<log>.err`.
        before: called there before the command.
        more: variables of its environment.
        folder: where it starts.
    """
    variables = {"OMP_NUM_THREADS": "1"}
    if port is not None:
        variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    variables |= more or {}
    target = (words, variables, str(log), before, str(folder))
    process = fork_server().Process(target=_be_rank, args=target)
    process.start()
    return process


def _be_rank(
    words: Sequence[str], variables: dict[str, str], log: str, before: Callable[[], None] | None, folder: str
) -> None:
    """Run the command with what it says in two files."""
    for number, name in enumerate(STREAMS, start=1):
        opened = os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ.update(variables)
    tempfile.tempdir = None  # torch._dynamo has asked for it, and TMPDIR may be another one here
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    if before is not None:
        before()
    status = main(list(words))
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
