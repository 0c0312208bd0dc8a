"""Test the scaling of a start with the number of ranks: connections of gloo groups, and chains of waits."""

import datetime
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.config.errors import ConfigError
from megalite.topology.group import DONE, FAN_OUT, Group, TreeGroup, Work, host_group
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import _connect
from tests.support.ranks import RankContext, run_ranks

CPU, TIMEOUT = torch.device("cpu"), datetime.timedelta(seconds=60)


def small_values(context: RankContext, fan_out: int) -> dict[str, Any]:
    world = context.topology(dp=7).world
    tree = host_group(world, "background", timeout=TIMEOUT, fan_out=fan_out)
    said = {}
    for failing in (None, 0, 4, 6):
        try:
            tree.raise_on_all_ranks(ConfigError(f"of rank {failing}") if context.rank == failing else None)
        except ConfigError as error:
            said[failing] = str(error)
    value = {"rank": context.rank, "text": "é" * context.rank}
    with pytest.raises((RuntimeError, AttributeError, ValueError, TypeError)):
        tree.all_reduce_async(torch.ones(1)).wait()
    numbers = {"max": torch.tensor([float(context.rank), -1.0]), "sum": torch.tensor([2.0**context.rank, 1.0])}
    for operation, tensor in numbers.items():
        tree.all_reduce(tensor, op=operation)
    return {
        "same": tree.gather_json(value) == world.gather_json(value),
        "numbers": {operation: tensor.tolist() for operation, tensor in numbers.items()},
        "from 0": tree.broadcast_json(value),
        "said": said,
        "peers": [level.ranks for level in tree.levels] if isinstance(tree, TreeGroup) else [],
    }


def test_tree_gathers_the_same_as_one_group() -> None:
    for rank, found in enumerate(run_ranks(7, small_values, 3)):
        assert found["same"]
        assert found["numbers"] == {"max": [6.0, -1.0], "sum": [127.0, 7.0]}
        assert found["from 0"] == {"rank": 0, "text": ""}
        assert found["said"] == {failing: f"of rank {failing}" for failing in (0, 4, 6)}
        leaf = {0: (0, 1, 2), 1: (3, 4, 5)}.get(rank // 3)
        assert found["peers"] == [group for group in (leaf, (0, 3, 6) if rank % 3 == 0 else None) if group]


def one_leaves(context: RankContext) -> str:
    """A lost rank closes its connections, and so does each rank with an error."""
    world = context.topology(dp=8).world
    tree = host_group(world, "background", timeout=TIMEOUT, fan_out=2)
    assert isinstance(tree, TreeGroup)
    world.gather_json(None)  # all ranks are connected
    said = "gone"
    if context.rank != 5:
        try:
            tree.gather_json(None)
            said = "no error"
        except RuntimeError as error:
            said = type(error).__name__
    for level in tree.levels:
        dist.destroy_process_group(level.process_group)
    return said


def test_no_rank_waits_for_a_lost_one() -> None:
    assert run_ranks(8, one_leaves, timeout=60.0) == ["RuntimeError" if rank != 5 else "gone" for rank in range(8)]


@pytest.mark.parametrize("world", [8, 512, 4096])
def test_number_of_connections_per_rank_is_small(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: made.append(ranks))
    host_group(Group("world", tuple(range(world)), 0), "host", timeout=TIMEOUT)
    peers = Counter({rank: 0 for rank in range(world)})
    for ranks in made:
        peers.update(dict.fromkeys(ranks, len(ranks) - 1))
    assert max(peers.values()) <= 3 * (FAN_OUT - 1)
    assert sum(peers.values()) < world * FAN_OUT  # one group of 4,096 ranks would have 16.8 million connection ends


class Ordered:
    """An edge that records its use."""

    def __init__(self, rank: int, pair: tuple[int, int], found: list[tuple[int, int]]) -> None:
        self.rank, self._pair, self._found = rank, pair, found

    def send_async(self, tensor: torch.Tensor, *, to: int) -> Work:
        self._found.append(self._pair)
        return DONE

    def receive_async(self, tensor: torch.Tensor, *, source: int) -> Work:
        return self.send_async(tensor, to=source)


@pytest.mark.parametrize(("pp", "v"), [(2, False), (5, False), (64, False), (64, True)])
def test_edges_connect_in_parallel(pp: int, v: bool) -> None:
    """Both ends of each edge connect, and no rank waits for a chain of others."""
    layout = ParallelLayout(pp=pp, placement=(*range(pp), *reversed(range(pp))) if v else None)
    orders: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(pp)}
    for rank, order in orders.items():
        edges = {pair: Ordered(pair.index(rank), pair, order) for pair in layout.pipeline_edges() if rank in pair}
        _connect(edges, CPU)  # type: ignore[arg-type]
    rounds = 0
    while any(orders.values()):
        met = {
            order[0] for order in orders.values() if order and all(orders[end][:1] == [order[0]] for end in order[0])
        }
        assert met, f"ranks wait for each other: {orders}"
        for pair in met:
            for end in pair:
                assert orders[end].pop(0) == pair
        rounds += 1
    assert rounds <= 10
