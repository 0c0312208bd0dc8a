"""Test collectives through shared memory: gloo's bits, any order of waits, and peers that end or hang."""

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.topology import shared_memory
from megalite.topology.group import Group
from megalite.topology.lost_peers import is_connection_error, is_timeout
from megalite.topology.shared_memory import SLOT_BYTES, SharedMemory
from tests.support.fork_server import fork_server
from tests.support.ranks import RankContext, run_ranks, stop_ranks

pytestmark = pytest.mark.skipif(shared_memory._system() is None, reason="shared memory needs Linux on x86-64")

SLOT = SLOT_BYTES // 4  # fp32 numbers


def numbers(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values of very different sizes, so that each order of additions gives other bits."""
    drawn = torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (drawn * (1000 if dtype == torch.int64 else 4.0**rank)).to(dtype)


def compare(context: RankContext, ranks: int) -> bool:
    """Compare every collective through memory with the same one over gloo's sockets."""
    shared = context.topology(tp=ranks).tp
    assert shared.memory is not None
    gloo = dataclasses.replace(shared, memory=None)
    me = shared.rank
    cases = [(length, torch.float32) for length in (1, 7, 4099, SLOT + 1, 2 * ranks * SLOT + 5)]
    cases += [(1001, dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64)]
    for length, dtype in cases:
        mine = numbers(me, length, dtype)
        for op in ("sum", "max", "min"):
            reduced = [mine.clone(), mine.clone()]
            for group, tensor in zip((shared, gloo), reduced, strict=True):
                group.all_reduce(tensor, op=op)
            assert torch.equal(*reduced), (op, length, dtype)
        whole = numbers(me, length * ranks, dtype).view(ranks, length)
        gathered, scattered = ([torch.zeros_like(whole) for _ in range(2)] for _ in range(2))
        for index, group in enumerate((shared, gloo)):
            group.all_gather(gathered[index].view(-1), mine)
            scattered[index].copy_(whole)
            group.reduce_scatter(scattered[index][me], scattered[index])  # in place
        for found in (gathered, scattered):
            assert torch.equal(*found), (length, dtype)
    return True


@pytest.mark.parametrize("ranks", [3, 4])
def test_results_are_bitwise_equal_to_gloo(ranks: int) -> None:
    assert all(run_ranks(ranks, compare, ranks))


def many_at_once(context: RankContext) -> list[float]:
    """Start operations at different times on each rank, and wait in another order, for some twice."""
    tp = context.topology(tp=3).tp
    assert tp.memory is not None
    found = []
    for turn in range(30):
        if turn % 3 == tp.rank:
            time.sleep(0.002)
        whole = torch.full((2 * SLOT + 1,), float(tp.rank + turn))
        place = torch.full((3,), -1.0)
        place[tp.rank] = turn + tp.rank
        works = [tp.all_reduce_async(whole), tp.all_gather_async(place, place[tp.rank : tp.rank + 1])]
        for work in (works[turn % 2], works[1 - turn % 2], works[0]):
            work.wait()
        assert whole.eq(3 * turn + 3).all()
        found += place.tolist()
    return found


def test_pending_operations_finish_in_any_order() -> None:
    wanted = [float(turn + rank) for turn in range(30) for rank in range(3)]
    assert run_ranks(3, many_at_once) == [wanted] * 3


def counts_wrap(context: RankContext) -> list[float]:
    tp = context.topology(tp=2).tp
    assert tp.memory is not None
    number = torch.ones(1)
    tp.all_reduce(number)
    tp.memory._count = tp.memory._counters[tp.rank][0] = 2**32 - 2  # on both ranks: they compare counters
    dataclasses.replace(tp, memory=None).all_reduce(torch.zeros(1))
    for _ in range(4):
        tp.all_reduce(number)
    return number.tolist()


def test_counters_start_again_at_zero() -> None:
    assert run_ranks(2, counts_wrap) == [[32.0]] * 2


def second_rank(pid: int, descriptor: int, pipe: Connection) -> None:
    mine = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    memory = SharedMemory("tp", (4, 5), 1, mine, timeout=60)
    pipe.send("here")
    memory.all_reduce(torch.ones(10), "sum").wait()
    signal.pause()


@contextmanager
def pair(timeout: float) -> Iterator[tuple[SharedMemory, Any]]:
    """Yield rank 4's memory with rank 5, and the process of rank 5, which takes part once."""
    descriptor = shared_memory._allocated(SharedMemory.nbytes(2))
    memory = SharedMemory("tp", (4, 5), 0, descriptor, timeout=timeout)
    context = fork_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=second_rank, args=(os.getpid(), descriptor, theirs))
    process.start()
    try:
        assert ours.recv() == "here"
        number = torch.ones(10)
        memory.all_reduce(number, "sum").wait()
        assert number.eq(2).all()
        yield memory, process
    finally:
        process.kill()
        process.join()


def test_killed_peer_is_detected_and_memory_is_freed() -> None:
    with pair(timeout=60) as (memory, process):
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:megalite" in line]
        assert maps and all(line.endswith("(deleted)") for line in maps)
        work = memory.all_reduce(torch.ones(10), "sum")
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"rank 5 of tp \[4, 5\] has ended") as error:
            work.wait()
        assert is_connection_error(error.value)


def test_wait_for_a_hanging_peer_ends_at_the_timeout() -> None:
    with pair(timeout=0.5) as (memory, process):
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=r"0.5 s for rank 5 of tp \[4, 5\]") as error:
            memory.all_reduce(torch.ones(10), "sum").wait()
        assert is_timeout(error.value) and not is_connection_error(error.value)


def unlike(context: RankContext) -> str:
    tp = context.topology(tp=2).tp
    try:
        tp.all_reduce(torch.zeros(4, dtype=torch.float64) if tp.rank else torch.zeros(8))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_mismatched_operations_are_an_error_on_both_ranks() -> None:
    first, second = run_ranks(2, unlike)
    stop_ranks()
    assert first == "rank 1 of tp [0, 1] is in another operation than all_reduce of 8 torch.float32"
    assert second == "rank 0 of tp [0, 1] is in another operation than all_reduce of 4 torch.float64"


class TwoHosts(Group):
    """A group in which the other rank reports a different system."""

    def gather_json(self, value: Any) -> list[Any]:
        if isinstance(value, bool):
            return [value, True]
        here, pid, descriptor = value
        return [value, [f"another {here}", pid, descriptor]]


def test_ranks_of_two_hosts_share_no_memory() -> None:
    assert SharedMemory.open(TwoHosts("tp", (0, 1), 0), timeout=1) is None
