"""Compute RoPE frequencies, optionally scaled to sequences longer than the original training's, and tables of angles.

YaRN (arXiv 2309.00071) uses transformers' operations in the same order, which gives the same bits.
"""

import math

import torch
from torch import Tensor

from megalite.config.model import ModelConfig


def rope_frequencies(config: ModelConfig, *, length: int = 0, local: bool = False) -> Tensor:
    """Return θ_i = base^(-2i/d) [d/2] in fp64 for the d rotated channels of a head, with the configured scaling.

    Scaling `linear`: every θ / factor (arXiv 2306.15595). `llama3` (Llama 3.1, arXiv 2407.21783) depends on the
    rotations of a pair within the original positions. Fewer than low_freq_factor: θ / factor; more than
    high_freq_factor: θ; in between, linear interpolation in the number of rotations. `yarn`: see `yarn_frequencies`.
    `dynamic` (NTK-aware): the base grows with the run's sequence `length` by (factor·length/original - factor +
    1)^(d/(d-2)). `local`: use rotary_base_local without scaling.
    """
    size, factor, low = config.rotary_size, config.rope_scaling_factor, config.rope_low_freq_factor
    base = (config.rotary_base_local if local else None) or config.rotary_base
    if config.rope_scaling == "dynamic" and not local:
        original = config.rope_original_max_positions
        base *= (factor * max(length, original) / original - (factor - 1)) ** (size / (size - 2))
    theta = base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    if config.rope_scaling in ("none", "dynamic") or local:
        return theta
    if config.rope_scaling == "linear":
        return theta / factor
    if config.rope_scaling == "yarn":
        return yarn_frequencies(config)
    assert config.rope_scaling == "llama3", config.rope_scaling
    rotations = config.rope_original_max_positions * theta / (2 * math.pi)
    kept = ((rotations - low) / (config.rope_high_freq_factor - low)).clamp(0.0, 1.0)
    return theta * (kept + (1.0 - kept) / factor)


def rope_tables(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [..., d/2] of position · θ_i for positions [...], times `factor`, computed in fp64."""
    angles = positions.double().unsqueeze(-1) * frequencies.to(positions.device)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def yarn_frequencies(config: ModelConfig) -> Tensor:
    """Return YaRN's frequencies [d/2] in fp64. Pairs with more than `rope_beta_fast` rotations within the original
    positions keep their frequency, pairs below `rope_beta_slow` divide it by the factor; in between, linear
    interpolation in the pair's index."""
    size, base = config.rotary_size, config.rotary_base

    def index(rotations: float) -> float:
        """Return the (fractional) index of the pair with this number of rotations."""
        return size * math.log(config.rope_original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = index(config.rope_beta_fast), index(config.rope_beta_slow)
    if config.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    powers = base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    ramp = (torch.arange(size // 2, dtype=torch.float64) - first) / (last - first or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (config.rope_scaling_factor * powers) * (1 - kept) + 1.0 / powers * kept


def attention_factor(config: ModelConfig) -> float:
    """Return the factor on queries and on keys; scores are multiplied by its square."""
    if config.rope_scaling != "yarn":
        return 1.0
    if config.rope_attention_factor is not None:
        return config.rope_attention_factor
    if config.rope_mscale is not None and config.rope_mscale_all_dim is not None:
        return _mscale(config, config.rope_mscale) / _mscale(config, config.rope_mscale_all_dim)
    return _mscale(config, 1)


def latent_score_factor(config: ModelConfig) -> float:
    """Return the factor on scores of multi-latent attention besides 1 / sqrt(d), in all channels."""
    if config.rope_scaling != "yarn" or config.rope_mscale_all_dim is None:
        return 1.0
    return _mscale(config, config.rope_mscale_all_dim) ** 2


def _mscale(config: ModelConfig, scale: float) -> float:
    return 0.1 * scale * math.log(config.rope_scaling_factor) + 1.0
