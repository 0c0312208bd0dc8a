"""Attention with a dense mask by autograd, and inputs that every rank of a test can generate."""

import math

import torch
from torch import Tensor

from megalite.topology.layout import Spans, sequence_spans

Starts = tuple[tuple[int, ...], ...] | None


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    starts: Starts,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return attention [b, heads, s, d] over whole sequences; visibility is decided per pair of tokens, sinks [heads] are always
    visible."""
    b, heads, s, d = q.shape
    visible = torch.zeros(b, 1, s, s, dtype=torch.bool)
    for sample in range(b):
        first = 0
        for p in range(s):
            if starts is not None and p in starts[sample]:
                first = p
            for c in range(first, p + 1):
                visible[sample, 0, p, c] = window is None or p - c < window
    k, v = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (k, v))
    scores = q @ k.mT / math.sqrt(d)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, -math.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.view(1, -1, 1, 1).expand(b, -1, s, 1)), dim=-1)
    return scores.softmax(-1)[..., :s] @ v


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rows_of(tensor: Tensor, rank: int, cp: int, dim: int) -> Tensor:
    spans = zigzag(tensor.shape[dim], cp)[rank]
    return torch.cat([tensor.narrow(dim, first, stop - first) for first, stop in spans], dim=dim)


def zigzag(s: int, cp: int) -> tuple[Spans, ...]:
    return tuple(sequence_spans(s, cp_rank=rank, cp_size=cp) for rank in range(cp))
