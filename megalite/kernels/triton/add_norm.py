"""Bias, dropout, residual sum and norm in one pass over memory, by Triton kernels."""

from typing import Any

import torch

from megalite.kernels.triton.launch import rows_of
from megalite.kernels.triton.norm_backward import gradients
from megalite.kernels.triton.norm_forward import normalise


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        branch: torch.Tensor,
        bias: torch.Tensor | None,
        keep: torch.Tensor | None,
        scale: float,
        residual: torch.Tensor,
        weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        eps: float,
        offset: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept = None if keep is None else keep.contiguous()
        y, total, statistics = normalise(
            rows_of(residual), rows_of(branch), bias, kept, scale, weight, norm_bias, eps, offset
        )
        total = total.view(residual.shape)
        ctx.save_for_backward(total, weight, kept, statistics)
        ctx.scale, ctx.offset, ctx.branch = scale, offset, branch.dtype
        ctx.bias = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return y.view(residual.shape), total

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None, dtotal: torch.Tensor | None) -> tuple[Any, ...]:
        total, weight, keep, statistics = ctx.saved_tensors
        dy = torch.zeros_like(total) if dy is None else dy
        another = None if keep is None and ctx.branch == total.dtype else ctx.branch
        dz, dbranch, sums = gradients(
            *(rows_of(dy), None if dtotal is None else rows_of(dtotal), rows_of(total), weight, keep),
            *(ctx.scale, statistics, ctx.offset),
            branch=another,
            bias=ctx.bias is not None,
        )
        dresidual = dz.view(total.shape)
        dbranch = dresidual if dbranch is None else dbranch.view(total.shape)
        dnorm_bias = sums[1].to(weight.dtype) if statistics.shape[0] == 2 else None
        dbias = None if ctx.bias is None else sums[-1].to(ctx.bias)
        return dbranch, dbias, None, None, dresidual, sums[0].to(weight.dtype), dnorm_bias, None, None


def add_norm(
    branch: torch.Tensor,
    bias: torch.Tensor | None,
    keep: torch.Tensor | None,
    p: float,
    residual: torch.Tensor,
    weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x = residual + dropout(branch + bias), and its norm: (norm(x), x).

    x is rounded to the residual's type before it is normalised. The backward keeps x, `keep` and a number or two a
    row, and takes the gradients of both outputs in one pass; they are the same to the bit in every run on a device.

    Args:
        branch, residual: [..., n].
        bias: [n] of the linear layer that made `branch`, if it left it to us.
        keep: boolean [..., n], what stays of the branch, scaled by 1/(1-p); None: all of it, as it is.
        weight, norm_bias: [n] of LayerNorm; of RMSNorm where `norm_bias` is None.
    """
    scale = 1.0 if keep is None else 1.0 / (1.0 - p)
    return _AddNorm.apply(branch, bias, keep, scale, residual, weight, norm_bias, eps, float(zero_centered))
