"""Test sums in rank order, bit by bit: numbers of ranks, pieces and formats, and the two collectives that use them."""

import pytest
import torch

from megalite.data_parallel.wire import Background, Channel, WireCounter
from megalite.topology.group import add_in_order
from tests.support.ranks import RankContext, run_ranks

LENGTH = (1 << 16) + 640  # a whole piece and a partial one


def parts_of(ranks: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(ranks, length, generator=torch.Generator().manual_seed(ranks))


def one_after_the_other(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0].clone()
    for row in parts[1:]:
        total = total + row
    return total


@pytest.mark.parametrize("ranks", [2, 3, 18, 33])
def test_rows_are_added_in_order(ranks: int) -> None:
    parts = parts_of(ranks)
    wanted, found = one_after_the_other(parts), torch.full((LENGTH,), torch.nan)
    add_in_order(found, parts)
    assert torch.equal(found, wanted)
    table = torch.empty(LENGTH // 2, 2)
    add_in_order(table, parts.view(ranks, *table.shape))
    assert torch.equal(table.view(-1), wanted)


def test_narrow_parts_are_added_in_the_wider_dtype() -> None:
    parts = parts_of(18).bfloat16()
    wanted = one_after_the_other(parts.float())
    wide, narrow = torch.empty(LENGTH), torch.empty(LENGTH, dtype=torch.bfloat16)
    add_in_order(wide, parts)
    add_in_order(narrow, parts)
    assert torch.equal(wide, wanted)
    assert torch.equal(narrow, wanted.bfloat16())


def reduce_scattered(context: RankContext, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    group, background = context.topology(dp=ranks).dp, Background(torch.device("cpu"))
    whole = parts_of(ranks, 64 * ranks)[context.rank]
    plain, by_rank = torch.empty(64), torch.empty(64)
    group.reduce_scatter(plain, whole)
    channel = Channel(group, WireCounter(), background, by_rank=True)
    channel.reduce_scatter_async(by_rank, whole).wait()
    background.close()
    return plain, by_rank


def test_reduce_scatters_add_in_rank_order() -> None:
    ranks = 5
    wanted = one_after_the_other(parts_of(ranks, 64 * ranks)).view(ranks, 64)
    for rank, found in enumerate(run_ranks(ranks, reduce_scattered, ranks)):
        for each in found:
            assert torch.equal(each, wanted[rank])
