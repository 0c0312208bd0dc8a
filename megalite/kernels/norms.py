"""LayerNorm and RMSNorm over the last dimension; both keep their input and a number or two a row."""

from typing import Any

import torch
import torch.nn.functional as F


class _RMSNorm(torch.autograd.Function):
    """RMSNorm in fp32 for half types (fp64 for fp64) that keeps x as it came."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        exact = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        inverse = (torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_() / x.shape[-1]).add_(eps)
        inverse.rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return (exact * inverse).mul_(weight.to(exact.dtype) + offset).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        normed = x * inverse  # in fp32 at least, as `inverse` is
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad_normed = grad * (weight.to(inverse.dtype) + ctx.offset)
        mean = (grad_normed * normed).mean(dim=-1, keepdim=True)
        grad_x = grad_normed.sub_(normed.mul_(mean)).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, *, zero_centered: bool = False
) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) · weight + bias; torch computes the statistics in fp32 for half types.

    zero_centered: the factor is 1 + weight, never rounded to a half type.
    """
    if not zero_centered:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    if x.dtype not in (torch.bfloat16, torch.float16):
        return F.layer_norm(x, weight.shape, weight + 1.0, bias, eps)
    # With parameters of another type than x torch rounds the result alone.
    return F.layer_norm(x.float(), weight.shape, weight.float() + 1.0, bias.float(), eps).to(x.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight, or · (1 + weight) where `zero_centered`."""
    if x.is_cuda and not zero_centered:
        return F.rms_norm(x, weight.shape, weight, eps)  # one fused kernel, which keeps the same
    # On CPU torch composes it of operations that keep two fp32 copies of x; and 1 + weight must not be rounded to bf16.
    return _RMSNorm.apply(x, weight, eps, 1.0 if zero_centered else 0.0)
