"""Attention by heads: an all-to-all trades the split of the sequence for a split of the heads, and one trades it back.

Between the two every rank has the whole sequence of some heads, and attention is that of one rank. Source: DeepSpeed
Ulysses (arXiv 2309.14509).
"""

from typing import Any

import torch

from megalite.context_parallel.order import to_rank_order, to_true_order
from megalite.topology.group import Group


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cp: Group, seq_length: int) -> torch.Tensor:
        ctx.cp = cp
        return _split_heads(x, cp, seq_length)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _split_sequence(grad, ctx.cp), None, None


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cp: Group) -> torch.Tensor:
        ctx.cp = cp
        return _split_sequence(x, cp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _split_heads(grad, ctx.cp, grad.shape[0] * ctx.cp.size), None


def sequence_to_heads(packed: torch.Tensor, cp: Group, seq_length: int) -> torch.Tensor:
    """Split the heads instead of the sequence: [s/cp, b, groups, ...] -> [s, b, groups/cp, ...], in true order.

    Args:
        packed: rows of `sequence_spans`; rank r of cp gets the r-th of cp equal parts of dimension 2, so that groups
            of queries with their key and value stay together ([s/cp, b, groups, queries + 2, d]).
        cp: the ranks that share the sequence; its size divides the groups.
        seq_length: s.

    Collectives: one all-to-all of equal parts over cp, forward and backward.
    """
    return _SequenceToHeads.apply(packed, cp, seq_length)


def heads_to_sequence(out: torch.Tensor, cp: Group, seq_length: int) -> torch.Tensor:
    """The inverse of `sequence_to_heads`: [s, b, heads/cp, ...] in true order -> [s/cp, b, heads, ...].

    Collectives: one all-to-all of equal parts over cp, forward and backward.
    """
    assert out.shape[0] == seq_length, (out.shape, seq_length)
    return _HeadsToSequence.apply(out, cp)


def _split_heads(x: torch.Tensor, cp: Group, seq_length: int) -> torch.Tensor:
    """[s/cp, b, n, ...] -> [s, b, n/cp, ...]."""
    parts = x.unflatten(2, (cp.size, x.shape[2] // cp.size)).movedim(2, 0).contiguous()
    received = torch.empty_like(parts)
    cp.all_to_all_equal(received, parts)
    return to_true_order(received, seq_length)


def _split_sequence(x: torch.Tensor, cp: Group) -> torch.Tensor:
    """[s, b, n/cp, ...] -> [s/cp, b, n, ...]."""
    parts = to_rank_order(x, cp.size)
    received = torch.empty_like(parts)
    cp.all_to_all_equal(received, parts)
    return received.movedim(0, 2).flatten(2, 3)
