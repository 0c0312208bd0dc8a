"""Exchanges of unequal parts over real gloo ranks."""

import torch

from megalite.topology.group import Group
from tests.support.ranks import RankContext, run_ranks

SENT = [[1, 0, 2], [0, 0, 0], [3, 1, 0]]
"""Rows from rank i to rank j: one rank sends nothing, one gets next to nothing."""


def unequal(context: RankContext, dtype: torch.dtype) -> list[list[float]]:
    world = context.topology(dp=3).world
    sent = SENT[world.rank]
    received = [row[world.rank] for row in SENT]
    to = [float(10 * world.rank + rank) for rank, count in enumerate(sent) for _ in range(count)]
    rows = torch.tensor(to, dtype=dtype)[:, None].expand(-1, 2).contiguous().view(-1, 2)
    output = torch.full((sum(received), 2), -1.0, dtype=dtype)
    world.all_to_all(output, rows, received, sent)
    assert torch.equal(output[:, 0], output[:, 1])
    return output[:, 0].tolist()


def test_all_to_all_of_unequal_parts() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        assert run_ranks(3, unequal, dtype) == [[0.0, 20.0, 20.0, 20.0], [21.0], [2.0, 2.0]]


def nothing_at_all(context: RankContext) -> list[int]:
    world = context.topology(dp=2).world
    output = torch.empty(0, 4)
    world.all_to_all(output, torch.empty(0, 4), [0, 0], [0, 0])
    return list(output.shape)


def test_all_to_all_without_a_single_row() -> None:
    assert run_ranks(2, nothing_at_all) == [[0, 4], [0, 4]]


def test_solo_keeps_its_rows() -> None:
    rows = torch.arange(6.0).view(3, 2)
    output = torch.empty(3, 2)
    Group.solo("ep").all_to_all(output, rows, [3], [3])
    assert torch.equal(output, rows)
