"""Attention over a split sequence by exchanging heads (Ulysses, arXiv 2309.14509) or by gathering keys and values.

The all-to-all trades the split of the sequence for a split of the heads, so that attention is that of one rank, or of
fewer. `held` says of each rank of the group which positions it holds.
"""

from functools import lru_cache

import torch
from torch import Tensor

from megalite.topology.group import Group, conjugate
from megalite.topology.layout import Spans


def to_true_order(by_rank: Tensor, held: tuple[Spans, ...]) -> Tensor:
    """[n, s/n, ...] with the rows that each of n ranks holds -> [s, ...] in true order."""
    output = by_rank.new_empty(by_rank.shape[0] * by_rank.shape[1], *by_rank.shape[2:])
    for places, rows in zip(_places(held), by_rank, strict=True):
        for (first, stop), piece in zip(places, rows.split([stop - first for first, stop in places])):
            output[first:stop].copy_(piece)
    return output


def to_rank_order(sequence: Tensor, held: tuple[Spans, ...]) -> Tensor:
    """[s, ...] in true order -> [n, s/n, ...] with the rows that each of n ranks holds."""
    return torch.stack([torch.cat([sequence[first:stop] for first, stop in places]) for places in _places(held)])


@lru_cache(maxsize=1024)
def _places(held: tuple[Spans, ...]) -> tuple[Spans, ...]:
    """Which rows the spans of each rank are, where those of all these ranks stand in true order."""
    place, row = {}, 0
    for first, stop in sorted(span for spans in held for span in spans):
        place[first, stop] = row, row + stop - first
        row += stop - first
    return tuple(tuple(place[span] for span in spans) for spans in held)


def gather_sequence(tensor: Tensor, cp: Group, dim: int, held: tuple[Spans, ...]) -> Tensor:
    """The rows of all ranks in true order: dimension `dim` grows from s/n to s.

    Collectives: forward all-gather, backward reduce-scatter, over cp.
    """
    if cp.size == 1:
        return tensor
    return conjugate(tensor, lambda x: gathered(x, cp, dim, held), lambda grad: reduced(grad, cp, dim, held))


def gathered(x: Tensor, cp: Group, dim: int, held: tuple[Spans, ...]) -> Tensor:
    """The forward of `gather_sequence`."""
    part = x.movedim(dim, 0).contiguous()
    by_rank = part.new_empty(cp.size, *part.shape)
    cp.all_gather(by_rank.flatten(0, 1), part)
    return to_true_order(by_rank, held).movedim(0, dim)


def reduced(grad: Tensor, cp: Group, dim: int, held: tuple[Spans, ...]) -> Tensor:
    """The backward of `gather_sequence`: this rank's rows of the sum over ranks."""
    by_rank = to_rank_order(grad.movedim(dim, 0), held)
    output = torch.empty_like(by_rank[0])
    cp.reduce_scatter(output, by_rank.flatten(0, 1))
    return output.movedim(0, dim)


def sequence_to_heads(packed: Tensor, cp: Group, held: tuple[Spans, ...]) -> Tensor:
    """Split the heads instead of the sequence: [s/n, b, groups, ...] -> [s, b, groups/n, ...], in true order.

    Rank r of n gets the r-th of n equal parts of dimension 2, so that groups of queries with their key and value stay
    together ([s/n, b, groups, queries + 2, d]).

    Collectives: one all-to-all of equal parts over cp, forward and backward.
    """
    return conjugate(packed, lambda x: _split_heads(x, cp, held), lambda grad: _split_sequence(grad, cp, held))


def heads_to_sequence(out: Tensor, cp: Group, held: tuple[Spans, ...]) -> Tensor:
    """The inverse of `sequence_to_heads`: [s, b, heads/n, ...] in true order -> [s/n, b, heads, ...].

    Collectives: one all-to-all of equal parts over cp, forward and backward.
    """
    return conjugate(out, lambda x: _split_sequence(x, cp, held), lambda grad: _split_heads(grad, cp, held))


def _split_heads(x: Tensor, cp: Group, held: tuple[Spans, ...]) -> Tensor:
    """[s/n, b, heads, ...] -> [s, b, heads/n, ...]."""
    parts = x.unflatten(2, (cp.size, x.shape[2] // cp.size)).movedim(2, 0).contiguous()
    received = torch.empty_like(parts)
    cp.all_to_all_equal(received, parts)
    return to_true_order(received, held)


def _split_sequence(x: Tensor, cp: Group, held: tuple[Spans, ...]) -> Tensor:
    """[s, b, heads/n, ...] -> [s/n, b, heads, ...]."""
    parts = to_rank_order(x, held)
    received = torch.empty_like(parts)
    cp.all_to_all_equal(received, parts)
    return received.movedim(0, 2).flatten(2, 3)
