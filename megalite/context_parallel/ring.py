"""Attention over a sequence that is split among ranks, and over tiles: no rank ever holds all keys.

Keys and values go round the ring of ranks, or all of them are gathered at once. With every block that comes by, a rank
computes the tiles of its queries against it and merges them by the logsumexp of their scores:

    out = Σ_t out_t·exp(lse_t - lse),  lse = log Σ_t exp(lse_t)

which is the softmax over all keys exactly. Source: ring attention (arXiv 2310.01889); merging as in flash attention
(arXiv 2205.14135). Gathering: Llama 3 (arXiv 2407.21783, 3.3.2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.context_parallel.tiles import Tile, Visibility, batch_tiles
from megalite.context_parallel.ulysses import gather_sequence, gathered, reduced
from megalite.kernels.attention import tile_backward, tile_forward, tile_largest
from megalite.kernels.bases import Function
from megalite.topology.group import DONE, Group
from megalite.topology.layout import Spans, joined_spans


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cp: Group,
    held: tuple[Spans, ...],
    visibility: Visibility,
    softcap: float | None = None,
    sink: Tensor | None = None,
    gathers: bool = False,
) -> Tensor:
    """softmax(q·kᵀ/sqrt(d))·v over the keys of all n ranks of `cp` that each query may see, [b, heads, s/n, d].

    The result is a view of memory [s/n, b, heads, d], so that the output projection reads it in place. Kept for the
    backward: q, k, v, the result and its logsumexp; never scores, nor other ranks' keys. The next block of keys is under
    way while the tiles of the present one are computed, and in the backward the sums of dk and dv follow one step behind.

    Args:
        q: [b, heads, s/n, d]; k, v: [b, groups, s/n, d], heads a multiple of groups.
        held: of each rank the true positions of its rows.
        softcap: scores s become softcap·tanh(s/softcap).
        sink: [heads], a logit beside the scores of each query, with a value of 0. Merging starts with it.
        gathers: every rank gets all keys and values at once, and again in the backward.

    Collectives: forward: n - 1 exchanges of k and v with the neighbours over cp. Backward: n - 1 of k and v, and n - 1 of
    their gradients in fp32 (fp64 for fp64). Where it gathers, an all-gather of k and v; backward the same and a
    reduce-scatter of the gradients.
    """
    assert visibility.document_starts is None or len(visibility.document_starts) == q.shape[0]
    return _RingAttention.apply(q, k, v, sink, _Ring(cp, held, visibility, softcap, gathers and cp.size > 1))


def largest_logits(q: Tensor, k: Tensor, *, cp: Group, held: tuple[Spans, ...], visibility: Visibility) -> Tensor:
    """The largest q·kᵀ/sqrt(d) of each head among the pairs of this rank's queries and the keys that they see: fp32 or fp64
    [heads]. Arguments as of `ring_attention`, without gradients.

    Collectives: an all-gather of k over cp.
    """
    k = gather_sequence(k, cp=cp, dim=2, held=held)
    largest = q.new_full((q.shape[1],), -torch.inf, dtype=_wide(q.dtype))
    for samples, tiles in batch_tiles(visibility, held[cp.rank], ((0, k.shape[2]),)):
        for tile in tiles:
            rows, columns = _places(samples, tile)
            queries, seen = _stacked(tile.count, q[rows], k[columns])
            torch.maximum(largest, tile_largest(queries, seen, tile.kind), out=largest)
    return largest


@dataclass(frozen=True)
class _Ring:
    """Who holds what, and which of it this rank computes."""

    cp: Group
    held: tuple[Spans, ...]
    visibility: Visibility
    softcap: float | None
    gathers: bool

    def tiles(self, step: int) -> Iterator[tuple[slice, Tile]]:
        """Samples and tiles of this rank's queries against the keys that it has at `step`."""
        keys = joined_spans(self.held, self.cp.size)[0] if self.gathers else self.held[self.cp.rank - step]
        for samples, tiles in batch_tiles(self.visibility, self.held[self.cp.rank], keys):
            yield from ((samples, tile) for tile in tiles)

    def keys_and_values(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """At step i the keys and values of the rank i places back, the next ones under way meanwhile; or at once all, in
        true order."""
        if self.gathers:
            keys, values = gathered(torch.stack((k, v)), self.cp, 3, self.held)
            yield 0, keys, values
            return
        if self.cp.size == 1:  # nothing to send: no copy
            yield 0, k, v
            return
        present = torch.stack((k, v))
        for step in range(self.cp.size - 1):
            following, exchange = self.cp.rotate_async(present)
            yield step, present[0], present[1]
            exchange.wait()
            present = following
        yield self.cp.size - 1, present[0], present[1]


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, ring: _Ring) -> Tensor:
        b, heads, length, d = q.shape
        wide = _wide(q.dtype)
        out = q.new_zeros((length, b, heads, d), dtype=wide).permute(1, 2, 0, 3)
        logsumexp = q.new_full((b, heads, length), float("-inf"), dtype=wide)
        if sink is not None:  # one more key, with a value of 0: merging begins with it
            logsumexp.copy_(sink.view(-1, 1))
        for step, keys, values in ring.keys_and_values(k, v):
            for samples, tile in ring.tiles(step):
                rows, columns = _places(samples, tile)
                queries, seen, mixed = _stacked(tile.count, q[rows], keys[columns], values[columns])
                found = tile_forward(queries, seen, mixed, tile.kind, ring.softcap)
                _merge(out[rows], logsumexp[rows], *(_in_a_row(each, tile.count) for each in found))
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, logsumexp, sink)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp, sink = ctx.saved_tensors
        ring: _Ring = ctx.ring
        wide = _wide(q.dtype)
        grad_q = torch.zeros_like(q, dtype=wide)
        arriving, exchange = None, DONE
        for step, keys, values in ring.keys_and_values(k, v):
            grad_kv = k.new_zeros((2, *keys.shape), dtype=wide)
            for samples, tile in ring.tiles(step):
                rows, columns = _places(samples, tile)
                whole = grad_out[rows], q[rows], keys[columns], values[columns], out[rows], logsumexp[rows]
                grad, queries, seen, mixed, result, lse = _stacked(tile.count, *whole)
                found = tile_backward(grad, queries, seen, mixed, result, lse, tile.kind, ring.softcap)
                dq, dk, dv = (_in_a_row(each, tile.count) for each in found)
                grad_q[rows] += dq
                grad_kv[0][columns] += dk
                grad_kv[1][columns] += dv
            if ring.gathers:
                own = reduced(grad_kv, ring.cp, 3, ring.held)
            elif step == 0:
                own = grad_kv  # stays at home; what the other ranks add comes last
            else:
                # The sum for a block follows it one step behind, so that it travels under the next tiles.
                if arriving is not None:
                    exchange.wait()
                    grad_kv += arriving
                arriving, exchange = ring.cp.rotate_async(grad_kv)
        if arriving is not None:
            exchange.wait()
            own += arriving
        grad_sink = None
        if sink is not None:  # P·(0 - D), as its value is 0
            probability = (sink.to(wide).view(-1, 1) - logsumexp).exp_()
            grad_sink = -(probability * (grad_out.to(wide) * out).sum(dim=-1)).sum(dim=(0, 2)).to(sink.dtype)
        return grad_q.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), grad_sink, None


Index = tuple[slice, slice, slice]


def _places(samples: slice, tile: Tile) -> tuple[Index, Index]:
    """Rows and columns of all squares of a tile, in [b, heads, s, ...]."""
    further = (tile.count - 1) * (tile.q[1] - tile.q[0])
    return (
        (samples, slice(None), slice(tile.q[0], tile.q[1] + further)),
        (samples, slice(None), slice(tile.k[0], tile.k[1] + further)),
    )


def _stacked(count: int, *whole: Tensor) -> Sequence[Tensor]:
    """Each [b, heads, count·n, ...] -> [b·count, heads, n, ...]: squares of a tile are to a kernel as samples."""
    return whole if count == 1 else [x.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1) for x in whole]


def _in_a_row(x: Tensor, count: int) -> Tensor:
    """The inverse of `_stacked`."""
    return x if count == 1 else x.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What partial results add up in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _merge(out: Tensor, logsumexp: Tensor, tile_out: Tensor, tile_logsumexp: Tensor) -> None:
    """In place: `out` and `logsumexp` of some keys become those of these and the tile's keys."""
    both = torch.logaddexp(logsumexp, tile_logsumexp)
    out.mul_((logsumexp - both).exp_().unsqueeze(-1))
    out.addcmul_(tile_out, (tile_logsumexp - both).exp_().unsqueeze(-1))
    logsumexp.copy_(both)
