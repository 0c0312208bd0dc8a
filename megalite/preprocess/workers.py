"""A function applied to pieces in worker processes, results in the order of the pieces, in bounded memory.

Not concurrent.futures: a worker that dies must be one error that names how, workers must end when this process is
killed, and a signal sent to all of them must be left to the parent.
"""

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
from typing import Any, Generic, Literal, TypeVar

from megalite.config.errors import ConfigError

A = TypeVar("A")
P = TypeVar("P")
R = TypeVar("R")

MAX_WORKERS = 1024
_AHEAD = 3
"""Pieces that a worker has received and not answered: it never waits for the parent."""
_IN_FLIGHT_PER_WORKER = 8
_IN_FLIGHT_BYTES = 128 << 20
_PATIENCE_SECONDS = 5.0


@dataclass
class _Task(Generic[P]):
    piece: P
    size: int
    answer: tuple[Literal["done", "refused", "failed"], Any] | None = None


class WorkerPool(Generic[A, P, R]):
    """Processes that each call `build(argument)` once and then the function that it returned on piece after piece.

    Workers are spawned: a fork of a process that runs threads (OpenMP, decompression) may hang. They end when the pool
    is closed, and also when this process dies in any way: each watches it. A worker starts only when the others have
    all that they may have, so that small inputs do not wait for many to start.

    Args:
        count: processes at most.
        build: a function of a module, which workers import.
        argument: what `build` is called with; it is pickled, as are pieces and results.
    """

    def __init__(self, count: int, build: Callable[[A], Callable[[P], R]], argument: A) -> None:
        self._count, self._build, self._argument = count, build, argument
        self._workers: list[_Worker] = []
        # Else the first spawn would start it, and unblock the signals that the workers must not see.
        resource_tracker.ensure_running()
        # An interpreter that ends sends its children SIGTERM, which these block, and waits for them.
        atexit.register(self._kill)

    def map(self, pieces: Iterator[P], size: Callable[[P], int]) -> Iterator[tuple[P, R]]:
        """(piece, result) in the order of the pieces.

        Pieces in flight are bounded by number and by the sum of their `size` (bytes); one is always allowed. An
        exception that ends `pieces` is raised after the results of all pieces before it, as it is without workers.

        Raises:
            ConfigError: the function raised it, or a worker died.
            RuntimeError: the function failed in another way; holds the worker's traceback.
        """
        pending: deque[_Task[P]] = deque()
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
                task = _Task(piece, size(piece))
                in_flight += task.size
                pending.append(task)
                self._free_worker().send(task)
            if not pending:
                if fault is not None:
                    raise fault
                return
            if pending[0].answer is None:
                # Others may be done: they get more before we wait again for the next in order.
                self._collect(None)
                continue
            # Nor do they wait while a long row of answers is consumed.
            taken += 1
            if taken % len(self._workers) == 0:
                self._collect(0.0)
            task = pending.popleft()
            in_flight -= task.size
            yield task.piece, _unpack(task)

    def close(self, *, kill: bool = False) -> None:
        """End all workers; `kill` does not wait for their work."""
        for worker in self._workers:
            worker.end(kill=kill)
        for worker in self._workers:
            worker.join()
        self._workers = []
        atexit.unregister(self._kill)

    def _kill(self) -> None:
        self.close(kill=True)

    def _has_room(self, pending: int, in_flight: int) -> bool:
        if pending and (pending >= _IN_FLIGHT_PER_WORKER * self._count or in_flight >= _IN_FLIGHT_BYTES):
            return False
        return len(self._workers) < self._count or any(len(worker.tasks) < _AHEAD for worker in self._workers)

    def _free_worker(self) -> "_Worker":
        """The one with the least to do, or a new one if all are full."""
        worker = min(self._workers, key=lambda worker: len(worker.tasks), default=None)
        if worker is None or len(worker.tasks) >= _AHEAD:
            worker = _Worker(self._build, self._argument)
            self._workers.append(worker)
        return worker

    def _collect(self, seconds: float | None) -> None:
        """Wait for answers, at most so long, and note them."""
        by_handle: dict[object, _Worker] = {worker.pipe: worker for worker in self._workers}
        by_handle |= {worker.process.sentinel: worker for worker in self._workers}
        for handle in connection.wait(list(by_handle), seconds):  # type: ignore[arg-type]
            worker = by_handle[handle]
            if handle is not worker.pipe or not worker.receive():
                raise _death(worker.process, self._count)


class _Worker:
    """One process, and the thread that sends it pieces, so that a busy worker never blocks the parent."""

    def __init__(self, build: Callable[[Any], Callable[[Any], Any]], argument: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, build, argument), daemon=True)
        # Ctrl-C reaches every process of the terminal, and a batch system may signal all: the parent decides.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        theirs.close()
        self.tasks: deque[_Task[Any]] = deque()
        """Not answered yet, in order."""
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._sender.start()

    def send(self, task: _Task[Any]) -> None:
        self.tasks.append(task)
        self._outbox.put(task.piece)

    def receive(self) -> bool:
        """Note one answer; False if the process has ended."""
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            return False
        self.tasks.popleft().answer = answer
        return True

    def end(self, *, kill: bool) -> None:
        if kill or self.tasks:
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

    def _send_all(self) -> None:
        while (piece := self._outbox.get()) is not None:
            try:
                self.pipe.send(piece)
            except OSError:  # the worker died; who waits for its answers sees it
                return


def _unpack(task: _Task[Any]) -> Any:
    assert task.answer is not None
    kind, value = task.answer
    if kind == "done":
        return value
    raise ConfigError(value) if kind == "refused" else RuntimeError(f"in a worker:\n{value}")


def _death(process: BaseProcess, workers: int) -> ConfigError:
    process.join(_PATIENCE_SECONDS)
    code = process.exitcode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return ConfigError(
        f"a worker process {how}{hint} with {workers} workers; fewer (--workers {max(workers // 2, 1)}) need less memory"
    )


def _serve(pipe: Connection, build: Callable[[Any], Callable[[Any], Any]], argument: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    work = None
    while True:
        try:
            piece = pipe.recv()
        except (EOFError, OSError):
            return
        answer: tuple[str, object]
        try:
            work = work or build(argument)
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
