"""The whole sequence on every rank, for attention that materialises its probabilities."""

from typing import Any

import torch

from megalite.context_parallel.order import to_rank_order, to_true_order
from megalite.topology.group import Group


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cp: Group, dim: int, seq_length: int) -> torch.Tensor:
        ctx.cp, ctx.dim = cp, dim
        part = x.movedim(dim, 0).contiguous()
        by_rank = part.new_empty(cp.size, *part.shape)
        cp.all_gather(by_rank.flatten(0, 1), part)
        return to_true_order(by_rank, seq_length).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        by_rank = to_rank_order(grad.movedim(ctx.dim, 0), ctx.cp.size)
        output = torch.empty_like(by_rank[0])
        ctx.cp.reduce_scatter(output, by_rank.flatten(0, 1))
        return output.movedim(0, ctx.dim), None, None, None


def gather_sequence(tensor: torch.Tensor, cp: Group, dim: int, seq_length: int) -> torch.Tensor:
    """The rows of all cp ranks in true order: dimension `dim` grows from s/cp to s.

    Args:
        tensor: dimension `dim` holds the rows of `sequence_spans`.
        cp: the ranks that share the sequence; with one rank the tensor itself is returned.
        dim: the dimension of the sequence.
        seq_length: s.

    Collectives: forward all-gather, backward reduce-scatter, over cp.
    """
    if cp.size == 1:
        return tensor
    return _GatherSequence.apply(tensor, cp, dim, seq_length)
