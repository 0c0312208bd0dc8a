"""One life of a run: its ranks, forked from a process that has everything imported, until they end or are killed.

This process may hold no second thread, torch's and BLAS's pools among them: a fork copies one thread only, and a lock
that another one holds stays locked for ever in the copy. OMP_NUM_THREADS=1 from its very start sees to that.
"""

import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megalite.cli import train
from tests.faults.trap import Point, Trap

FORK = multiprocessing.get_context("fork")
IMPORTED_LATE = ("megalite.training.trainer", "torch._dynamo")
"""Imported by the command when it is called, and by the first optimizer: longer than all the rest of a life takes."""
LONGEST = 120.0
"""Seconds after which a life that no one ended counts as a hang."""
LONGEST_AFTER_DEATH = 40.0
"""Seconds after which a rank that outlives a peer counts as a hang."""
STACKS = signal.SIGUSR2
"""Makes a rank print its stacks."""
CONNECTS = ("in fresh_part", "in _new_process_group_helper")
"""In the stacks of a rank that waits for its peers: to come to the meeting, or to connect."""


@dataclass(frozen=True)
class Blow:
    """A kill: which ranks, and when. One of `point`, `after_seconds` and `after_step` is set.

    Args:
        ranks: those that get the signal; the first of them is the one that comes to `point`.
        point: a call on the checkpoints.
        after_seconds: since the ranks were forked.
        after_step: as soon as metrics.jsonl has it.
        number: of the signal.
    """

    ranks: tuple[int, ...]
    point: Point | None = None
    after_seconds: float | None = None
    after_step: int | None = None
    number: int = signal.SIGKILL

    def __str__(self) -> str:
        if self.after_step is not None:
            when = f"after step {self.after_step}"
        else:
            when = str(self.point) if self.point else f"after {self.after_seconds:.3f} s"
        return f"{when}, rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"

    @property
    def kind(self) -> str:
        """What the report counts it as."""
        if self.point is not None:
            return f"{self.point.where} {self.point.call}"
        return "after a step" if self.after_step is not None else "at any time"


@dataclass
class Life:
    """How it went."""

    statuses: list[int | None] = field(default_factory=list)
    """By rank: exit status, or minus the signal that ended it."""
    seconds: float = 0.0
    seconds_after_death: float = 0.0
    """From the first rank's end to the last one's."""
    counts: list[Counter[str]] = field(default_factory=list)
    """By rank: calls on the checkpoints."""
    hung: tuple[int, ...] = ()
    """Ranks that did not end by themselves."""
    launcher_ended: bool = False
    """The others waited for the dead one to connect: a launcher ends them then, and so did we."""
    died_at: str = ""
    """The point that was come to; empty if none was."""

    @property
    def was_killed(self) -> bool:
        """The blow fell before the run's end."""
        return -signal.SIGKILL in self.statuses


class Ranks:
    """The processes of one life."""

    def __init__(self, size: int, command: Sequence[str], run_dir: Path, log: Path, blow: Blow | None) -> None:
        self.blow, self.log = blow, log
        self.metrics = run_dir / "metrics.jsonl"
        self.old_metrics = self.metrics.stat().st_ino if self.metrics.exists() else None
        _require_one_thread()
        self.notes = [os.memfd_create("note") for _ in range(size)]
        port, child_port = FORK.Pipe(duplex=False)
        self.store = FORK.Process(target=_serve, args=(child_port, size), daemon=True)
        self.store.start()
        child_port.close()
        address = port.recv()
        port.close()
        self.processes: list[ForkProcess] = []
        for rank in range(size):
            point = blow.point if blow and blow.ranks[0] == rank else None
            arguments = (rank, size, address, list(command), run_dir / "checkpoints", point, self.notes[rank], log)
            process = FORK.Process(target=_be_rank, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)
        self.started = time.monotonic()

    def strike(self) -> None:
        """The signal for those who are to get it."""
        assert self.blow is not None
        for rank in self.blow.ranks:
            process = self.processes[rank]
            if process.exitcode is None:
                assert process.pid is not None
                os.kill(process.pid, self.blow.number)

    def follow(self) -> Life:
        """Wait for the end of all ranks; strike when the moment has come."""
        life = Life()
        struck, first_end, asked = self.blow is None, None, 0
        running: dict[Any, ForkProcess] = {process.sentinel: process for process in self.processes}
        while running:
            for sentinel in wait(list(running), timeout=0.05 if struck else 0.002):
                process = running.pop(sentinel)
                process.join()
                first_end = first_end or time.monotonic()
                if self.blow and self.blow.point and process.exitcode == -signal.SIGKILL:
                    self.strike()  # the others that are to go with it
            if not struck and self._moment_has_come():
                self.strike()
                struck = True
            struck = struck or first_end is not None
            alone = time.monotonic() - first_end if first_end else 0.0
            if running and alone > 3.0 * (asked + 1):
                asked += 1
                life.launcher_ended = self._wait_for_the_dead(list(running.values()))
                if life.launcher_ended:
                    break
            if running and max(time.monotonic() - self.started - LONGEST, alone - LONGEST_AFTER_DEATH) > 0:
                life.hung = tuple(rank for rank, process in enumerate(self.processes) if process.is_alive())
                self._ask_where_they_are(list(running.values()))
                break
        end = time.monotonic()
        life.seconds = end - self.started
        life.seconds_after_death = 0.0 if life.launcher_ended else end - (first_end or end)
        for process in running.values():
            process.kill()
            process.join()
        life.statuses = [process.exitcode for process in self.processes]
        for note in self.notes:
            told = json.loads(os.pread(note, 1 << 16, 0) or b'{"died": "", "counts": {}}')
            life.counts.append(Counter(told["counts"]))
            life.died_at = life.died_at or told["died"]
        self.close()
        return life

    def _moment_has_come(self) -> bool:
        blow = self.blow
        if blow is None or blow.point is not None:
            return False
        if blow.after_step is not None:
            return last_step(self.metrics, not_in=self.old_metrics) >= blow.after_step
        return blow.after_seconds is not None and time.monotonic() - self.started >= blow.after_seconds

    def _ask_where_they_are(self, processes: list[ForkProcess]) -> list[str]:
        """The stacks of each process that is still there; they also stay in its log."""
        logs = [Path(f"{self.log}.{self.processes.index(process)}") for process in processes]
        lengths = [len(log.read_bytes()) for log in logs]
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, STACKS)
        time.sleep(0.5)
        return [log.read_bytes()[length:].decode() for log, length in zip(logs, lengths)]

    def _wait_for_the_dead(self, processes: list[ForkProcess]) -> bool:
        """All of them wait for a peer that has died before it could come: only a launcher can know that."""
        return all(any(place in stacks for place in CONNECTS) for stacks in self._ask_where_they_are(processes))

    def close(self) -> None:
        """Nothing is left of this life but its log."""
        for process in [self.store, *self.processes]:
            process.kill()
            process.join()
            process.close()
        for note in self.notes:
            os.close(note)


def live(size: int, command: Sequence[str], run_dir: Path, log: Path, blow: Blow | None) -> Life:
    """Start `megalite train` on `size` ranks and follow it to its end, by itself or by a blow.

    Args:
        command: the flags.
        run_dir: absolute; its checkpoints are what a point counts calls on.
        log: what rank r prints goes to `<log>.r`.
    """
    return Ranks(size, command, run_dir, log, blow).follow()


def prepare_to_fork() -> None:
    """Before the first life: import the rest, refuse to fork where that is not safe, and spare the copies a walk over all objects."""
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    _require_one_thread()
    signal.signal(STACKS, signal.SIG_IGN)  # in a rank that is not ready for it
    gc.collect()
    gc.freeze()


def _require_one_thread() -> None:
    end = time.monotonic() + 5.0  # a thread that was joined is the system's for a moment still
    while (threads := len(list(Path("/proc/self/task").iterdir()))) > 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert threads == 1, f"{threads} threads before a fork: OMP_NUM_THREADS must be 1 from the start"


def last_step(metrics: Path, *, not_in: int | None = None) -> int:
    """The last step in a run's metrics.jsonl; 0 if there is none.

    Args:
        not_in: number of the file that an earlier life wrote: a run that starts replaces it.
    """
    try:
        with metrics.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino == not_in:
                return 0
            file.seek(max(0, status.st_size - 4096))
            lines = [line for line in file.read().split(b"\n")[:-1] if b'"train", "step": ' in line]
    except FileNotFoundError:
        return 0
    return int(lines[-1].partition(b'"step": ')[2].partition(b",")[0]) if lines else 0


def _serve(port: Connection, size: int) -> None:
    """The rendezvous, which outlives any rank, as torchrun's does."""
    signal.alarm(round(LONGEST) + 60)  # should the parent be gone
    store = dist.TCPStore("localhost", 0, size, is_master=True, wait_for_workers=False)
    port.send(store.port)
    signal.pause()


def _be_rank(
    rank: int, size: int, port: int, command: list[str], checkpoints: Path, point: Point | None, note: int, log: Path
) -> None:
    signal.alarm(round(LONGEST) + 60)
    output = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    trap = Trap(checkpoints, point, note)
    trap.set()
    try:
        status = train.main(command)
    except Exception:
        traceback.print_exc()
        status = 1
    trap.tell()
    sys.stdout.flush()
    # Leaves as an interpreter does: with the threads that it would wait for.
    sys.exit(status)
