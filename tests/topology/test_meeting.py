"""Test the rendezvous of ranks in a store with tokens of earlier ranks, and with late ranks."""

import datetime
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.config.errors import ConfigError, RankError
from megalite.topology.topology import Launch, fresh_prefix_store, start_distributed

SECONDS = datetime.timedelta(seconds=20)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SECONDS)


def part(store: dist.TCPStore, rank: int, world: int, late: float = 0.0) -> dist.PrefixStore:
    time.sleep(late)
    client = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=SECONDS)
    return fresh_prefix_store(client, rank=rank, world_size=world, timeout=SECONDS)


def start(store: dist.TCPStore, late: list[float]) -> list[dist.PrefixStore]:
    with ThreadPoolExecutor(len(late)) as threads:
        came = [threads.submit(part, store, rank, len(late), wait) for rank, wait in enumerate(late)]
        return [each.result(timeout=30) for each in came]


@pytest.mark.parametrize("late", [[0.3, 0.0, 0.0], [0.0, 0.0]])
def test_ranks_of_one_start_meet_without_earlier_ones(store: dist.TCPStore, late: list[float]) -> None:
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


def errors_of_present_ranks(store: dist.TCPStore, ranks: list[int], world: int) -> set[str]:
    """Return the errors of these ranks about the missing ones."""

    def wait(rank: int) -> str:
        client = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=SECONDS)
        with pytest.raises(RuntimeError) as caught:
            fresh_prefix_store(client, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=1.0))
        return str(caught.value)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return set(threads.map(wait, ranks))


@pytest.mark.parametrize(
    ("come", "says", "former"),
    [([0, 1, 3], "rank 2 of 4", True), ([0], "ranks 1, 2, 3 of 4", False), ([1, 2, 3], "rank 0 of 4", True)],
)
def test_missing_ranks_are_named(store: dist.TCPStore, come: list[int], says: str, former: bool) -> None:
    if former:
        start(store, [0.0] * 4)
    (message,) = errors_of_present_ranks(store, come, 4)
    assert message == f"{says} did not come within 1 s (distributed_timeout_minutes); see their last output"


def test_long_list_of_missing_ranks_is_truncated(store: dist.TCPStore) -> None:
    (message,) = errors_of_present_ranks(store, [0], 40)
    assert message.startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, ... of 40 did not come")


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_separate_processes_without_a_launcher_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun -n 8 python pretrain_gpt.py` would be eight runs, all in the same folder."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "1")
    assert Launch.from_environment().world_size == 1
    monkeypatch.setenv(name, "8")
    with pytest.raises(ConfigError, match=f"{name} is 8: .* start torchrun once on each host"):
        Launch.from_environment()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Launch.from_environment().world_size == 1


def test_ranks_started_manually_meet_or_report_why_not(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = {"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    by_hand["MASTER_PORT"] = str(store.port)
    for name, value in by_hand.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    # Do not change the policy of this process, which runs other tests.
    monkeypatch.setattr("megalite.topology.topology.schedule_as_batch", lambda: None)
    with pytest.raises(
        RankError,
        match=r"WORLD_SIZE is 2, with RANK 2, .* start each process with its own RANK, 0 to 1, and all with one",
    ):
        Launch.from_environment()
    monkeypatch.setenv("RANK", "0")
    cpu, how = torch.device("cpu"), dict[str, Any](backend="gloo", timeout_minutes=0.02)
    with pytest.raises(
        RankError, match=rf"rank 0 cannot host the store at 127\.0\.0\.1:{store.port} .*in use; check that"
    ):
        start_distributed(Launch.from_environment(), cpu, **how)
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RankError, match=r"rank 1 cannot reach the store of rank 0 at 127\.0\.0\.1:1 "):
        start_distributed(Launch.from_environment(), cpu, **how)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(RankError, match=r"MASTER_ADDR 127\.0\.0\.1 and MASTER_PORT None; .* one address and port"):
        Launch.from_environment()
