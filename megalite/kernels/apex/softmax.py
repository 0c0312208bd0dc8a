"""Causal softmax by scaled_upper_triang_masked_softmax_cuda."""

import scaled_upper_triang_masked_softmax_cuda as kernels
import torch

from megalite.config.errors import ConfigError
from megalite.kernels.apex.limits import softmax_limit


def causal_softmax_forward(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale · scores) over the keys up to the query's own, computed in fp32 and rounded to the scores' type.

    Args:
        scores: [b, heads, s, s] in bf16 or fp16, which it may overwrite.
        scale: one that the scores' type does not hold is multiplied to the scores first: the kernel would round it.

    Raises:
        ConfigError: a length, or a number of matrices, that the kernel does not take.
    """
    _check(scores)
    if torch.tensor(scale, dtype=scores.dtype).item() != scale:
        scores, scale = scores.mul_(scale), 1.0
    return kernels.forward(scores.flatten(0, 1).contiguous(), scale).view(scores.shape)


def causal_softmax_backward(grad: torch.Tensor, probabilities: torch.Tensor, scale: float) -> torch.Tensor:
    """Gradient of the scores, scale · P·(grad - Σ grad·P), in the type of the probabilities.

    Args:
        grad: [b, heads, s, s] of the probabilities; of their type it is overwritten.
        probabilities: [b, heads, s, s] as the forward gave them.
    """
    rows = grad.to(probabilities.dtype).flatten(0, 1)
    return kernels.backward(rows, probabilities.flatten(0, 1), scale).view(probabilities.shape)


def _check(scores: torch.Tensor) -> None:
    matrices, length = scores.shape[0] * scores.shape[1], scores.shape[-1]
    reason = softmax_limit(length)
    together = 8 if length <= 128 else 4  # that a block of the kernel takes at once
    if reason is None and matrices % together:
        reason = (
            f"it takes {together} matrices of {length} x {length} scores at a time, and there are {matrices}"
        )
    if reason is not None:
        raise ConfigError(f"kernels: softmax=apex cannot be used: {reason}; use softmax=torch")
