"""Rotary position embedding (arXiv 2104.09864) in the half-split form of Llama and Hugging Face."""

import torch


def rope_tables(
    positions: torch.Tensor, head_size: int, base: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [s, d/2] of position · base^(-2i/d), computed in fp64."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64, device=positions.device) / head_size
    angles = torch.outer(positions.double(), base**-exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x_i, x_{i+d/2}) of x [s, b, heads, d] by the angles of their position."""
    cos, sin = cos[:, None, None, :], sin[:, None, None, :]
    first, second = x.chunk(2, dim=-1)
    if cos.dtype != x.dtype:
        first, second = first.to(cos.dtype), second.to(cos.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
