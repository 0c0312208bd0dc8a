"""LayerNorm and RMSNorm over the last dimension by Triton kernels; both keep their input and a number or two a row."""

from typing import Any

import torch

from megalite.kernels.triton.launch import rows_of
from megalite.kernels.triton.norm_backward import gradients
from megalite.kernels.triton.norm_forward import normalise


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, offset: float
    ) -> torch.Tensor:
        rows = rows_of(x)
        y, _, statistics = normalise(rows, None, None, None, 1.0, weight, bias, eps, offset)
        ctx.save_for_backward(rows, weight, bias, statistics)
        ctx.offset = offset
        return y.view(x.shape)

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None, None]:
        rows, weight, bias, statistics = ctx.saved_tensors
        dx, _, sums = gradients(rows_of(dy), None, rows, weight, None, 1.0, statistics, ctx.offset)
        sums = sums.to(weight.dtype)
        return dx.view(dy.shape), sums[0], None if bias is None else sums[1], None, None


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight for x [..., n], or · (1 + weight) where `zero_centered`, in one pass.

    Any float type; computed in fp32, in fp64 for fp64. The gradients are the same to the bit in every run on a device.
    """
    return _Norm.apply(x, weight, None, eps, float(zero_centered))


def layernorm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, *, zero_centered: bool = False
) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) · weight + bias for x [..., n], or · (1 + weight) where `zero_centered`, in one pass.

    Types and gradients as of `rmsnorm`.
    """
    return _Norm.apply(x, weight, bias, eps, float(zero_centered))
