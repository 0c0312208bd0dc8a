"""The exchange of sequence for heads: the destination of each element, and each direction is the other's adjoint."""

import pytest
import torch
from torch import Tensor

from megalite.context_parallel.attention import gather_sequence, heads_to_sequence, sequence_to_heads
from megalite.topology.group import Group
from megalite.topology.layout import joined_spans
from tests.context_parallel.dense import drawn, rows_of, zigzag
from tests.support.ranks import RankContext, run_ranks

S, B, GROUPS, REST = 24, 2, 12, (3, 5)

Found = dict[str, Tensor]


def group_of(context: RankContext, cp: int) -> Group:
    return context.topology(cp=cp).cp if cp > 1 else Group.solo("cp")


def heads_of(tensor: Tensor, rank: int, cp: int) -> Tensor:
    return tensor.chunk(cp, dim=2)[rank]


def both_ways(context: RankContext, cp: int) -> Found:
    cp_group = group_of(context, cp)
    rank = cp_group.rank
    by_sequence = rows_of(drawn(0, S, B, GROUPS, *REST), rank, cp, 0).requires_grad_()
    by_heads = sequence_to_heads(by_sequence, cp=cp_group, spans=zigzag(S, cp))
    by_heads.backward(heads_of(drawn(1, S, B, GROUPS, *REST), rank, cp))
    flat = heads_of(drawn(2, S, B, GROUPS * 7), rank, cp).requires_grad_()
    back = heads_to_sequence(flat, cp=cp_group, spans=zigzag(S, cp))
    back.backward(rows_of(drawn(3, S, B, GROUPS * 7), rank, cp, 0))
    return {
        "by_heads": by_heads.detach(),
        "grad_of_rows": by_sequence.grad,
        "by_rows": back.detach(),
        "grad_of_heads": flat.grad,
        "there_and_back": heads_to_sequence(by_heads.detach(), cp=cp_group, spans=zigzag(S, cp)),
    }


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_elements_and_their_gradients_arrive(cp: int) -> None:
    for rank, found in enumerate(run_ranks(cp, both_ways, cp)):
        right = {
            "by_heads": heads_of(drawn(0, S, B, GROUPS, *REST), rank, cp),
            "grad_of_rows": rows_of(drawn(1, S, B, GROUPS, *REST), rank, cp, 0),
            "by_rows": rows_of(drawn(2, S, B, GROUPS * 7), rank, cp, 0),
            "grad_of_heads": heads_of(drawn(3, S, B, GROUPS * 7), rank, cp),
            "there_and_back": rows_of(drawn(0, S, B, GROUPS, *REST), rank, cp, 0),
        }
        for name, tensor in right.items():
            assert torch.equal(found[name], tensor), (name, rank)


def exchanged(context: RankContext, cp: int) -> list[int]:
    group = group_of(context, cp)
    calls: list[int] = []

    class Counter(Group):
        def all_to_all_equal(self, output: Tensor, tensor: Tensor) -> None:
            calls.append(tensor.numel())
            super().all_to_all_equal(output, tensor)

    counter = Counter(group.name, group.ranks, group.rank, group.process_group)
    x = rows_of(drawn(0, S, B, GROUPS, *REST), group.rank, cp, 0).requires_grad_()
    y = sequence_to_heads(x, cp=counter, spans=zigzag(S, cp))
    y.sum().backward()
    return calls


def test_one_exchange_of_the_whole_activation_per_direction() -> None:
    size = S // 2 * B * GROUPS * 15
    assert run_ranks(2, exchanged, 2) == [[size, size]] * 2


WHOLE = (24, 2, 24, 3)


def gathered(context: RankContext, cp: int, dim: int) -> tuple[Tensor, Tensor]:
    group = group_of(context, cp)
    x = rows_of(drawn(0, *WHOLE), group.rank, cp, dim).requires_grad_()
    y = gather_sequence(x, cp=group, dim=dim, spans=zigzag(WHOLE[dim], cp))
    y.backward(drawn(10 + group.rank, *WHOLE))
    return y.detach(), x.grad


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 2])
def test_gather_is_in_order_and_its_gradients_are_summed(cp: int, dim: int) -> None:
    total = sum((drawn(10 + rank, *WHOLE) for rank in range(1, cp)), drawn(10, *WHOLE))
    for rank, (y, grad) in enumerate(run_ranks(cp, gathered, cp, dim)):
        assert torch.equal(y, drawn(0, *WHOLE))
        torch.testing.assert_close(grad, rows_of(total, rank, cp, dim), rtol=1e-13, atol=1e-13)


def test_one_rank_does_not_copy() -> None:
    x = drawn(0, 4, 3)
    assert gather_sequence(x, cp=Group.solo("cp"), dim=0, spans=zigzag(4, 1)) is x


def traded_within_groups(context: RankContext, inner: int) -> tuple[Tensor, int]:
    """With four ranks: one rank's part inside the core, and its rank in the group of the key ring."""
    topology = context.topology(cp=4, cp_heads=inner)
    assert (topology.cp_heads.size, topology.cp_keys.size) == (inner, 4 // inner)
    first = topology.cp.rank // inner * inner
    x = rows_of(drawn(0, S, B, GROUPS, *REST), topology.cp.rank, 4, 0)
    spans = zigzag(S, 4)[first : first + inner]
    there = sequence_to_heads(x, cp=topology.cp_heads, spans=spans)
    assert torch.equal(heads_to_sequence(there, cp=topology.cp_heads, spans=spans), x)
    return there, topology.cp_keys.rank


@pytest.mark.parametrize("inner", [2, 4])
def test_head_groups_hold_a_zigzag_of_fewer_ranks(inner: int) -> None:
    assert joined_spans(zigzag(S, 4), inner) == joined_spans(zigzag(S, 4 // inner), 1)
    for rank, (there, group) in enumerate(run_ranks(4, traded_within_groups, inner)):
        mine = rows_of(drawn(0, S, B, GROUPS, *REST), group, 4 // inner, 0)
        assert torch.equal(there, heads_of(mine, rank % inner, inner))
