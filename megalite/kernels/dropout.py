"""Dropout with a given mask, of which the backward keeps one byte an element."""

from typing import Any

import torch


class _MaskedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = 1.0 / (1.0 - p)
        return (x * keep).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (grad * keep).mul_(ctx.scale), None, None


def add_dropped(
    residual: torch.Tensor,
    branch: torch.Tensor,
    bias: torch.Tensor | None,
    keep: torch.Tensor | None,
    p: float,
) -> torch.Tensor:
    """residual + dropout(branch + bias), all [..., n]; bias and keep are left out where None."""
    if bias is not None:
        branch = branch + bias
    return residual + (branch if keep is None else masked_dropout(branch, keep, p))


def masked_dropout(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    """x·keep / (1-p) for a boolean mask of x's shape; autograd would keep the mask in x's type."""
    return _MaskedDropout.apply(x, keep, p)
