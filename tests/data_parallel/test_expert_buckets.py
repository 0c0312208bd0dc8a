"""Test that gradients of experts are summed over ranks with the same experts, and that each element counts once."""

from typing import Any

import pytest
import torch

from megalite.data_parallel.facts import ALIGNMENT
from megalite.data_parallel.strategy import AllReduce, DataParallelStrategy
from megalite.data_parallel.zero import DistributedOptimizer
from megalite.tensor_parallel.parameter import ParameterFactory
from megalite.topology.group import Group
from tests.data_parallel.toy import bare


def group(name: str, size: int, rank: int) -> Group:
    return Group(name, tuple(range(size)), rank)


class Stage(torch.nn.Module):
    """A dense matrix and experts."""

    def __init__(self, ep: Group) -> None:
        super().__init__()
        factory = ParameterFactory(tp=group("tp", 2, 1), ep=ep, seed=1, dtype=torch.float32, device=torch.device("cpu"))
        self.dense = factory.parameter("dense", (10, 10), shard_dim=0, std=1.0)
        self.router = factory.parameter("router", (4, 10), std=1.0, always_partial=True)
        self.up = factory.parameter("experts", (4, 6, 10), shard_dim=1, std=1.0, expert=True)


def strategy_of(kind: type[DataParallelStrategy], dp: Group, expert_dp: Group) -> DataParallelStrategy:
    groups = {"dp": dp, "tp": group("tp", 2, 1), "expert_dp": expert_dp}
    return bare(kind, {0: Stage(group("ep", 2, 0))}, groups=groups, bucket_size=10**6, overlap_param_gather=False)


def by_name(strategy: DataParallelStrategy) -> dict[str, Any]:
    return {shard.bucket.placed[0].parameter.info.spec.name: shard for shard in strategy.shards}


@pytest.mark.parametrize("dp_rank", range(6))
def test_buckets_are_sharded_over_their_group(dp_rank: int) -> None:
    """Dense buckets are sharded over dp, experts over expert-dp, independently of the rank in the other group."""
    for expert_rank in range(3):
        strategy = strategy_of(DistributedOptimizer, group("dp", 6, dp_rank), group("expert-dp", 3, expert_rank))
        shards = by_name(strategy)
        assert sorted(shards) == ["dense", "experts", "router"]
        for name, parts, rank in (("dense", 6, dp_rank), ("experts", 3, expert_rank)):
            shard = shards[name]
            size = shard.bucket.data.numel()
            assert size % (ALIGNMENT * parts) == 0
            assert (shard.start, shard.stop) == (rank * size // parts, (rank + 1) * size // parts)
            assert shard.counts_in_norm
        assert not shards["router"].counts_in_norm, "the first tp rank counts its copy"


def test_norm_counts_one_replica_with_all_reduce() -> None:
    for dp_rank in range(2):
        for expert_rank in range(2):
            strategy = strategy_of(AllReduce, group("dp", 2, dp_rank), group("expert-dp", 2, expert_rank))
            shards = by_name(strategy)
            assert shards["dense"].counts_in_norm == (dp_rank == 0)
            assert shards["experts"].counts_in_norm == (expert_rank == 0)
