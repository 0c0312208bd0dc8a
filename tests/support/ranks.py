"""`run_ranks(n, fn, ...)`: run a function on n gloo ranks of a persistent pool of spawned workers.

Spawning ranks anew costs ten seconds a test here; the pool pays once. The first n workers form a gloo job of n
ranks, and keep it and the process groups made in it until a test asks for another n.
"""

import atexit
import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

POOL_SIZE = 8


class RankFailure(AssertionError):
    """A rank raised; the message carries the traceback of the first one that did."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _worker(rank: int, port: int, pipe: Connection) -> None:
    import datetime
    import os
    import warnings

    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    made: dict[Any, Any] = {}
    world = 0  # number of the gloo job that this worker is in
    store = dist.TCPStore(
        "127.0.0.1", port, POOL_SIZE, is_master=rank == 0, timeout=datetime.timedelta(seconds=120)
    )
    pipe.send("ready")
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        if job is None:
            return
        number, size, fn, args, kwargs = job  # `number` changes whenever the size does
        try:
            if world != number:
                if world:
                    dist.destroy_process_group()
                made.clear()
                world = number
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(f"job{number}", store),
                    rank=rank,
                    world_size=size,
                    timeout=datetime.timedelta(seconds=180),
                )
            result = ("ok", fn(RankContext(rank, made), *args, **kwargs))
        except BaseException:
            result = ("error", traceback.format_exc())
        try:
            pipe.send(result)
        except Exception:
            pipe.send(("error", traceback.format_exc()))


class RankContext:
    """What a function under test learns of its process."""

    def __init__(self, rank: int, made: dict[Any, Any]) -> None:
        self.rank = rank
        self.made = made

    def topology(self, **axes: Any) -> Any:
        """The topology of a layout over the first ranks of the pool."""
        import torch

        from megalite.topology.layout import ParallelLayout
        from megalite.topology.topology import Topology

        layout = ParallelLayout(**axes)
        return Topology.create(layout, rank=self.rank, device=torch.device("cpu"), made=self.made)


class _Pool:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self.job, self.job_size = 0, 0
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(POOL_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            if not pipe.poll(180) or pipe.recv() != "ready":
                raise RuntimeError("a pool worker did not start")

    def run(self, size: int, job: tuple[Any, ...], timeout: float) -> list[Any]:
        if size != self.job_size:
            self.job, self.job_size = self.job + 1, size
        for peer in self.pipes[:size]:
            peer.send((self.job, size, *job))
        results: dict[int, Any] = {}
        waiting: dict[Any, int] = {self.pipes[rank]: rank for rank in range(size)}
        while waiting:
            ready = wait(list(waiting), timeout=timeout)
            if not ready:
                self.stop()
                raise RankFailure(f"ranks {sorted(waiting.values())} did not finish within {timeout} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    status, value = pipe.recv()
                except EOFError:
                    status, value = "error", "the worker process died"
                if status == "error":
                    # Its peers may wait in a collective for ever: begin again with fresh workers.
                    self.stop()
                    raise RankFailure(f"rank {rank} of {size} failed first:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(size)]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        _pools.clear()


_pools: list[_Pool] = []


@atexit.register
def _stop_pools() -> None:
    for pool in list(_pools):
        pool.stop()


def run_ranks(
    size: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0, **kwargs: Any
) -> list[Any]:
    """Call `fn(context, *args, **kwargs)` on ranks 0..size-1 together and return their results in rank order.

    Args:
        size: number of ranks, at most `POOL_SIZE`.
        fn: a function at module level (workers import it); `context` is a `RankContext`.
        timeout: seconds without any rank finishing before the pool is killed and the test fails.

    Raises:
        RankFailure: with the traceback of the first rank that raised.
    """
    assert size <= POOL_SIZE
    if not _pools:
        _pools.append(_Pool())
    return _pools[0].run(size, (fn, args, kwargs), timeout)
