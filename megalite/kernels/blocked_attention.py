"""Causal attention in bf16 on a CPU, some queries at a time, in oneDNN's products.

torch's fused kernel multiplies bf16 at the rate of fp32 on processors without AMX. Here scores come from fp32 products, so
that they are not rounded, and the others are bf16 products; what lies right of the diagonal is left out block by block. As
in flash attention nothing but the inputs is kept, and the backward computes the probabilities again (arXiv 2205.14135).
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from megalite.kernels.attention import causal_attention

SCORES = 1 << 20
"""Elements of the scores that are there at once, for as many heads as fit: some MB, which caches hold."""


def _queries(seq: int) -> int:
    """Of a block: small ones leave out more, and large ones read the keys less often."""
    return 128 if seq <= 1024 else 256


def why_not_blocked(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why it cannot serve, or None."""
    if device.type != "cpu":
        return f"there is none on {device.type}"
    if dtype != torch.bfloat16:
        return f"it takes bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return "this torch or this processor has no bf16 products of oneDNN's"
    return None


class _Blocked(torch.autograd.Function):
    """Of [n, s, d]: n heads, of all samples."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for heads, rows, keys, p in _probabilities(q, k):
            out[heads, rows] = torch.bmm(p.to(q.dtype), v[heads, keys])
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = ctx.saved_tensors
        half, scale = q.dtype, 1.0 / math.sqrt(q.shape[2])
        grad_out = grad_out.contiguous()
        grad_q = torch.empty(q.shape, dtype=half)
        # Blocks of queries add up in fp32.
        grad_k, grad_v = (torch.zeros(k.shape, dtype=torch.float32) for _ in range(2))
        for heads, rows, keys, p in _probabilities(q, k):
            grad = grad_out[heads, rows]
            grad_p = torch.bmm(grad, v[heads, keys].mT).float()
            grad_s = torch._softmax_backward_data(grad_p, p, -1, p.dtype).mul_(scale).to(half)
            grad_q[heads, rows] = torch.bmm(grad_s, k[heads, keys])
            grad_k[heads, keys] += torch.bmm(grad_s.mT, q[heads, rows])
            grad_v[heads, keys] += torch.bmm(p.to(half).mT, grad)
        return grad_q, grad_k.to(half), grad_v.to(half)


def _probabilities(q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[slice, slice, slice, torch.Tensor]]:
    """(heads, queries, the keys that they see, their probabilities [heads, queries, keys] in fp32) of each block."""
    count, seq, size = q.shape
    queries = _queries(seq)
    together = max(1, SCORES // (queries * seq))
    hidden = torch.full((queries, queries), -math.inf).triu_(1)
    for head in range(0, count, together):
        heads = slice(head, head + together)
        scaled, exact = q[heads].float().mul_(1.0 / math.sqrt(size)), k[heads].float()
        for start in range(0, seq, queries):
            stop = min(seq, start + queries)
            scores = torch.bmm(scaled[:, start:stop], exact[:, :stop].mT)
            scores[:, :, start:].add_(hidden[: stop - start, : stop - start])
            yield heads, slice(start, stop), slice(0, stop), scores.softmax(dim=-1)


def blocked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, grouped: bool = False
) -> torch.Tensor:
    """`causal_attention` of bf16 tensors on a CPU; without a mask it is that.

    Args:
        q: [b, heads, s, d].
        k, v: [b, groups, s, d] with heads a multiple of groups.
        grouped: as of other kernels; without meaning here.

    Collectives: none.
    """
    if not causal:
        return causal_attention(q, k, v, causal=False)
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    b, heads, seq, size = q.shape
    return _Blocked.apply(*(each.reshape(b * heads, seq, size) for each in (q, k, v))).view(
        b, heads, seq, size
    )
