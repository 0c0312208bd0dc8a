"""Attention over a split sequence by exchanging heads (Ulysses, arXiv 2309.14509) or by gathering keys and values.

The all-to-all trades the split of the sequence for a split of the heads, so that attention is that of one rank.
"""

import torch
from torch import Tensor

from megalite.topology.conjugate import conjugate
from megalite.topology.group import Group
from megalite.topology.layout import sequence_spans


def to_true_order(by_rank: Tensor, seq_length: int) -> Tensor:
    """[cp, s/cp, ...] with the rows that each rank holds -> [s, ...] in true order."""
    output = by_rank.new_empty(seq_length, *by_rank.shape[2:])
    for rank, rows in enumerate(by_rank):
        parts = _parts(output, rank, by_rank.shape[0])
        for part, piece in zip(parts, rows.split([part.shape[0] for part in parts])):
            part.copy_(piece)
    return output


def to_rank_order(sequence: Tensor, cp_size: int) -> Tensor:
    """[s, ...] in true order -> [cp, s/cp, ...] with the rows that each rank holds."""
    return torch.stack([torch.cat(_parts(sequence, rank, cp_size)) for rank in range(cp_size)])


def _parts(sequence: Tensor, rank: int, cp_size: int) -> list[Tensor]:
    spans = sequence_spans(sequence.shape[0], cp_rank=rank, cp_size=cp_size)
    return [sequence[first:stop] for first, stop in spans]


def gather_sequence(tensor: Tensor, cp: Group, dim: int, seq_length: int) -> Tensor:
    """The rows of all cp ranks in true order: dimension `dim`, the rows of `sequence_spans`, grows from s/cp to s.

    Collectives: forward all-gather, backward reduce-scatter, over cp.
    """
    if cp.size == 1:
        return tensor

    def gather(x: Tensor) -> Tensor:
        part = x.movedim(dim, 0).contiguous()
        by_rank = part.new_empty(cp.size, *part.shape)
        cp.all_gather(by_rank.flatten(0, 1), part)
        return to_true_order(by_rank, seq_length).movedim(0, dim)

    def reduce_scatter(grad: Tensor) -> Tensor:
        by_rank = to_rank_order(grad.movedim(dim, 0), cp.size)
        output = torch.empty_like(by_rank[0])
        cp.reduce_scatter(output, by_rank.flatten(0, 1))
        return output.movedim(0, dim)

    return conjugate(tensor, gather, reduce_scatter)


def sequence_to_heads(packed: Tensor, cp: Group, seq_length: int) -> Tensor:
    """Split the heads instead of the sequence: [s/cp, b, groups, ...] -> [s, b, groups/cp, ...], in true order.

    Rank r of cp gets the r-th of cp equal parts of dimension 2, so that groups of queries with their key and value stay
    together ([s/cp, b, groups, queries + 2, d]).

    Collectives: one all-to-all of equal parts over cp, forward and backward.
    """
    return conjugate(packed, lambda x: _split_heads(x, cp, seq_length), lambda grad: _split_sequence(grad, cp))


def heads_to_sequence(out: Tensor, cp: Group, seq_length: int) -> Tensor:
    """The inverse of `sequence_to_heads`: [s, b, heads/cp, ...] in true order -> [s/cp, b, heads, ...].

    Collectives: one all-to-all of equal parts over cp, forward and backward.
    """
    assert out.shape[0] == seq_length, (out.shape, seq_length)
    return conjugate(out, lambda x: _split_sequence(x, cp), lambda grad: _split_heads(grad, cp, seq_length))


def _split_heads(x: Tensor, cp: Group, seq_length: int) -> Tensor:
    """[s/cp, b, n, ...] -> [s, b, n/cp, ...]."""
    parts = x.unflatten(2, (cp.size, x.shape[2] // cp.size)).movedim(2, 0).contiguous()
    received = torch.empty_like(parts)
    cp.all_to_all_equal(received, parts)
    return to_true_order(received, seq_length)


def _split_sequence(x: Tensor, cp: Group) -> Tensor:
    """[s, b, n/cp, ...] -> [s/cp, b, n, ...]."""
    parts = to_rank_order(x, cp.size)
    received = torch.empty_like(parts)
    cp.all_to_all_equal(received, parts)
    return received.movedim(0, 2).flatten(2, 3)
