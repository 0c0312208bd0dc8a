"""Attention whose probabilities exist, for dropout on them."""

import math
from typing import Any

import torch


class _UnfusedAttention(torch.autograd.Function):
    """Keeps q, k, v and for each score its probability, mask and dropped-out probability: 2·e + 1 bytes.

    The query heads of a group are rows of one product, so that keys and values are never repeated.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        visible: torch.Tensor | None,
        keep: torch.Tensor | None,
        p: float,
    ) -> torch.Tensor:
        b, heads, s_q, d = q.shape
        groups, s_k = k.shape[1:3]
        scores = q.reshape(b, groups, -1, d) @ k.transpose(-2, -1)
        if q.dtype in (torch.bfloat16, torch.float16):
            scores = scores.float()
        scores = scores.mul_(1.0 / math.sqrt(d)).view(b, heads, s_q, s_k)
        if visible is not None:
            scores.masked_fill_(visible.logical_not(), float("-inf"))
        exact = scores.softmax(dim=-1)
        del scores
        probabilities = exact.to(q.dtype)
        ctx.scale = 1.0
        dropped = probabilities
        if keep is not None:
            ctx.scale = 1.0 / (1.0 - p)
            dropped = (exact * keep).mul_(ctx.scale).to(q.dtype)
        ctx.save_for_backward(q, k, v, probabilities, keep, dropped)
        mixed = (dropped.view(b, groups, -1, s_k) @ v).view(b, heads, s_q, d)
        # Laid out as the output projection reads it, whose saved input is then this very memory.
        return mixed.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, probabilities, keep, dropped = ctx.saved_tensors
        b, heads, s_q, d = q.shape
        groups, s_k = k.shape[1:3]
        grad = grad.reshape(b, groups, -1, d)
        grad_v = dropped.view(b, groups, -1, s_k).transpose(-2, -1) @ grad
        grad_scores = (grad @ v.transpose(-2, -1)).view(b, heads, s_q, s_k)
        del grad
        if q.dtype in (torch.bfloat16, torch.float16):
            grad_scores, probabilities = grad_scores.float(), probabilities.float()
        if keep is not None:
            grad_scores.mul_(keep).mul_(ctx.scale)
        grad_scores = torch.ops.aten._softmax_backward_data(
            grad_scores, probabilities, -1, probabilities.dtype
        )
        grad_scores = grad_scores.mul_(1.0 / math.sqrt(d)).to(q.dtype).view(b, groups, -1, s_k)
        grad_q = (grad_scores @ k).view(b, heads, s_q, d)
        grad_k = grad_scores.transpose(-2, -1) @ q.reshape(b, groups, -1, d)
        return grad_q, grad_k, grad_v, None, None, None


def unfused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    visible: torch.Tensor | None,
    keep: torch.Tensor | None,
    p: float,
) -> torch.Tensor:
    """dropout(softmax(q·kᵀ/sqrt(d)))·v; softmax in fp32 for half types.

    Args:
        q: [b, heads, s_q, d].
        k, v: [b, groups, s_k, d] with heads a multiple of groups.
        visible: which keys a query sees, boolean and broadcastable to [b, heads, s_q, s_k]; None: all. Every query
            must see at least one.
        keep: boolean mask [b, heads, s_q, s_k] of the probabilities that stay; None: no dropout.
        p: the probability of falling, by which those that stay are scaled.

    Returns:
        [b, heads, s_q, d], a view of memory [s_q, b, heads, d].
    """
    return _UnfusedAttention.apply(q, k, v, visible, keep, p)
