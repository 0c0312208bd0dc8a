"""Attention over a sequence that is split over ranks: by a ring or a gather of keys and values, or by exchanging heads.

Ring or gather: each rank computes the tiles of its queries with each received block of keys and values and merges them by the
logsumexp of their scores:

    out = Σ_t out_t·exp(lse_t - lse),  lse = log Σ_t exp(lse_t)

which is the softmax over all keys exactly. Source: ring attention (arXiv 2310.01889); merging as in flash attention
(arXiv 2205.14135); gathering: Llama 3 (arXiv 2407.21783, 3.3.2).

Exchanging heads (Ulysses, arXiv 2309.14509): an all-to-all replaces the split of the sequence by a split of the heads, so
attention sees the whole sequence or a larger part of it.

Throughout, `spans` are the positions of each rank's rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalite.context_parallel.tiles import Tile, Visibility, batch_tiles
from megalite.kernels.attention import tile_backward, tile_forward, tile_largest
from megalite.kernels.bases import Function
from megalite.topology.group import DONE, Group, conjugate
from megalite.topology.layout import Spans, joined_spans


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cp: Group,
    spans: tuple[Spans, ...],
    visibility: Visibility,
    softcap: float | None = None,
    sink: Tensor | None = None,
    gathers: bool = False,
) -> Tensor:
    """Return softmax(q·kᵀ/sqrt(d))·v over the visible keys of all n ranks of `cp`, [b, heads, s/n, d].

    The result is a view of memory [s/n, b, heads, d], which the output projection reads without a copy. The backward's
    saved tensors are q, k, v, the result and its logsumexp, but neither scores nor other ranks' keys. The next block of
    keys is transferred during the tiles of the current one; in the backward, dk and dv follow one step later.

    Args:
        q: [b, heads, s/n, d]; k, v: [b, groups, s/n, d], heads a multiple of groups.
        softcap: scores s become softcap·tanh(s/softcap).
        sink: [heads], an extra logit in each query's softmax with a value of 0; the first term of the merge.
        gathers: gather all keys and values at once, and again in the backward, instead of the ring.

    Collectives: forward: n - 1 exchanges of k and v with the neighbours over cp. Backward: n - 1 of k and v, and n - 1
    of their gradients in fp32 (fp64 for fp64). With `gathers`: an all-gather of k and v; backward the same and a
    reduce-scatter of the gradients."""
    assert visibility.document_starts is None or len(visibility.document_starts) == q.shape[0]
    return _RingAttention.apply(q, k, v, sink, _Ring(cp, spans, visibility, softcap, gathers and cp.size > 1))


def largest_logits(q: Tensor, k: Tensor, *, cp: Group, spans: tuple[Spans, ...], visibility: Visibility) -> Tensor:
    """Return the largest q·kᵀ/sqrt(d) of each head over this rank's queries and their visible keys: fp32 or fp64
    [heads].

    Arguments as in `ring_attention`; without gradients. Collectives: an all-gather of k over cp."""
    k = gather_sequence(k, cp=cp, dim=2, spans=spans)
    largest = q.new_full((q.shape[1],), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for samples, tiles in batch_tiles(visibility, spans[cp.rank], ((0, k.shape[2]),)):
        for tile in tiles:
            rows, columns = _indices(samples, tile)
            queries, keys = _stacked(tile.count, q[rows], k[columns])
            torch.maximum(largest, tile_largest(queries, keys, tile.kind), out=largest)
    return largest


@dataclass(frozen=True)
class _Ring:
    """Distribution of the sequence over `cp`, and the tiles of this rank."""

    cp: Group
    spans: tuple[Spans, ...]
    visibility: Visibility
    softcap: float | None
    gathers: bool

    def tiles(self, step: int) -> Iterator[tuple[slice, Tile]]:
        """Yield samples and tiles of this rank's queries with the keys of `step`."""
        keys = joined_spans(self.spans, self.cp.size)[0] if self.gathers else self.spans[self.cp.rank - step]
        for samples, tiles in batch_tiles(self.visibility, self.spans[self.cp.rank], keys):
            yield from ((samples, tile) for tile in tiles)

    def keys_and_values(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (step i, keys and values of rank - i) during the transfer of the next; or all at once, by position."""
        if self.gathers:
            keys, values = gathered(torch.stack((k, v)), self.cp, 3, self.spans)
            yield 0, keys, values
            return
        if self.cp.size == 1:  # skip the copy
            yield 0, k, v
            return
        current = torch.stack((k, v))
        for step in range(self.cp.size - 1):
            following, exchange = self.cp.rotate_async(current)
            yield step, current[0], current[1]
            exchange.wait()
            current = following
        yield self.cp.size - 1, current[0], current[1]


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, ring: _Ring) -> Tensor:
        b, heads, length, d = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((length, b, heads, d), dtype=wide).permute(1, 2, 0, 3)
        logsumexp = q.new_full((b, heads, length), float("-inf"), dtype=wide)
        if sink is not None:  # the sink is a first key with a value of 0
            logsumexp.copy_(sink.view(-1, 1))
        for step, keys, values in ring.keys_and_values(k, v):
            for samples, tile in ring.tiles(step):
                rows, columns = _indices(samples, tile)
                tile_q, tile_k, tile_v = _stacked(tile.count, q[rows], keys[columns], values[columns])
                result = tile_forward(tile_q, tile_k, tile_v, tile.kind, ring.softcap)
                _merge(out[rows], logsumexp[rows], *(_unstacked(each, tile.count) for each in result))
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, logsumexp, sink)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp, sink = ctx.saved_tensors
        ring: _Ring = ctx.ring
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.zeros_like(q, dtype=wide)
        arriving, exchange = None, DONE
        for step, keys, values in ring.keys_and_values(k, v):
            grad_kv = k.new_zeros((2, *keys.shape), dtype=wide)
            for samples, tile in ring.tiles(step):
                rows, columns = _indices(samples, tile)
                whole = grad_out[rows], q[rows], keys[columns], values[columns], out[rows], logsumexp[rows]
                grad, tile_q, tile_k, tile_v, tile_out, lse = _stacked(tile.count, *whole)
                grads = tile_backward(grad, tile_q, tile_k, tile_v, tile_out, lse, tile.kind, ring.softcap)
                dq, dk, dv = (_unstacked(each, tile.count) for each in grads)
                grad_q[rows] += dq
                grad_kv[0][columns] += dk
                grad_kv[1][columns] += dv
            if ring.gathers:
                own = reduced(grad_kv, ring.cp, 3, ring.spans)
            elif step == 0:
                own = grad_kv  # this rank's own block; the other ranks' sum is added last
            else:
                # The gradient sum of a block follows the block one step later, so its transfer overlaps the next tiles.
                if arriving is not None:
                    exchange.wait()
                    grad_kv += arriving
                arriving, exchange = ring.cp.rotate_async(grad_kv)
        if arriving is not None:
            exchange.wait()
            own += arriving
        grad_sink = None
        if sink is not None:  # P·(0 - D), because the sink's value is 0
            probability = (sink.to(wide).view(-1, 1) - logsumexp).exp_()
            grad_sink = -(probability * (grad_out.to(wide) * out).sum(dim=-1)).sum(dim=(0, 2)).to(sink.dtype)
        return grad_q.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), grad_sink, None


Index = tuple[slice, slice, slice]


def _indices(samples: slice, tile: Tile) -> tuple[Index, Index]:
    """Return the indices of rows and columns of all squares of a tile, in [b, heads, s, ...]."""
    extra = (tile.count - 1) * (tile.q[1] - tile.q[0])
    return (
        (samples, slice(None), slice(tile.q[0], tile.q[1] + extra)),
        (samples, slice(None), slice(tile.k[0], tile.k[1] + extra)),
    )


def _stacked(count: int, *tensors: Tensor) -> Sequence[Tensor]:
    """Reshape each [b, heads, count·n, ...] -> [b·count, heads, n, ...]: squares of a tile are samples to a kernel."""
    return tensors if count == 1 else [x.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1) for x in tensors]


def _unstacked(x: Tensor, count: int) -> Tensor:
    """Invert `_stacked`."""
    return x if count == 1 else x.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)


def _merge(out: Tensor, logsumexp: Tensor, tile_out: Tensor, tile_logsumexp: Tensor) -> None:
    """Merge a tile's result into `out` and `logsumexp`, in place."""
    both = torch.logaddexp(logsumexp, tile_logsumexp)
    out.mul_((logsumexp - both).exp_().unsqueeze(-1))
    out.addcmul_(tile_out, (tile_logsumexp - both).exp_().unsqueeze(-1))
    logsumexp.copy_(both)


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
