"""Apply a function to pieces in worker processes, with results in order and bounded memory."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from megalite.config.errors import ConfigError

A = TypeVar("A")
P = TypeVar("P")
R = TypeVar("R")

MAX_WORKERS = 1024
_IN_FLIGHT_PER_WORKER = 8
_WAITING_PER_WORKER = 3  # pieces sent to workers before this process takes one
_IN_FLIGHT_BYTES = 128 << 20


class WorkerPool(Generic[A, P, R]):
    """Worker processes that each call `build(argument)` once, then the function that it returned on each piece.

    Workers are spawned, because a fork of a process with threads (OpenMP, decompression) may hang. They end with the
    pool's context, and when this process dies for any reason. SIGINT and SIGTERM, which reach all processes of a
    terminal or a batch job, are left to the parent.

    `count`: maximum number of processes. `build`: a module-level function. `argument`: pickled, like pieces and
    results. `remedy`: ends the error messages about too little memory."""

    def __init__(self, count: int, build: Callable[[A], Callable[[P], R]], argument: A, *, remedy: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._count, self._remedy = count, remedy
        # Workers exit when the writing end is closed, by `__exit__` or by the end of this process.
        reader, self._alive = context.Pipe(duplex=False)
        # Otherwise the first spawn would start it and unblock the signals that workers must not receive.
        resource_tracker.ensure_running()
        self._executor = ProcessPoolExecutor(count, context, _start, (build, argument, reader))

    def map(
        self, pieces: Iterator[P], size: Callable[[P], int], here: Callable[[P], R] | None = None
    ) -> Iterator[tuple[P, R]]:
        """Yield (piece, result) in the order of the pieces.

        Pieces in flight are bounded by number and by the sum of their `size` (bytes); one is always allowed. An
        exception of `pieces` is raised after the results of all pieces before it, as without workers. `here`: the same
        function in this process, which takes a piece too when the workers have enough.

        Raises ConfigError if the function raises it or a worker dies."""
        pending: deque[tuple[P, int, Future[R]]] = deque()
        in_flight, exhausted = 0, False
        fault: Exception | None = None
        while True:
            while not exhausted and (
                not pending or (len(pending) < _IN_FLIGHT_PER_WORKER * self._count and in_flight < _IN_FLIGHT_BYTES)
            ):
                try:
                    piece = next(pieces, None)
                except Exception as error:
                    piece, fault = None, error
                if piece is None:
                    exhausted = True
                else:
                    waiting = sum(not each.done() for *_, each in pending)
                    enough = waiting >= _WAITING_PER_WORKER * self._count
                    future = _done(here, piece) if here is not None and enough else self._submit(piece)
                    pending.append((piece, size(piece), future))
                    in_flight += pending[-1][1]
            if not pending:
                if fault is not None:
                    raise fault
                return
            done, num_bytes, future = pending.popleft()
            try:
                result = future.result()
            except BrokenProcessPool:
                raise self._worker_died() from None
            except MemoryError:
                raise ConfigError(f"a process is out of memory; {self._remedy}") from None
            in_flight -= num_bytes
            yield done, result

    def __enter__(self) -> "WorkerPool[A, P, R]":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # do not wait for pieces in flight
            self._alive.close()
        self._executor.shutdown(cancel_futures=True)
        self._alive.close()

    def _submit(self, piece: P) -> "Future[R]":
        # A worker that is started here inherits the mask.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            return self._executor.submit(_work, piece)
        except BrokenProcessPool:
            raise self._worker_died() from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)

    def _worker_died(self) -> ConfigError:
        self._alive.close()  # the executor sends the other workers SIGTERM, which they block, and waits for them
        return ConfigError(f"a worker process died (out of memory?); {self._remedy}")


def _done(here: Callable[[P], R], piece: P) -> "Future[R]":
    """Process a piece in this process."""
    own: Future[R] = Future()
    try:
        own.set_result(here(piece))
    except Exception as error:  # raised after the results of all pieces before it
        own.set_exception(error)
    return own


_worker: dict[str, Any] = {}  # in a worker: `build`, and the function that it returned


def _start(build: Callable[[Any], Callable[[Any], Any]], argument: Any, parent: Connection) -> None:
    _worker["build"] = lambda: build(argument)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: Connection) -> None:
    connection.wait([parent])
    os._exit(1)


def _work(piece: Any) -> Any:
    if "function" not in _worker:
        _worker["function"] = _worker["build"]()
    return _worker["function"](piece)
