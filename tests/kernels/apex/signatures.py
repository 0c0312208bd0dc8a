"""Checks of arguments like those of apex's C++ functions (commit 6424da3b), for the stand-ins in `recorded`.

They also reject arguments that apex accepts but reads wrongly: other types behind a raw pointer, ignored strides, an
empty grid. Only the device is not checked: apex requires CUDA tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HALF_TYPES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALF_TYPES)


def check_kinds(values: Sequence[Any], kinds: str) -> None:
    """Check like pybind11: one letter per argument, t tensor, o tensor or None, i int, f float, b bool, s sizes,
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


def not_empty(count: int) -> None:
    """Require at least one element: an empty grid cannot be launched."""
    require(count > 0, "CUDA error: invalid configuration argument")
