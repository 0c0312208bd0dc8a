"""Attention: fused through torch's scaled_dot_product_attention, in tiles that also return the logsumexp, and unfused.

A tile is a piece of the (query, key) plane that needs no mask. Because its forward returns the logsumexp of its scores,
tiles computed at different times, or with keys of other ranks, merge into the exact softmax. Unfused attention keeps its
probabilities in memory, for dropout on them."""

import math
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.bases import Function


class TileKind(Enum):
    """Shape of the visible part of a tile; rows are queries, columns are keys."""

    FULL = "full"  # every pair of a rectangle
    CAUSAL = "causal"  # row i of a square sees the columns j <= i
    EDGE = "edge"  # row i of a square sees the columns j >= i: CAUSAL with rows and columns both reversed


HALF_TYPES = (torch.bfloat16, torch.float16)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    """Return softmax(q·kᵀ/sqrt(d))·v for q [b, heads, s_q, d] and k, v [b, groups, s_k, d], heads a multiple of groups.

    A causal mask requires s_k = s_q. Without `causal` every key is visible (one query after a cache)."""
    repeats = q.shape[1] // k.shape[1]
    if repeats == 1 or (q.is_cuda and q.dtype in HALF_TYPES):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=repeats > 1)
    # Neither the CPU's fused kernel nor CUDA's fp32 kernel supports grouped keys.
    k, v = repeat_kv_heads(k, q.shape[1]), repeat_kv_heads(v, q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, *, visible: Tensor | None, softcap: float | None = None, sink: Tensor | None = None
) -> Tensor:
    """Return softmax(q·kᵀ/sqrt(d))·v for one query per sequence [b, heads, 1, d] and cached keys [b, groups, n, d].

    Values may have a different width from keys. The query heads that share a key/value head are the rows of one matrix
    product, so the cache is read once and never repeated.

    Args:
        visible: boolean [b, 1, 1, n], the keys that each sequence attends to; None: all keys.
        softcap: scores s become softcap·tanh(s/softcap).
        sink: [heads], an extra logit in each head's softmax, with a value of 0."""
    b, heads, _, d = q.shape
    queries = q.reshape(b, k.shape[1], heads // k.shape[1], d)
    if softcap is not None or sink is not None:
        scores = _scores(queries, k, False, softcap)
        if visible is not None:
            scores = scores.masked_fill(visible.logical_not(), -math.inf)
        if sink is not None:
            sinks = sink.to(scores.dtype).view(1, k.shape[1], -1, 1).expand(b, -1, -1, -1)
            scores = torch.cat((scores, sinks), dim=-1)
        return (scores.softmax(dim=-1)[..., : k.shape[2]].to(v.dtype) @ v).reshape(b, heads, 1, -1)
    return F.scaled_dot_product_attention(queries, k, v, attn_mask=visible).reshape(b, heads, 1, -1)


def tile_forward(
    q: Tensor, k: Tensor, v: Tensor, kind: TileKind, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return softmax(S)·v and log Σ exp S over the visible keys of one tile, S = q·kᵀ/sqrt(d); outside autograd.

    With a `softcap` c, S = c·tanh(q·kᵀ/(c·sqrt(d))). No fused kernel supports that: scores are computed for
    `SOFTCAPPED_ROWS` queries at a time.

    Args:
        q: [b, heads, s_q, d].
        k, v: [b, groups, s_k, d] with heads a multiple of groups; s_k = s_q unless `kind` is FULL.

    Returns:
        [b, heads, s_q, d] in q's dtype; [b, heads, s_q] in fp32, or fp64 for fp64."""
    if kind is TileKind.EDGE:
        out, logsumexp = tile_forward(q.flip(2), k.flip(2), v.flip(2), TileKind.CAUSAL, softcap)
        return out.flip(2), logsumexp.flip(2)
    causal = kind is TileKind.CAUSAL
    q, k, v = readable(q), readable(k), readable(v)
    if softcap is not None:
        k, v = repeat_kv_heads(k, q.shape[1]), repeat_kv_heads(v, q.shape[1])
        done = [
            _softcapped(q[:, :, rows], k[:, :, :n], v[:, :, :n], causal, softcap) for rows, n in _rows(q, k, causal)
        ]
        return torch.cat([out for out, _ in done], dim=2), torch.cat([logsumexp for _, logsumexp in done], dim=2)
    if _fused_on_cuda(q):
        return _cuda_flash_forward(q, k, v, causal)
    k, v = repeat_kv_heads(k, q.shape[1]), repeat_kv_heads(v, q.shape[1])
    if _fused_on_cpu(q):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return _softcapped(q, k, v, causal, None)


def tile_largest(q: Tensor, k: Tensor, kind: TileKind) -> Tensor:
    """Return the largest score of each head in one tile, fp32 or fp64 [heads]; arguments as in `tile_forward`."""
    if kind is TileKind.EDGE:
        return tile_largest(q.flip(2), k.flip(2), TileKind.CAUSAL)
    causal, k = kind is TileKind.CAUSAL, repeat_kv_heads(k, q.shape[1])
    parts = [_scores(q[:, :, rows], k[:, :, :n], causal, None).amax(dim=(0, 2, 3)) for rows, n in _rows(q, k, causal)]
    return torch.stack(parts).amax(dim=0)


SOFTCAPPED_ROWS = 512
"""Number of queries per block; the scores of one block exist at a time."""


def _rows(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, int]]:
    """Yield blocks of queries, each with the number of keys up to the last visible one."""
    for first in range(0, q.shape[2], SOFTCAPPED_ROWS):
        stop = min(first + SOFTCAPPED_ROWS, q.shape[2])
        yield slice(first, stop), stop if causal else k.shape[2]


def _softcapped(q: Tensor, k: Tensor, v: Tensor, causal: bool, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Compute `tile_forward` with plain matrix products; with `causal`, q are the last rows of a square."""
    scores = _scores(q, k, causal, softcap)
    return (scores.softmax(dim=-1) @ v.to(scores.dtype)).to(q.dtype), scores.logsumexp(dim=-1)


def tile_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    kind: TileKind,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one tile's part of the gradients of q [b, heads, s_q, d], k and v [b, groups, s_k, d], in q's dtype.

    With P = exp(S - logsumexp) and D = rowsum(grad_out·out), both of the softmax over all tiles,
    dS = P·(grad_out·vᵀ - D), so the sum over tiles is the gradient. A `softcap` c multiplies dS by 1 - (S/c)².

    Args:
        grad_out, out: [b, heads, s_q, d], for all tiles merged, like `logsumexp` [b, heads, s_q].
        q, k, v, kind, softcap: as in `tile_forward`."""
    if kind is TileKind.EDGE:
        grad_out, q, k, v, out, logsumexp = (t.flip(2) for t in (grad_out, q, k, v, out, logsumexp))
        dq, dk, dv = tile_backward(grad_out, q, k, v, out, logsumexp, TileKind.CAUSAL, softcap)
        return dq.flip(2), dk.flip(2), dv.flip(2)
    causal = kind is TileKind.CAUSAL
    grad_out, q, k, v, out = (readable(tensor) for tensor in (grad_out, q, k, v, out))
    logsumexp = logsumexp.contiguous()
    if softcap is None and _fused_on_cuda(q):
        return _cuda_flash_backward(grad_out, q, k, v, out, logsumexp, causal)
    groups = k.shape[1]
    k, v = repeat_kv_heads(k, q.shape[1]), repeat_kv_heads(v, q.shape[1])
    if softcap is not None:
        dq, dk, dv = torch.empty_like(q), *(torch.zeros_like(each, dtype=logsumexp.dtype) for each in (k, v))
        for rows, n in _rows(q, k, causal):
            part = grad_out[:, :, rows], q[:, :, rows], out[:, :, rows], logsumexp[:, :, rows]
            dq[:, :, rows], dk_part, dv_part = _backward(*part, k[:, :, :n], v[:, :, :n], causal, softcap)
            dk[:, :, :n] += dk_part
            dv[:, :, :n] += dv_part
        return dq, _for_each_group(dk, groups).to(k.dtype), _for_each_group(dv, groups).to(v.dtype)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    if _fused_on_cpu(q):
        dq, dk, dv = fused(grad_out, q, k, v, out, logsumexp, dropout_p=0.0, is_causal=causal)
    else:
        dq, dk, dv = _backward(grad_out, q, out, logsumexp, k, v, causal, None)
    return dq, _for_each_group(dk, groups), _for_each_group(dv, groups)


def _fused_on_cuda(q: Tensor) -> bool:
    return q.device.type != "cpu" and q.dtype in HALF_TYPES and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _fused_on_cpu(q: Tensor) -> bool:
    return q.is_cpu


def _cuda_flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Run the flash kernel, which supports grouped keys."""
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, logsumexp


def _cuda_flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the flash backward. Without dropout it ignores the seed; dense sequences need no cumulative lengths."""
    seed = q.new_empty(2, dtype=torch.uint64)
    saved = (grad_out, q, k, v, out, logsumexp, None, None, q.shape[2], k.shape[2])
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(*saved, 0.0, causal, seed, seed.new_empty(()))


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor with a last stride of 1, which the fused kernels require; other strides may be anything."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def repeat_kv_heads(tensor: Tensor, heads: int) -> Tensor:
    """Repeat keys or values [b, groups, s, d] -> [b, heads, s, d]."""
    repeats = heads // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def _for_each_group(grad: Tensor, groups: int) -> Tensor:
    """Sum gradients over each group (the adjoint of `repeat_kv_heads`): [b, heads, s, d] -> [b, groups, s, d]."""
    return grad if grad.shape[1] == groups else grad.unflatten(1, (groups, -1)).sum(dim=2)


def _scores(q: Tensor, k: Tensor, causal: bool, softcap: float | None) -> Tensor:
    """Return capped q·kᵀ/sqrt(d) in fp32 or fp64, -inf if masked; with `causal`, q are the last rows of a square."""
    if q.dtype in HALF_TYPES:
        q, k = q.float(), k.float()
    scores = (q @ k.mT) / math.sqrt(q.shape[-1])
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _backward(
    grad_out: Tensor,
    q: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `tile_backward` with plain matrix products; with `causal`, q are the last rows of a square."""
    dtype = q.dtype
    scores = _scores(q, k, causal, softcap)
    probabilities = (scores - logsumexp.unsqueeze(-1)).exp()
    grad_out, q, k, v, out = (tensor.to(probabilities.dtype) for tensor in (grad_out, q, k, v, out))
    inner = (grad_out * out).sum(dim=-1, keepdim=True)
    grad_scores = probabilities * (grad_out @ v.mT - inner) / math.sqrt(q.shape[-1])
    if softcap is not None:  # the clamp replaces the -inf of masked scores, which have probability 0
        grad_scores *= 1.0 - (scores.clamp_(min=-softcap) / softcap).square_()
    grads = grad_scores @ k, grad_scores.mT @ q, probabilities.mT @ grad_out
    return grads[0].to(dtype), grads[1].to(dtype), grads[2].to(dtype)


def causal_softmax_forward(scores: Tensor, scale: float) -> Tensor:
    """Return softmax(scale · scores) over the keys up to the query's position; later keys get 0.

    Args:
        scores: [b, heads, s, s], may be overwritten.

    Returns:
        [b, heads, s, s] in fp32 for half types if the kernel computes that, else in the scores' type."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return softmax_where(scores, scale, hidden)


def causal_softmax_backward(grad: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    """Return the gradient of the scores, scale · P·(grad - Σ grad·P), in the type of the probabilities.

    Args:
        grad: [b, heads, s, s], gradient of the probabilities in their type or fp32; may be overwritten.
        probabilities: [b, heads, s, s] as saved, rounded to the model's type."""
    exact = probabilities.float() if probabilities.dtype in HALF_TYPES else probabilities
    grad_scores = torch.ops.aten._softmax_backward_data(grad.to(exact.dtype), exact, -1, exact.dtype)
    return grad_scores.mul_(scale).to(probabilities.dtype)


def softmax_where(scores: Tensor, scale: float, hidden: Tensor | None, sink: Tensor | None = None) -> Tensor:
    """Return softmax(scale · scores) over the visible part of the last dimension, in fp32 for half types.

    Overwrites scores [..., heads, s_q, s_k] unless they have a half type. `hidden`: boolean, broadcastable to the
    scores. `sink`: [heads], one extra logit that gets no column in the result."""
    scores = (scores.float() if scores.dtype in HALF_TYPES else scores).mul_(scale)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    probabilities = scores.softmax(dim=-1)
    if sink is not None:  # the keys' share: exp(lse) / (exp(lse) + exp(sink))
        probabilities.mul_((scores.logsumexp(dim=-1, keepdim=True) - sink.to(scores.dtype).view(-1, 1, 1)).sigmoid_())
    return probabilities


CausalSoftmax = tuple[Callable[..., Tensor], Callable[..., Tensor]]
"""A kernel's forward and backward, with the signatures of `causal_softmax_forward` and `causal_softmax_backward`."""


class _UnfusedAttention(Function):
    """Attention that saves q, k, v and for each score its probability, mask and dropped-out probability: 2·e + 1 bytes.

    The query heads of a group are rows of one product, so keys and values are never repeated."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        visible: Tensor | None,
        keep: Tensor | None,
        p: float,
        causal: CausalSoftmax | None,
        softcap: float | None,
    ) -> Tensor:
        b, heads, s_q, d = q.shape
        groups, s_k = k.shape[1:3]
        scores = (q.reshape(b, groups, -1, d) @ k.mT).view(b, heads, s_q, s_k)
        scale, ctx.softcap = 1.0 / math.sqrt(d), softcap
        if softcap is not None:
            scores, scale = scores.mul_(scale / softcap).tanh_(), softcap
        if causal is not None:
            exact = causal[0](scores, scale)
        else:
            exact = softmax_where(scores, scale, None if visible is None else visible.logical_not(), sink)
        del scores
        dropped = probabilities = exact.to(q.dtype)
        ctx.scale = 1.0 / (1.0 - p)
        ctx.softmax_backward = causal_softmax_backward if causal is None else causal[1]
        if keep is not None:
            dropped = (exact * keep).mul_(ctx.scale).to(q.dtype)
        # The sink's probability, from the unrounded probabilities.
        absorbed = None if sink is None else 1.0 - exact.sum(dim=-1)
        ctx.save_for_backward(q, k, v, probabilities, keep, dropped, absorbed)
        mixed = (dropped.view(b, groups, -1, s_k) @ v).view(b, heads, s_q, d)
        # The output projection's memory order, so that the projection saves this memory instead of a copy.
        return mixed.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probabilities, keep, dropped, absorbed = ctx.saved_tensors
        b, heads, s_q, d = q.shape
        groups, s_k = k.shape[1:3]
        grad = grad.reshape(b, groups, -1, d)
        grad_v = dropped.view(b, groups, -1, s_k).mT @ grad
        grad_scores = (grad @ v.mT).view(b, heads, s_q, s_k)
        del grad
        if keep is not None:
            if q.dtype in HALF_TYPES:
                grad_scores = grad_scores.float()
            grad_scores.mul_(keep).mul_(ctx.scale)
        grad_sink = None
        if absorbed is not None:  # the sink's value is 0: P·(0 - Σ grad·P)
            inner = (grad_scores * probabilities).sum(dim=-1, dtype=absorbed.dtype)
            grad_sink = -(absorbed * inner).sum(dim=(0, 2))
        grad_scores = ctx.softmax_backward(grad_scores, probabilities, 1.0 / math.sqrt(d)).view(b, groups, -1, s_k)
        if ctx.softcap is not None:
            capped = (q.reshape(b, groups, -1, d) @ k.mT).mul_(1.0 / math.sqrt(d) / ctx.softcap).tanh_()
            grad_scores = grad_scores * capped.square_().neg_().add_(1.0)
        grad_k = grad_scores.mT @ q.reshape(b, groups, -1, d)
        return (grad_scores @ k).view(b, heads, s_q, d), grad_k, grad_v, grad_sink, *[None] * 5


def unfused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None,
    keep: Tensor | None,
    p: float,
    causal: CausalSoftmax | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return dropout(softmax(q·kᵀ/sqrt(d)))·v; softmax in fp32 for half types.

    Args:
        q: [b, heads, s_q, d].
        k, v: [b, groups, s_k, d] with heads a multiple of groups.
        visible: boolean mask of visible keys, broadcastable to [b, heads, s_q, s_k]; None: all. Each query needs at
            least one.
        keep: boolean mask [b, heads, s_q, s_k] of the probabilities to keep; None: no dropout.
        p: dropout probability; kept probabilities are scaled by 1/(1-p).
        causal: the kernel for the plain causal mask with s_q = s_k, without `visible`.
        softcap: scores s become softcap·tanh(s/softcap).
        sink: [heads], an extra logit in each query's softmax with a value of 0; not with `causal`.

    Returns:
        [b, heads, s_q, d], a view of memory [s_q, b, heads, d]."""
    return _UnfusedAttention.apply(q, k, v, sink, visible, keep, p, causal, softcap)
