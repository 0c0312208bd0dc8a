"""Softmax of attention scores that lie in memory, under the plain causal mask."""

import torch

HALVES = (torch.bfloat16, torch.float16)


def causal_softmax_forward(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale · scores) over the keys up to the query's own; what lies behind is 0.

    Args:
        scores: [b, heads, s, s], which it may overwrite.

    Returns:
        [b, heads, s, s] in fp32 for half types where the kernel keeps that, else in the scores' type.
    """
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return softmax_where(scores, scale, hidden)


def causal_softmax_backward(grad: torch.Tensor, probabilities: torch.Tensor, scale: float) -> torch.Tensor:
    """Gradient of the scores, scale · P·(grad - Σ grad·P), in the type of the probabilities.

    Args:
        grad: [b, heads, s, s] of the probabilities, in their type or fp32; it may be overwritten.
        probabilities: [b, heads, s, s] as saved, rounded to the model's type.
    """
    exact = probabilities.float() if probabilities.dtype in HALVES else probabilities
    grad_scores = torch.ops.aten._softmax_backward_data(grad.to(exact.dtype), exact, -1, exact.dtype)
    return grad_scores.mul_(scale).to(probabilities.dtype)


def softmax_where(scores: torch.Tensor, scale: float, hidden: torch.Tensor | None) -> torch.Tensor:
    """softmax(scale · scores) over the last dimension without what is hidden, in fp32 for half types.

    Args:
        scores: [..., s_q, s_k], overwritten unless it is of a half type.
        hidden: boolean, broadcastable to the scores; None: nothing.
    """
    if scores.dtype in HALVES:
        scores = scores.float()
    scores = scores.mul_(scale)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    return scores.softmax(dim=-1)
