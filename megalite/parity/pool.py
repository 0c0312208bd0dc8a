"""`RankPool`: a persistent pool of gloo ranks on this machine that runs a function on all of them.

Starting a Python process with torch takes seconds, so the pool starts its workers once. The first n workers form a job
of n ranks and keep it with its process groups, until a call needs another n or the job has too many groups. Workers are
spawned, as a fork of a process that has used OpenMP may hang."""

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

from megalite.config.registry import call
from megalite.config.run import RunConfig
from megalite.partition.pipeline import layout_of
from megalite.topology.group import Group, ProcessGroups
from megalite.topology.layout import ParallelLayout
from megalite.topology.sanitizer import SanitizedGroup
from megalite.topology.topology import Topology, schedule_as_batch

_SECONDS = 180.0  # time limit of a start or a collective
_SECONDS_PER_RANK = 15.0  # added per rank: each imports torch on shared cores
_MOST_GROUPS = 32
"""Number of process groups after which a new job replaces the old one: gloo has three threads per group, one of which
wakes up a hundred times per second."""


class RankFailure(AssertionError):
    """A rank raised, died or did not finish; the message has the traceback of the first such rank."""


class RankContext:
    """The first argument of a function that runs on a pool."""

    def __init__(self, rank: int, groups: ProcessGroups | None = None) -> None:
        self.rank = rank
        self.groups = {} if groups is None else groups

    def topology(self, *, sanitized: bool = False, **axes: Any) -> Topology:
        """Return the topology of `ParallelLayout(**axes)` over the first ranks of the pool."""
        return self._topology(ParallelLayout(**axes), sanitized=sanitized)

    def _topology(self, layout: ParallelLayout, *, sanitized: bool, memory: bool = True) -> Topology:
        kind, cpu = SanitizedGroup if sanitized else Group, torch.device("cpu")
        return Topology.create(
            layout, rank=self.rank, device=cpu, reuse=self.groups, group_type=kind, shared_memory=memory
        )

    def topology_of(self, config: RunConfig) -> Topology:
        """Return the topology of a validated config over the first ranks of the pool."""
        p = config.parallel
        return self._topology(layout_of(config), sanitized=p.sanitize_communication, memory=p.shared_memory_collectives)


class RankPool:
    """`size` spawned workers; use as a context manager, or call `stop`. `size`: the largest number of ranks per call.
    `strict`: warnings are errors in the workers."""

    def __init__(self, size: int, *, strict: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        # Bound before any worker starts, then passed to rank 0: another program could take a port that is only looked up.
        listening = socket.create_server(("127.0.0.1", 0))
        self.size = size
        self.stopped = False
        self._job, self._job_size, self._groups = 0, 0, 0
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, workers_end = context.Pipe()
            args = (rank, size, listening.getsockname()[1], listening if rank == 0 else None, strict, workers_end)
            process = context.Process(target=call, args=(f"{__name__}:_work", *args), daemon=True)
            process.start()
            workers_end.close()
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

        `size`: at most that of the pool. `fn`: a function at module level, as workers import it; `context` is a
        `RankContext`. `timeout`: seconds without any rank finishing, plus 15 per rank, after which the pool is stopped.
        Raises RankFailure with the traceback of the first rank that raised; its peers may then wait in a collective
        forever, so the pool is stopped."""
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
                late = f"{len(waiting)} of {size} ranks, including rank {min(waiting.values())},"
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
    """Run a worker until the parent closes the pipe or dies. `listening`: rank 0's socket for the store."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent stops the workers
    torch.set_num_threads(1)
    schedule_as_batch()  # as `start_distributed` does
    if strict:
        warnings.simplefilter("error")
    seconds = datetime.timedelta(seconds=_SECONDS + pool_size * _SECONDS_PER_RANK)
    fd = None if listening is None else listening.detach()
    store = dist.TCPStore("127.0.0.1", port, pool_size, fd is not None, seconds, master_listen_fd=fd)
    pipe.send((True, None, 0))
    groups: ProcessGroups = {}
    current = 0
    while True:
        try:
            job, size, fn, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            if job != current:  # another number of ranks
                if current:
                    dist.destroy_process_group()
                groups.clear()
                gc.collect()  # modules and their hooks hold groups in cycles
                current = job
                dist.init_process_group(
                    "gloo", store=dist.PrefixStore(f"job{job}", store), rank=rank, world_size=size, timeout=seconds
                )
            answer = (True, fn(RankContext(rank, groups), *args, **kwargs), len(groups))
        except BaseException:
            answer = (False, traceback.format_exc(), 0)
        try:
            pipe.send(answer)
        except Exception:  # a result that cannot be sent is an error too
            pipe.send((False, traceback.format_exc(), 0))
