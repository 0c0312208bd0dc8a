"""What the functions of amp_C take beside tensors.

They go over lists of tensors in chunks and launch what they have gathered when the last chunk of the last tensor comes;
an empty last tensor has none, and what was gathered would never run. All tensors of a list are read as the type of the
first, without a check.
"""

import ctypes
from functools import cache

import torch

CHUNK = 1 << 16
"""Elements a block takes, as apex's own callers have it."""


@cache
def flag(device: torch.device) -> torch.Tensor:
    """int32 [1], which the kernels set when they meet what is not finite. Nothing here reads it."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def as_float(value: float) -> float:
    """What is left of a number that goes through a C++ float."""
    return ctypes.c_float(value).value
