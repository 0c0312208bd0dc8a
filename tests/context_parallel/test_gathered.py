"""Gathering the sequence in true order, and summing its gradient back."""

import pytest
import torch
from torch import Tensor

from megalite.context_parallel.ulysses import gather_sequence
from megalite.topology.group import Group
from tests.context_parallel.dense import drawn, rows_of
from tests.support.ranks import RankContext, run_ranks

SHAPE = (24, 2, 24, 3)


def gathered(context: RankContext, cp: int, dim: int) -> tuple[Tensor, Tensor]:
    group = context.topology(cp=cp).cp if cp > 1 else Group.solo("cp")
    x = rows_of(drawn(0, *SHAPE), group.rank, cp, dim).requires_grad_()
    y = gather_sequence(x, cp=group, dim=dim, seq_length=SHAPE[dim])
    y.backward(drawn(10 + group.rank, *SHAPE))
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 2])
def test_the_whole_in_order_and_the_sum_of_gradients_at_home(cp: int, dim: int) -> None:
    total = sum((drawn(10 + rank, *SHAPE) for rank in range(1, cp)), drawn(10, *SHAPE))
    for rank, (y, grad) in enumerate(run_ranks(cp, gathered, cp, dim)):
        assert torch.equal(y, drawn(0, *SHAPE))
        torch.testing.assert_close(grad, rows_of(total, rank, cp, dim), rtol=1e-13, atol=1e-13)


def test_one_rank_copies_nothing() -> None:
    x = drawn(0, 4, 3)
    assert gather_sequence(x, cp=Group.solo("cp"), dim=0, seq_length=4) is x
