"""The exchanges of context parallelism: a step round a ring, and parts for every rank."""

import pytest
import torch

from megalite.topology.group import Group
from tests.support.ranks import RankContext, run_ranks


def rotated(context: RankContext, cp: int) -> list[list[float]]:
    """Two exchanges of different sizes under way at once, then a third."""
    group = context.topology(cp=cp).cp
    first, wait_first = group.rotate_async(torch.tensor([float(group.rank)]))
    second, wait_second = group.rotate_async(torch.tensor([group.rank + 0.5, group.rank + 0.25]))
    wait_first.wait()
    wait_second.wait()
    third, wait_third = group.rotate_async(first)
    wait_third.wait()
    return [first.tolist(), second.tolist(), third.tolist()]


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_each_rank_gets_what_the_one_before_it_sent(cp: int) -> None:
    for rank, found in enumerate(run_ranks(cp, rotated, cp)):
        one, two = (rank - 1) % cp, (rank - 2) % cp
        assert found == [[one], [one + 0.5, one + 0.25], [two]]


def exchanged(context: RankContext, cp: int) -> list[list[float]]:
    group = context.topology(cp=cp).cp
    parts = torch.tensor([[group.rank * 10.0 + to, 0.5] for to in range(cp)])
    output = torch.empty_like(parts)
    group.all_to_all_equal(output, parts)
    return output.tolist()


@pytest.mark.parametrize("cp", [2, 3])
def test_part_i_goes_to_rank_i(cp: int) -> None:
    for rank, found in enumerate(run_ranks(cp, exchanged, cp)):
        assert found == [[source * 10.0 + rank, 0.5] for source in range(cp)]


def test_one_rank_exchanges_with_itself() -> None:
    solo = Group.solo("cp")
    x = torch.arange(3.0)
    received, work = solo.rotate_async(x)
    work.wait()
    assert received is x
    output = torch.empty_like(x)
    solo.all_to_all_equal(output, x)
    assert torch.equal(output, x)
