"""Ranks and the nodes they are on."""

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.profiling.collectives import Machine, _ranks_per_node, describe_machine
from tests.support.ranks import RankContext, run_ranks


def _describe(context: RankContext, hosts: list[str]) -> Machine | str:
    world = context.topology(dp=len(hosts)).world
    try:
        return describe_machine(world, torch.device("cpu"), node=hosts[context.rank])
    except ConfigError as error:
        return str(error)


def test_every_rank_learns_the_same() -> None:
    first, second = run_ranks(2, _describe, ["a", "b"])
    assert first == second
    assert (first.nodes, first.ranks_per_node, first.ranks, first.threads) == (2, 1, 2, 1)
    assert not first.shares_cores
    alone, _ = run_ranks(2, _describe, ["a", "a"])
    assert (alone.nodes, alone.ranks_per_node, alone.shares_cores) == (1, 2, True)
    assert alone.memory_bytes == first.memory_bytes // 2


def test_uneven_nodes_are_refused() -> None:
    assert _ranks_per_node(["a", "a", "b", "b"]) == 2
    with pytest.raises(ConfigError, match=r"unevenly.*\(2 on a, 1 on b\).*--nproc-per-node 1"):
        _ranks_per_node(["a", "a", "b"])
    with pytest.raises(ConfigError, match="unevenly"):
        _ranks_per_node(["a", "b", "a", "b"])
    with pytest.raises(ConfigError, match="unevenly"):
        _ranks_per_node(["a", "b", "b", "b"])


def _more_threads(context: RankContext) -> str:
    torch.set_num_threads(1 + context.rank)
    try:
        return str(_describe(context, ["a", "b"]))
    finally:
        torch.set_num_threads(1)


def test_unlike_ranks_are_refused() -> None:
    said = run_ranks(2, _more_threads)
    assert said[0] == said[1]
    assert said[0].startswith("the number of threads is 1 on rank 0, 2 on 1")
