"""Compute attention with its probabilities in memory, for dropout on them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.attention import HALF_TYPES
from megalite.kernels.bases import Function


def causal_softmax_forward(scores: Tensor, scale: float) -> Tensor:
    """Return softmax(scale · scores) over the keys up to the query's position; later keys get 0.

    Args:
        scores: [b, heads, s, s], may be overwritten.

    Returns:
        [b, heads, s, s] in fp32 for half types if the kernel computes that, else in the scores' type.
    """
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return softmax_where(scores, scale, hidden)


def causal_softmax_backward(grad: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    """Return the gradient of the scores, scale · P·(grad - Σ grad·P), in the type of the probabilities.

    Args:
        grad: [b, heads, s, s], gradient of the probabilities in their type or fp32; may be overwritten.
        probabilities: [b, heads, s, s] as saved, rounded to the model's type.
    """
    exact = probabilities.float() if probabilities.dtype in HALF_TYPES else probabilities
    grad_scores = torch.ops.aten._softmax_backward_data(grad.to(exact.dtype), exact, -1, exact.dtype)
    return grad_scores.mul_(scale).to(probabilities.dtype)


def softmax_where(scores: Tensor, scale: float, hidden: Tensor | None, sink: Tensor | None = None) -> Tensor:
    """Return softmax(scale · scores) over the visible part of the last dimension, in fp32 for half types.

    Overwrites scores [..., heads, s_q, s_k] unless they have a half type. `hidden`: boolean, broadcastable to the
    scores. `sink`: [heads], one extra logit that gets no column in the result.
    """
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

    The query heads of a group are rows of one product, so keys and values are never repeated.
    """

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
        [b, heads, s_q, d], a view of memory [s_q, b, heads, d].
    """
    return _UnfusedAttention.apply(q, k, v, sink, visible, keep, p, causal, softcap)
