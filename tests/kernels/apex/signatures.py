"""What the C++ functions of apex (commit 6424da3b) take: the stand-ins in `recorded` refuse everything else.

They also refuse what the real ones would take and then read wrong: other types behind a raw pointer, strides they do not
look at, an empty grid. That tensors must be on CUDA is the one thing that is not checked.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HALF_TYPES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALF_TYPES)


def bound(values: Sequence[Any], kinds: str) -> None:
    """What pybind11 checks: one letter an argument, t tensor, o tensor or None, i int, f float, b bool, s sizes,
    l lists of tensors."""
    if len(values) != len(kinds):
        raise TypeError(f"incompatible function arguments: {len(values)} instead of {len(kinds)}")
    for place, (value, kind) in enumerate(zip(values, kinds, strict=True), start=1):
        if not _fits(value, kind):
            raise TypeError(f"incompatible function arguments: number {place} is {type(value).__name__}")


def _fits(value: Any, kind: str) -> bool:
    match kind:
        case "t":
            return isinstance(value, Tensor)
        case "o":
            return value is None or isinstance(value, Tensor)
        case "i":
            return isinstance(value, int) and not isinstance(value, bool)
        case "f":
            return isinstance(value, float | int) and not isinstance(value, bool)
        case "b":
            return isinstance(value, bool)
        case "s":
            return isinstance(value, tuple | list) and all(isinstance(size, int) for size in value)
    return isinstance(value, list) and all(
        isinstance(tensors, list) and all(isinstance(tensor, Tensor) for tensor in tensors) for tensors in value
    )


def require(true: bool, what: str) -> None:
    """Check like TORCH_CHECK."""
    if not true:
        raise RuntimeError(what)


def contiguous(*tensors: Tensor) -> None:
    """Require contiguous tensors."""
    for tensor in tensors:
        require(tensor.is_contiguous(), f"must be contiguous: {tuple(tensor.shape)}, strides {tensor.stride()}")


def of_type(tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Check types like data_ptr<T>() and the dispatch macros."""
    require(tensor.dtype in dtypes, f"expected scalar type {dtypes} but found {tensor.dtype}")


def some_blocks(count: int) -> None:
    """Require elements: an empty grid cannot be launched."""
    require(count > 0, "CUDA error: invalid configuration argument")
