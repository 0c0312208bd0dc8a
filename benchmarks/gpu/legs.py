"""Run tasks in child processes, so that running out of memory, a hang or a broken device costs one row only.

A leg is a list of tasks for one process, which sends each row at once. If it dies, the current task gets a row with the
reason, and a new process continues with the remaining tasks. The next leg's process starts and imports while the current
one measures."""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch

from benchmarks import common

CHILD = (sys.executable, "-m", "benchmarks.gpu.child")
MARK = "row "
OUT_OF_MEMORY = "out of memory"
BEGIN, END = "begin", "end"
LEAST = 5.0  # a leg with fewer seconds is not started

Task = Mapping[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Leg:
    name: str
    tasks: tuple[Task, ...]
    seconds: float  # limit for the whole leg
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A process that waits for tasks."""

    def __init__(self, leg: Leg, command: Sequence[str]) -> None:
        self._errors: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115  (read when it has died)
        self.process = subprocess.Popen(
            [*command, *sorted({str(task["part"]) for task in leg.tasks})],
            **dict.fromkeys(("stdin", "stdout"), subprocess.PIPE),
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": common.environment()["PYTHONPATH"], **leg.environment},
            start_new_session=True,
        )

    def begin(self, tasks: Sequence[Task]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write((json.dumps(list(tasks)) + "\n").encode())
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it has died already, as lines() reports

    def lines(self, until: float) -> Iterator[str]:
        """Yield the lines that it prints until it ends.

        Raises:
            TimeoutError: at `until`, of time.monotonic()."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            held = b""
            while True:
                left = until - time.monotonic()
                if left <= 0.0:
                    raise TimeoutError
                if not selector.select(timeout=min(left, 1.0)):
                    if self.process.poll() is not None:
                        return  # a process that it started, such as a compiler, still has the pipe
                    continue
                piece = os.read(self.process.stdout.fileno(), 1 << 16)
                if not piece:
                    return
                *lines, held = (held + piece).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> str:
        """Kill it if it still runs, and return how it ended and the last line of its stderr."""
        if self.process.poll() is None:
            try:
                self.process.wait(timeout=3.0)
            except subprocess.TimeoutExpired:
                self.kill()
        code = self.process.wait()
        for pipe in (self.process.stdout, self.process.stdin):
            if pipe is not None and not pipe.closed:
                pipe.close()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        self._errors.close()
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return f"{how}{': ' + said[-1] if said else ''}"


def run_legs(legs: Sequence[Leg], *, until: float, show: Callable[[Row], None], command: Sequence[str] = CHILD) -> list[Row]:
    """Run the legs in order until `until` of time.monotonic(), `show` each row at once, and return all rows: at least one per
    task; `failed` is the reason if a task has no more. `command` starts a child; the parts of its tasks are appended."""
    rows: list[Row] = []

    def take(row: Row) -> None:
        rows.append(row)
        show(row)

    waiting: Child | None = None
    try:
        for number, leg in enumerate(legs):
            if until - time.monotonic() < LEAST:
                for task in leg.tasks:
                    take(failure(task, "not run: the time for the whole benchmark is spent"))
                continue
            child, waiting = waiting or Child(leg, command), None
            end = min(until, time.monotonic() + leg.seconds)
            if number + 1 < len(legs):
                waiting = Child(legs[number + 1], command)
            _run(leg, child, end, take, command)
    finally:
        if waiting is not None:
            waiting.kill()
            waiting.end()
    return rows


def reason_of(error: BaseException) -> str:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return OUT_OF_MEMORY
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def failure(task: Task, reason: str) -> Row:
    """Return the row of a task that has no results, or not all."""
    named = {name: value for name, value in task.items() if isinstance(value, str | int | float | bool)}
    return {**named, "failed": reason}


def _run(leg: Leg, child: Child, end: float, take: Callable[[Row], None], command: Sequence[str]) -> None:
    """Run all tasks of a leg, in as many processes as needed."""
    left = list(leg.tasks)
    while left:
        child.begin(left)
        begun = done = 0
        timed_out = False
        try:
            for line in child.lines(end):
                if line.startswith(MARK):
                    message = json.loads(line.removeprefix(MARK))
                    if isinstance(message, str):
                        begun += message == BEGIN
                        done += message == END
                        if done == len(left):
                            break
                    else:
                        take(message)
        except TimeoutError:
            timed_out = True
            child.kill()
        except BaseException:  # interrupted: the child has its own session and would continue
            child.kill()
            raise
        how = child.end()
        left = left[done:]
        if timed_out:
            for index, task in enumerate(left):
                late = f"not done after the leg's {leg.seconds:.0f} s"
                take(failure(task, "not run: the leg's time is spent" if index else late))
            return
        if left and (begun > done or begun == 0):
            take(failure(left.pop(0), how))
        if left:
            child = Child(leg, command)
