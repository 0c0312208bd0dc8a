"""Attention over a sequence that is split among ranks, and over tiles: no rank ever holds all keys.

Keys and values go round the ring of ranks. With every block that comes by, a rank computes the tiles of its queries
against it and merges them by the logsumexp of their scores:

    out = Σ_t out_t·exp(lse_t - lse),  lse = log Σ_t exp(lse_t)

which is the softmax over all keys exactly. Source: ring attention (arXiv 2310.01889); merging as in flash attention
(arXiv 2205.14135).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.context_parallel.tiles import Tile, Visibility, batch_tiles
from megalite.context_parallel.ulysses import gather_sequence
from megalite.kernels.attention import tile_backward, tile_forward, tile_largest
from megalite.topology.group import DONE, Group
from megalite.topology.layout import sequence_spans


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, cp: Group, seq_length: int, visibility: Visibility, softcap: float | None = None
) -> Tensor:
    """softmax(q·kᵀ/sqrt(d))·v over the keys of all cp ranks that each query may see, [b, heads, s/cp, d].

    The result is a view of memory [s/cp, b, heads, d], so that the output projection reads it in place. Kept for the
    backward: q, k, v, the result and its logsumexp; never scores, nor other ranks' keys. The next block of keys is under
    way while the tiles of the present one are computed, and in the backward the sums of dk and dv follow one step behind.

    Args:
        q: [b, heads, s/cp, d], the rows of `sequence_spans`; k, v: [b, groups, s/cp, d], heads a multiple of groups.
        softcap: scores s become softcap·tanh(s/softcap).

    Collectives: forward: cp - 1 exchanges of k and v with the neighbours over cp. Backward: cp - 1 of k and v, and
    cp - 1 of their gradients in fp32 (fp64 for fp64).
    """
    assert visibility.document_starts is None or len(visibility.document_starts) == q.shape[0]
    return _RingAttention.apply(q, k, v, _Ring(cp, seq_length, visibility, softcap))


def largest_logits(q: Tensor, k: Tensor, *, cp: Group, seq_length: int, visibility: Visibility) -> Tensor:
    """The largest q·kᵀ/sqrt(d) of each head among the pairs of this rank's queries and the keys that they see: fp32 or fp64
    [heads]. Arguments as of `ring_attention`, without gradients.

    Collectives: an all-gather of k over cp.
    """
    k = gather_sequence(k, cp=cp, dim=2, seq_length=seq_length)
    largest = q.new_full((q.shape[1],), -torch.inf, dtype=_wide(q.dtype))
    spans = sequence_spans(seq_length, cp_rank=cp.rank, cp_size=cp.size)
    for samples, tiles in batch_tiles(visibility, spans, ((0, seq_length),)):
        for tile in tiles:
            rows, columns = (samples, slice(None), slice(*tile.q)), (samples, slice(None), slice(*tile.k))
            torch.maximum(largest, tile_largest(q[rows], k[columns], tile.kind), out=largest)
    return largest


@dataclass(frozen=True)
class _Ring:
    """Who holds what, and which of it this rank computes."""

    cp: Group
    seq_length: int
    visibility: Visibility
    softcap: float | None

    def tiles(self, step: int) -> Iterator[tuple[slice, Tile]]:
        """Samples and tiles of this rank's queries against the keys that it has at `step`."""
        rank, size = self.cp.rank, self.cp.size
        spans = [sequence_spans(self.seq_length, cp_rank=r % size, cp_size=size) for r in (rank, rank - step)]
        for samples, tiles in batch_tiles(self.visibility, *spans):
            yield from ((samples, tile) for tile in tiles)

    def keys_and_values(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """At step i the keys and values of the rank i places back; the next ones are under way meanwhile."""
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


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        b, heads, length, d = q.shape
        wide = _wide(q.dtype)
        out = q.new_zeros((length, b, heads, d), dtype=wide).permute(1, 2, 0, 3)
        logsumexp = q.new_full((b, heads, length), float("-inf"), dtype=wide)
        for step, keys, values in ring.keys_and_values(k, v):
            for samples, tile in ring.tiles(step):
                rows, columns = (samples, slice(None), slice(*tile.q)), (samples, slice(None), slice(*tile.k))
                inputs = q[rows], keys[columns], values[columns]
                _merge(out[rows], logsumexp[rows], *tile_forward(*inputs, tile.kind, ring.softcap))
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        ring: _Ring = ctx.ring
        wide = _wide(q.dtype)
        grad_q = torch.zeros_like(q, dtype=wide)
        arriving, exchange = None, DONE
        for step, keys, values in ring.keys_and_values(k, v):
            grad_kv = k.new_zeros((2, *k.shape), dtype=wide)
            for samples, tile in ring.tiles(step):
                rows, columns = (samples, slice(None), slice(*tile.q)), (samples, slice(None), slice(*tile.k))
                inputs = grad_out[rows], q[rows], keys[columns], values[columns], out[rows], logsumexp[rows]
                dq, dk, dv = tile_backward(*inputs, tile.kind, ring.softcap)
                grad_q[rows] += dq
                grad_kv[0][columns] += dk
                grad_kv[1][columns] += dv
            if step == 0:
                own = grad_kv  # stays at home; what the other ranks add comes last
                continue
            if arriving is not None:
                exchange.wait()
                grad_kv += arriving
            arriving, exchange = ring.cp.rotate_async(grad_kv)
        if arriving is not None:
            exchange.wait()
            own += arriving
        return grad_q.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What partial results add up in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _merge(out: Tensor, logsumexp: Tensor, tile_out: Tensor, tile_logsumexp: Tensor) -> None:
    """In place: `out` and `logsumexp` of some keys become those of these and the tile's keys."""
    both = torch.logaddexp(logsumexp, tile_logsumexp)
    out.mul_((logsumexp - both).exp_().unsqueeze(-1))
    out.addcmul_(tile_out, (tile_logsumexp - both).exp_().unsqueeze(-1))
    logsumexp.copy_(both)
