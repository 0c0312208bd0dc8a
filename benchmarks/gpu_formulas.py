"""Operations in plain torch, as one writes them, for any float type and with the registry's signatures.

In fp64 they are what results are compared with, compiled they are a rival.
"""

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = False
) -> torch.Tensor:
    """By the formula."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, *, zero_centered: bool = False
) -> torch.Tensor:
    """torch's."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


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
    """Term by term."""
    branch = branch if bias is None else branch + bias
    x = residual + (branch if keep is None else branch * keep / (1.0 - p))
    if norm_bias is None:
        return rms_norm(x, weight, eps), x
    return layer_norm(x, weight, norm_bias, eps), x


def bias_gelu(x: torch.Tensor, bias: torch.Tensor | None, *, tanh: bool = False) -> torch.Tensor:
    """torch's."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh" if tanh else "none")


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """By the formula."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(x: torch.Tensor, *, tanh: bool = False) -> torch.Tensor:
    """By the formula."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh" if tanh else "none") * up


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """By the formula."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
