"""Rotary position embedding (arXiv 2104.09864) in the half-split form of Llama and Hugging Face."""

import math

import torch


def rope_frequencies(
    head_size: int,
    base: float,
    *,
    scaling: str,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_positions: int,
) -> torch.Tensor:
    """θ_i = base^(-2i/d) [d/2] in fp64, slowed down for sequences longer than those first trained on.

    Args:
        scaling: `none`; `linear`: every θ / factor (arXiv 2306.15595); `llama3` (Llama 3.1, arXiv 2407.21783): by
            the turns that a pair makes within the original positions. Fewer than low_freq_factor: θ / factor; more
            than high_freq_factor: θ; in between the two are mixed linearly in the number of turns.
        factor, low_freq_factor, high_freq_factor, original_max_positions: as the settings of these names.
    """
    theta = base ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    if scaling == "none":
        return theta
    if scaling == "linear":
        return theta / factor
    assert scaling == "llama3", scaling
    turns = original_max_positions * theta / (2 * math.pi)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return theta * (kept + (1.0 - kept) / factor)


def rope_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [..., d/2] of position · θ_i for positions [...], computed in fp64."""
    angles = positions.double().unsqueeze(-1) * frequencies.to(positions.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x_i, x_{i+d/2}) of x [s, b, heads, d] by their angles.

    Args:
        x: queries or keys.
        cos, sin: [s, 1, 1, d/2], or [s, b, 1, d/2] where the sequences of a microbatch have positions of their own.
    """
    first, second = x.chunk(2, dim=-1)
    if cos.dtype != x.dtype:
        first, second = first.to(cos.dtype), second.to(cos.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
