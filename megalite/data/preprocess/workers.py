"""A function applied to pieces in worker processes, results in the order of the pieces, in bounded memory."""

import atexit
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Generic, Literal, TypeVar

from megalite.config.errors import ConfigError

A = TypeVar("A")
P = TypeVar("P")
R = TypeVar("R")

_AHEAD = 3
"""Pieces that a worker has been given and has not answered: it never waits for the parent."""
_IN_FLIGHT_PER_WORKER = 8
_IN_FLIGHT_BYTES = 128 << 20
_PATIENCE_SECONDS = 5.0
MAX_WORKERS = 1024


def check_workers(count: int) -> None:
    """Raise a ConfigError for more processes than any machine has use for."""
    if count > MAX_WORKERS:
        raise ConfigError(f"workers {count} must be at most {MAX_WORKERS}; try the number of cores")


@dataclass
class _Task(Generic[P, R]):
    piece: P
    size: int
    answer: tuple[Literal["done"], R] | tuple[Literal["refused", "failed"], str] | None = None


class WorkerPool(Generic[A, P, R]):
    """Processes that each call `build(argument)` once and then the function that it returned on piece after piece.

    Workers are spawned: a fork of a process that runs threads (OpenMP, decompression) may hang. They end when the pool
    is closed, and also when this process dies in whatever way: each watches it. One is started only when those that
    there are have all that they may be given, so that small inputs do not wait for many to start.

    Args:
        count: processes at most.
        build: a function of a module, which workers import.
        argument: what `build` is given; it is pickled, as are pieces and results.
    """

    def __init__(self, count: int, build: Callable[[A], Callable[[P], R]], argument: A) -> None:
        self._count, self._build, self._argument = count, build, argument
        self._workers: list[_Worker[P, R]] = []
        # Else the first spawn would start it, and unblock the signals that the workers must not see.
        resource_tracker.ensure_running()
        # An interpreter that ends asks its children to by SIGTERM, which these do not hear, and waits for them.
        atexit.register(self._kill)

    def map(self, pieces: Iterator[P], size: Callable[[P], int]) -> Iterator[tuple[P, R]]:
        """(piece, result) in the order of the pieces.

        Pieces in flight are bounded by number and by the sum of their `size` (bytes); one is always allowed. An
        exception that ends `pieces` is raised after the results of all pieces before it, as it is without workers.

        Raises:
            ConfigError: the function raised it, or a worker died.
            RuntimeError: the function failed in another way; holds the worker's traceback.
        """
        pending: deque[_Task[P, R]] = deque()
        in_flight, exhausted, taken = 0, False, 0
        fault: Exception | None = None
        while True:
            while not exhausted and self._has_room(len(pending), in_flight):
                try:
                    piece = next(pieces, None)
                except Exception as error:
                    piece, fault = None, error
                if piece is None:
                    exhausted = True
                    break
                task: _Task[P, R] = _Task(piece, size(piece))
                in_flight += task.size
                pending.append(task)
                self._free_worker().give(task)
            if not pending:
                if fault is not None:
                    raise fault
                return
            if pending[0].answer is None:
                # Others may be done: they are given more before we wait again for the one whose turn it is.
                self._collect(None)
                continue
            # Nor do they wait while a long row of answers is worked off.
            taken += 1
            if taken % len(self._workers) == 0:
                self._collect(0.0)
            task = pending.popleft()
            in_flight -= task.size
            yield task.piece, _unpack(task)

    def close(self, *, kill: bool = False) -> None:
        """End all workers; `kill` does not wait for what they are at."""
        for worker in self._workers:
            worker.end(kill=kill)
        for worker in self._workers:
            worker.join()
        self._workers = []
        atexit.unregister(self._kill)

    def _kill(self) -> None:
        self.close(kill=True)

    def _has_room(self, pending: int, in_flight: int) -> bool:
        """Whether one more piece may be given to somebody."""
        if pending and (pending >= _IN_FLIGHT_PER_WORKER * self._count or in_flight >= _IN_FLIGHT_BYTES):
            return False
        return len(self._workers) < self._count or any(len(worker.given) < _AHEAD for worker in self._workers)

    def _free_worker(self) -> "_Worker[P, R]":
        """The one with the least to do, or a new one if all are full."""
        worker = min(self._workers, key=lambda worker: len(worker.given), default=None)
        if worker is None or len(worker.given) >= _AHEAD:
            worker = _Worker(self._build, self._argument)
            self._workers.append(worker)
        return worker

    def _collect(self, seconds: float | None) -> None:
        """Wait for answers, so long at most, and note them."""
        by_handle: dict[object, _Worker[P, R]] = {worker.pipe: worker for worker in self._workers}
        by_handle |= {worker.process.sentinel: worker for worker in self._workers}
        ready = connection.wait(list(by_handle), seconds)  # type: ignore[arg-type]
        for handle in ready:
            worker = by_handle[handle]
            if handle is not worker.pipe or not worker.take():
                raise _death(worker.process, self._count)


class _Worker(Generic[P, R]):
    """One process, and the thread that sends it pieces, so that a busy worker never holds up the parent."""

    def __init__(self, build: Callable[[A], Callable[[P], R]], argument: A) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, build, argument), daemon=True
        )
        # Ctrl-C goes to every process of the terminal, and a batch system may signal all: the parent decides.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        theirs.close()
        self.given: deque[_Task[P, R]] = deque()
        """Not answered yet, in order."""
        self._outbox: queue.SimpleQueue[P | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=_send, args=(self._outbox, self.pipe), daemon=True)
        self._sender.start()

    def give(self, task: _Task[P, R]) -> None:
        self.given.append(task)
        self._outbox.put(task.piece)

    def take(self) -> bool:
        """Note one answer; False if the process has ended."""
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            return False
        self.given.popleft().answer = answer
        return True

    def end(self, *, kill: bool) -> None:
        if kill or self.given:
            self.process.kill()
        self._outbox.put(None)

    def join(self) -> None:
        self._sender.join()
        self.pipe.close()  # an idle worker ends at that
        self.process.join(_PATIENCE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def _send(outbox: "queue.SimpleQueue[P | None]", pipe: Connection) -> None:
    while (piece := outbox.get()) is not None:
        try:
            pipe.send(piece)
        except OSError:  # the worker died; whoever waits for its answers sees it
            return


def _unpack(task: _Task[P, R]) -> R:
    """The result, or the exception that there was in place of one."""
    assert task.answer is not None
    kind, value = task.answer
    if kind == "done":
        return value  # type: ignore[return-value]
    raise ConfigError(str(value)) if kind == "refused" else RuntimeError(f"in a worker:\n{value}")


def _death(process: BaseProcess, workers: int) -> ConfigError:
    process.join(_PATIENCE_SECONDS)
    code = process.exitcode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return ConfigError(
        f"a worker process {how}{hint} with {workers} workers; fewer (--workers {max(workers // 2, 1)}) need less memory"
    )


def _serve(pipe: Connection, build: Callable[[A], Callable[[P], R]], argument: A) -> None:
    """A worker's life."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    work = None
    while True:
        try:
            piece = pipe.recv()
        except (EOFError, OSError):
            return
        answer: tuple[str, object]
        try:
            if work is None:
                work = build(argument)
            answer = ("done", work(piece))
        except ConfigError as error:
            answer = ("refused", str(error))
        except MemoryError:
            answer = ("refused", "a worker is out of memory; try fewer, or a smaller --max-document-mb")
        except Exception:
            answer = ("failed", traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:
            return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
