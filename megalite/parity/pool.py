"""`RankPool`: a persistent pool of gloo ranks on this machine, to run one function on all of them.

To start a Python process with torch takes seconds, so the pool starts its workers once. The first n of them form a job
of n ranks and keep it, with the process groups made in it, until another n is asked for or there are many. Workers are spawned: a fork
of a process that has used OpenMP may hang.
"""

import datetime
import gc
import multiprocessing
import signal
import socket
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from megalite.config.run import RunConfig
from megalite.partition.pipeline import layout_of
from megalite.topology.group import Group, ProcessGroups
from megalite.topology.layout import ParallelLayout
from megalite.topology.sanitizer import SanitizedGroup
from megalite.topology.topology import Topology, schedule_as_batch

_SECONDS = 180.0  # of a start or a collective, for a few ranks
_SECONDS_PER_RANK = 15.0  # more, where many share few cores with other programs: each imports torch
_MOST_GROUPS = 32
"""Process groups after which a job is given up for a new one: gloo has three threads for each, one of which wakes a hundred
times per second."""


class RankFailure(AssertionError):
    """A rank raised, died or did not end; the message carries the traceback of the first one that did."""


class RankContext:
    """What a function that runs on a pool learns of its process."""

    def __init__(self, rank: int, made: ProcessGroups | None = None) -> None:
        self.rank = rank
        self.made = {} if made is None else made

    def topology(self, *, sanitized: bool = False, **axes: Any) -> Topology:
        """The topology of `ParallelLayout(**axes)` over the first ranks of the pool."""
        return self._topology(ParallelLayout(**axes), sanitized=sanitized)

    def _topology(self, layout: ParallelLayout, *, sanitized: bool, memory: bool = True) -> Topology:
        kind, cpu = SanitizedGroup if sanitized else Group, torch.device("cpu")
        return Topology.create(
            layout, rank=self.rank, device=cpu, made=self.made, group_type=kind, shared_memory=memory
        )

    def topology_of(self, config: RunConfig) -> Topology:
        """The topology of a validated config over the first ranks of the pool."""
        p = config.parallel
        return self._topology(layout_of(config), sanitized=p.sanitize_communication, memory=p.shared_memory_collectives)


class RankPool:
    """`size` spawned workers; use as a context manager, or call `stop`. `size`: the largest number of ranks that one
    call can have. `strict`: warnings are errors in the workers."""

    def __init__(self, size: int, *, strict: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        # Listens before any worker starts, and rank 0 takes it over: a port that is looked up and left free until then
        # may be another program's by that time.
        listening = socket.create_server(("127.0.0.1", 0))
        self.size = size
        self.stopped = False
        self._job, self._job_size, self._groups = 0, 0, 0
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (rank, size, listening.getsockname()[1], listening if rank == 0 else None, strict, theirs)
            process = context.Process(target=_work, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        listening.close()
        try:
            self._collect(size, _SECONDS)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, size: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0, **kwargs: Any) -> list[Any]:
        """Call `fn(context, *args, **kwargs)` on ranks 0..size-1 together and return their results in rank order.

        `size`: number of ranks, at most that of the pool. `fn`: a function at module level (workers import it);
        `context` is a `RankContext`. `timeout`: seconds without any rank finishing before the pool is stopped, and 15 more
        for each rank. Raises RankFailure: with the traceback of the first rank that raised. Its peers may then wait in a collective forever,
        so the pool is stopped."""
        assert size <= self.size and not self.stopped, (size, self.size, self.stopped)
        if size != self._job_size or self._groups > _MOST_GROUPS:
            self._job, self._job_size = self._job + 1, size
        try:
            for pipe in self._pipes[:size]:
                pipe.send((self._job, size, fn, args, kwargs))
            return self._collect(size, timeout)
        except BaseException:
            self.stop()
            raise

    def _collect(self, size: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        waiting: dict[Any, int] = {self._pipes[rank]: rank for rank in range(size)}
        timeout += size * _SECONDS_PER_RANK
        while waiting:
            ready = wait(list(waiting), timeout=timeout)
            if not ready:
                late = f"{len(waiting)} of {size} ranks, rank {min(waiting.values())} among them,"
                raise RankFailure(f"{late} did not finish within {timeout:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    ok, value, self._groups = pipe.recv()
                except (EOFError, ConnectionResetError):
                    ok, value = False, "the worker process died"
                if not ok:
                    raise RankFailure(f"rank {rank} of {size} failed first:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(size)]

    def stop(self) -> None:
        self.stopped = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _work(
    rank: int, pool_size: int, port: int, listening: socket.socket | None, strict: bool, pipe: Connection
) -> None:
    """The life of a worker: it ends when the parent closes the pipe, or dies with it.

    `listening`: rank 0's, for the store."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent then stops us
    torch.set_num_threads(1)
    schedule_as_batch()  # as `start_distributed` does
    if strict:
        warnings.simplefilter("error")
    seconds = datetime.timedelta(seconds=_SECONDS + pool_size * _SECONDS_PER_RANK)
    fd = None if listening is None else listening.detach()
    store = dist.TCPStore("127.0.0.1", port, pool_size, fd is not None, seconds, master_listen_fd=fd)
    pipe.send((True, None, 0))
    made: ProcessGroups = {}
    gc.freeze()  # what is imported stays: no collection need look at it
    current = 0
    while True:
        try:
            job, size, fn, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            if job != current:  # another number of ranks than before
                if current:
                    dist.destroy_process_group()
                made.clear()
                gc.collect()  # modules and their hooks hold groups in cycles
                current = job
                dist.init_process_group(
                    "gloo", store=dist.PrefixStore(f"job{job}", store), rank=rank, world_size=size, timeout=seconds
                )
            answer = (True, fn(RankContext(rank, made), *args, **kwargs), len(made))
        except BaseException:
            answer = (False, traceback.format_exc(), 0)
        try:
            pipe.send(answer)
        except Exception:  # an answer that cannot be sent is an error too
            pipe.send((False, traceback.format_exc(), 0))
