"""YaRN (arXiv 2309.00071): frequencies and attention factor of a RoPE stretched beyond the sequences first trained on.

The operations are those of transformers in the same order, so that both give the same bits.
"""

import math

import torch
from torch import Tensor

from megalite.config.model import ModelConfig


def yarn_frequencies(config: ModelConfig) -> Tensor:
    """[d/2] in fp64. Pairs that make more than `rope_beta_fast` turns within the original positions keep their frequency,
    those below `rope_beta_slow` have it divided by the factor; in between both are mixed linearly in the pair's index."""
    size, base = config.rotary_size, config.rotary_base

    def index(turns: float) -> float:
        """Of the pair, times 2, that makes so many turns."""
        return size * math.log(config.rope_original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = index(config.rope_beta_fast), index(config.rope_beta_slow)
    if config.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    powers = base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    ramp = (torch.arange(size // 2, dtype=torch.float64) - first) / (last - first or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (config.rope_scaling_factor * powers) * (1 - kept) + 1.0 / powers * kept


def attention_factor(config: ModelConfig) -> float:
    """What queries and keys are multiplied with, each: scores get its square."""
    if config.rope_scaling != "yarn":
        return 1.0
    if config.rope_attention_factor is not None:
        return config.rope_attention_factor

    if config.rope_mscale is not None and config.rope_mscale_all_dim is not None:
        return _grown(config, config.rope_mscale) / _grown(config, config.rope_mscale_all_dim)
    return _grown(config, 1)


def latent_score_factor(config: ModelConfig) -> float:
    """What scores of multi-latent attention are multiplied with beside 1 / sqrt(d), in the channels without rope too."""
    if config.rope_scaling != "yarn" or config.rope_mscale_all_dim is None:
        return 1.0
    return _grown(config, config.rope_mscale_all_dim) ** 2


def _grown(config: ModelConfig, scale: float) -> float:
    return 0.1 * scale * math.log(config.rope_scaling_factor) + 1.0
