"""One life of a run: its ranks, forked from a process that has everything imported, until they end or are killed."""

import faulthandler
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.e2e.forked import STREAMS, forked
from tests.faults.trap import Point, Trap

LONGEST = 120.0
"""Seconds after which a life that was not ended counts as a hang."""
LONGEST_AFTER_DEATH = 40.0
"""Seconds after which a rank that outlives a peer counts as a hang."""
FIRST_STACKS = 3.0
"""Seconds after the first rank's end at which those that are left print their stacks; then again after as long."""
STACKS = signal.SIGUSR2
"""The signal that makes ranks print their stacks."""
CONNECTS = ("in fresh_prefix_store", "in _new_process_group_helper")
"""Functions in the stacks of ranks that wait for peers to join or to connect."""


@dataclass(frozen=True)
class Kill:
    """A signal: to which ranks, and when. One of `point`, `after_seconds` and `after_step` is set.

    Args:
        ranks: that get the signal; the first one reaches `point`.
        point: a call on the checkpoints.
        after_seconds: since the ranks were forked.
        after_step: as soon as metrics.jsonl has it.
        number: of the signal."""

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
        """Kind in the report."""
        if self.point is not None:
            return f"{self.point.where} {self.point.call}"
        return "after a step" if self.after_step is not None else "at any time"


@dataclass
class Life:
    """Result of a life."""

    statuses: list[int | None] = field(default_factory=list)
    """Per rank: exit status, or minus the signal that ended it."""
    seconds: float = 0.0
    seconds_after_death: float = 0.0
    """Seconds from the first rank's end to the last one's."""
    counts: list[Counter[str]] = field(default_factory=list)
    """Per rank: calls on the checkpoints."""
    hung: tuple[int, ...] = ()
    """Ranks that did not end by themselves."""
    launcher_ended: bool = False
    """The others waited for the dead rank to connect: then a launcher would end them, and so does `live`."""
    died_at: str = ""
    """The point that was reached; empty if none was."""

    @property
    def was_killed(self) -> bool:
        """Whether the kill came before the run's end."""
        return -signal.SIGKILL in self.statuses


def live(size: int, command: Sequence[str], run_dir: Path, log: Path, kill: Kill | None) -> Life:
    """Start `megalite train` on `size` ranks and follow it until it ends or is killed.

    Args:
        command: the flags.
        run_dir: absolute; points count calls on its checkpoints.
        log: folder to create for the output of the ranks: r.out and r.err of rank r."""
    log.mkdir()
    metrics = run_dir / "metrics.jsonl"
    old_metrics = metrics.stat().st_ino if metrics.exists() else None
    with forked(size, command, log, before=partial(_watch, run_dir / "checkpoints", log, kill)) as processes:
        life = _Following(processes, metrics, old_metrics, log, kill).to_the_end()
    life.statuses = [process.exitcode for process in processes]
    for rank in range(size):
        note = log / f"{rank}.note"
        noted = json.loads((note.exists() and note.read_text()) or '{"died": "", "counts": {}}')
        life.counts.append(Counter(noted["counts"]))
        life.died_at = life.died_at or noted["died"]
    return life


def printed(log: Path, rank: int, streams: Sequence[str] = STREAMS) -> str:
    files = [log / f"{rank}.{stream}" for stream in streams]
    return "".join(file.read_text(errors="replace") for file in files if file.exists())


def _watch(checkpoints: Path, log: Path, kill: Kill | None) -> None:
    signal.alarm(round(LONGEST) + 60)  # if the parent has ended
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    rank = int(os.environ["RANK"])
    point = kill.point if kill and kill.ranks[0] == rank else None
    Trap(checkpoints, point, os.open(log / f"{rank}.note", os.O_RDWR | os.O_CREAT)).set()


class _Following:
    """The running processes of one life."""

    def __init__(
        self, processes: list[BaseProcess], metrics: Path, old_metrics: int | None, log: Path, kill: Kill | None
    ) -> None:
        self.processes, self.metrics, self.old_metrics = processes, metrics, old_metrics
        self.log, self.kill = log, kill
        self.started = time.monotonic()

    def strike(self) -> None:
        """Send the signal to its ranks."""
        assert self.kill is not None
        for rank in self.kill.ranks:
            process = self.processes[rank]
            if process.exitcode is None:
                assert process.pid is not None
                os.kill(process.pid, self.kill.number)

    def to_the_end(self) -> Life:
        """Wait for all ranks to end; send the signal at its time."""
        life = Life()
        struck, first_end, asked = self.kill is None, None, 0
        running: dict[Any, BaseProcess] = {process.sentinel: process for process in self.processes}
        while running:
            for sentinel in wait(list(running), timeout=0.05 if struck else 0.002):
                process = running.pop(sentinel)
                process.join()
                first_end = first_end or time.monotonic()
                if self.kill and self.kill.point and process.exitcode == -signal.SIGKILL:
                    self.strike()  # the other ranks of the kill
            if not struck and self._time_has_come():
                self.strike()
                struck = True
            struck = struck or first_end is not None
            alone = time.monotonic() - first_end if first_end else 0.0
            if running and alone > FIRST_STACKS * (asked + 1):
                asked += 1
                stacks = self._ask_where_they_are(list(running.values()))
                # All of them wait for a peer that died before it joined: only a launcher can detect that. Those that were asked
                # to stop end by themselves.
                life.launcher_ended = (self.kill is None or self.kill.number == signal.SIGKILL) and all(
                    any(place in each for place in CONNECTS) for each in stacks
                )
                if life.launcher_ended:
                    break
            if running and max(time.monotonic() - self.started - LONGEST, alone - LONGEST_AFTER_DEATH) > 0:
                life.hung = tuple(rank for rank, process in enumerate(self.processes) if process.is_alive())
                self._ask_where_they_are(list(running.values()))
                break
        end = time.monotonic()
        life.seconds = end - self.started
        life.seconds_after_death = 0.0 if life.launcher_ended else end - (first_end or end)
        return life

    def _time_has_come(self) -> bool:
        kill = self.kill
        if kill is None or kill.point is not None:
            return False
        if kill.after_step is not None:
            return last_step(self.metrics, not_in=self.old_metrics) >= kill.after_step
        return kill.after_seconds is not None and time.monotonic() - self.started >= kill.after_seconds

    def _ask_where_they_are(self, processes: list[BaseProcess]) -> list[str]:
        """Stacks of each process that is still running; they are also written to its log."""
        logs = [self.log / f"{self.processes.index(process)}.err" for process in processes]
        lengths = [len(log.read_bytes()) for log in logs]
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, STACKS)
        time.sleep(0.5)
        return [log.read_bytes()[length:].decode() for log, length in zip(logs, lengths, strict=True)]


def last_step(metrics: Path, *, not_in: int | None = None) -> int:
    """The last step in a run's metrics.jsonl; 0 if there is none.

    Args:
        not_in: inode of an earlier life's file, which a new run replaces."""
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
