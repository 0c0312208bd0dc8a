"""Ranks meet where former ranks have left their words, and those who come late are waited for."""

import datetime
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megalite.topology.meeting import fresh_part

SECONDS = datetime.timedelta(seconds=20)


@pytest.fixture
def store() -> dist.TCPStore:
    """As torchrun keeps one."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SECONDS)


def part(store: dist.TCPStore, rank: int, world: int, late: float = 0.0) -> dist.PrefixStore:
    """One rank comes to the meeting, over a connection of its own."""
    time.sleep(late)
    client = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=SECONDS)
    return fresh_part(client, rank=rank, world_size=world, timeout=SECONDS)


def start(store: dist.TCPStore, late: list[float]) -> list[dist.PrefixStore]:
    """All ranks of a start, each so many seconds late."""
    with ThreadPoolExecutor(len(late)) as threads:
        came = [threads.submit(part, store, rank, len(late), wait) for rank, wait in enumerate(late)]
        return [each.result(timeout=30) for each in came]


@pytest.mark.parametrize("late", [[0.0, 0.3, 0.0], [0.3, 0.0, 0.0], [0.0, 0.0]])
def test_ranks_of_one_start_meet_and_former_ones_are_left_out(
    store: dist.TCPStore, late: list[float]
) -> None:
    former = start(store, [0.0, 0.0, 0.0])
    former[0].set("address", "of a process that is gone")
    parts = start(store, late)
    assert not any(each.check(["address"]) for each in parts)
    for rank, each in enumerate(parts):
        each.set(f"address {rank}", str(rank))
    for each in parts:
        assert [each.get(f"address {rank}") for rank in range(len(parts))] == [
            str(rank).encode() for rank in range(len(parts))
        ]


def test_one_that_does_not_come_is_not_waited_for_for_ever(store: dist.TCPStore) -> None:
    start(store, [0.0, 0.0])
    short = datetime.timedelta(seconds=0.5)
    with pytest.raises(RuntimeError, match=r"not all 2 ranks have come within 0\.5 s"):
        fresh_part(store, rank=0, world_size=2, timeout=short)
