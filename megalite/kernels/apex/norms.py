"""RMSNorm and LayerNorm by apex's fused_layer_norm_cuda.

Its functions are called as they are: the Python wrappers around them fall back to torch without a word, take other eps
by default, and would run the code of the package. Always without `memory_efficient`, which divides by the weight.
"""

from typing import Any

import fused_layer_norm_cuda as kernels
import torch

from megalite.kernels.apex.limits import check_elements

_HALVES = (torch.bfloat16, torch.float16)


class _RMSNorm(torch.autograd.Function):
    """Keeps x as it came, the factors, and 1/rms a row."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool
    ) -> torch.Tensor:
        check_elements("rmsnorm", x)
        ctx.eps, ctx.zero_centered = eps, zero_centered
        if x.numel() == 0:  # a grid of no blocks cannot be launched
            ctx.save_for_backward(x, weight, None)
            return torch.empty_like(x)
        x = x.contiguous()
        y, inverse = kernels.rms_forward_affine(
            _operand(x, zero_centered), weight.shape, _factors(weight, zero_centered), eps
        )
        ctx.save_for_backward(x, weight, inverse)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        if x.numel() == 0:
            return torch.empty_like(x), torch.zeros_like(weight), None, None
        grad_x, grad_weight = kernels.rms_backward_affine(
            _operand(grad.contiguous(), ctx.zero_centered),
            inverse,
            _operand(x, ctx.zero_centered),
            weight.shape,
            _factors(weight, ctx.zero_centered),
            ctx.eps,
            False,
        )
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


class _LayerNorm(torch.autograd.Function):
    """Keeps x as it came, the factors, and mean and 1/deviation a row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        zero_centered: bool,
    ) -> torch.Tensor:
        check_elements("layernorm", x)
        ctx.eps, ctx.zero_centered = eps, zero_centered
        if x.numel() == 0:
            ctx.save_for_backward(x, weight, bias, None, None)
            return torch.empty_like(x)
        x = x.contiguous()
        y, mean, inverse = kernels.forward_affine(
            _operand(x, zero_centered),
            weight.shape,
            _factors(weight, zero_centered),
            _operand(bias.contiguous(), zero_centered),
            eps,
        )
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        if x.numel() == 0:
            return torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias), None, None
        grad_x, grad_weight, grad_bias = kernels.backward_affine(
            _operand(grad.contiguous(), ctx.zero_centered),
            mean,
            inverse,
            _operand(x, ctx.zero_centered),
            weight.shape,
            _factors(weight, ctx.zero_centered),
            _operand(bias.contiguous(), ctx.zero_centered),
            ctx.eps,
            False,
        )
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(bias.dtype), None, None


def _factors(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    """What the kernel multiplies with: 1 + weight is never rounded to a half type."""
    return _operand(weight.contiguous(), zero_centered) + 1.0 if zero_centered else weight.contiguous()


def _operand(x: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    """Factors in fp32 want everything in fp32: of half inputs the kernel takes factors of the same type alone."""
    return x.float() if zero_centered and x.dtype in _HALVES else x


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight, or · (1 + weight) where `zero_centered`.

    Args:
        x: [..., n]. Half types with `zero_centered` go through fp32 copies, which other backends do without.
        weight: [n] in x's type.

    Raises:
        ConfigError: 2^31 elements and more.
    """
    return _RMSNorm.apply(x, weight, eps, zero_centered)


def layernorm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, *, zero_centered: bool = False
) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) · weight + bias, with 1 + weight where `zero_centered`; otherwise as `rmsnorm`."""
    return _LayerNorm.apply(x, weight, bias, eps, zero_centered)
