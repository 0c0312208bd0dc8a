"""Attention over a split sequence by exchanging heads (Ulysses, arXiv 2309.14509) or by gathering keys and values.

The all-to-all replaces the split of the sequence by a split of the heads, so attention sees the whole sequence or a
larger part of it. `spans`: positions of each rank's rows."""

from functools import lru_cache

import torch
from torch import Tensor

from megalite.topology.group import Group, conjugate
from megalite.topology.layout import Spans


def to_true_order(by_rank: Tensor, spans: tuple[Spans, ...]) -> Tensor:
    """Reorder [n, s/n, ...], the rows of each of n ranks, into [s, ...] by position."""
    output = by_rank.new_empty(by_rank.shape[0] * by_rank.shape[1], *by_rank.shape[2:])
    for own, rows in zip(_packed_spans(spans), by_rank, strict=True):
        for (first, stop), piece in zip(own, rows.split([stop - first for first, stop in own])):
            output[first:stop].copy_(piece)
    return output


def to_rank_order(sequence: Tensor, spans: tuple[Spans, ...]) -> Tensor:
    """Reorder [s, ...] by position into [n, s/n, ...], the rows of each of n ranks."""
    return torch.stack([torch.cat([sequence[first:stop] for first, stop in own]) for own in _packed_spans(spans)])


@lru_cache(maxsize=1024)
def _packed_spans(spans: tuple[Spans, ...]) -> tuple[Spans, ...]:
    """Return each rank's spans as rows of these ranks' concatenated spans, sorted by position."""
    place, row = {}, 0
    for first, stop in sorted(span for own in spans for span in own):
        place[first, stop] = row, row + stop - first
        row += stop - first
    return tuple(tuple(place[span] for span in own) for own in spans)


def gather_sequence(tensor: Tensor, cp: Group, dim: int, spans: tuple[Spans, ...]) -> Tensor:
    """Gather the rows of all ranks, sorted by position: dimension `dim` grows from s/n to s.

    Collectives: forward all-gather, backward reduce-scatter, over cp."""
    if cp.size == 1:
        return tensor
    return conjugate(tensor, lambda x: gathered(x, cp, dim, spans), lambda grad: reduced(grad, cp, dim, spans))


def gathered(x: Tensor, cp: Group, dim: int, spans: tuple[Spans, ...]) -> Tensor:
    """Return the forward of `gather_sequence`."""
    part = x.movedim(dim, 0).contiguous()
    by_rank = part.new_empty(cp.size, *part.shape)
    cp.all_gather(by_rank.flatten(0, 1), part)
    return to_true_order(by_rank, spans).movedim(0, dim)


def reduced(grad: Tensor, cp: Group, dim: int, spans: tuple[Spans, ...]) -> Tensor:
    """Return the backward of `gather_sequence`: this rank's rows of the sum over ranks."""
    by_rank = to_rank_order(grad.movedim(dim, 0), spans)
    output = torch.empty_like(by_rank[0])
    cp.reduce_scatter(output, by_rank.flatten(0, 1))
    return output.movedim(0, dim)


def sequence_to_heads(packed: Tensor, cp: Group, spans: tuple[Spans, ...]) -> Tensor:
    """Split the heads instead of the sequence: [s/n, b, groups, ...] -> [s, b, groups/n, ...], sorted by position.

    Rank r of n gets the r-th of n equal parts of dimension 2, so groups of queries with their key and value
    ([s/n, b, groups, queries + 2, d]) stay together.

    Collectives: one all-to-all of equal parts over cp, forward and backward."""
    return conjugate(packed, lambda x: _split_heads(x, cp, spans), lambda grad: _split_sequence(grad, cp, spans))


def heads_to_sequence(out: Tensor, cp: Group, spans: tuple[Spans, ...]) -> Tensor:
    """Invert `sequence_to_heads`: [s, b, heads/n, ...] sorted by position -> [s/n, b, heads, ...].

    Collectives: one all-to-all of equal parts over cp, forward and backward."""
    return conjugate(out, lambda x: _split_sequence(x, cp, spans), lambda grad: _split_heads(grad, cp, spans))


def _split_heads(x: Tensor, cp: Group, spans: tuple[Spans, ...]) -> Tensor:
    """[s/n, b, heads, ...] -> [s, b, heads/n, ...]."""
    parts = x.unflatten(2, (cp.size, x.shape[2] // cp.size)).movedim(2, 0).contiguous()
    received = torch.empty_like(parts)
    cp.all_to_all_equal(received, parts)
    return to_true_order(received, spans)


def _split_sequence(x: Tensor, cp: Group, spans: tuple[Spans, ...]) -> Tensor:
    """[s, b, heads/n, ...] -> [s/n, b, heads, ...]."""
    parts = to_rank_order(x, spans)
    received = torch.empty_like(parts)
    cp.all_to_all_equal(received, parts)
    return received.movedim(0, 2).flatten(2, 3)
