"""What apex's kernels do not take, and would not refuse by themselves."""

import torch

from megalite.config.errors import ConfigError

INT_ELEMENTS = 2**31
"""From here on the offsets of most kernels, C++ ints, run over."""


def check_elements(operation: str, x: torch.Tensor) -> None:
    """Raise ConfigError if the kernel could not address all of `x`, whose strides count."""
    if sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) >= INT_ELEMENTS:
        raise ConfigError(
            f"kernels: {operation}=apex takes less than 2^31 elements at once, got {list(x.shape)}; "
            f"use {operation}=torch"
        )


def softmax_limit(length: int) -> str | None:
    """Why the causal softmax does not take sequences of this length, or None."""
    if not 16 < length <= 16384:
        return f"it takes sequences of 17 to 16384 tokens, not {length}"
    return None if length % 4 == 0 else f"it takes sequences of a multiple of 4 tokens, not {length}"
