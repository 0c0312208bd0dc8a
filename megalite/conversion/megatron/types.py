"""Which types of elements are read."""

from pathlib import Path

import torch

from megalite.checkpoint.safetensors_file import DTYPE_NAMES
from megalite.conversion.weights import ConversionError


def require_readable(path: Path, name: str, dtype: torch.dtype) -> None:
    """Refuse a weight of whole numbers, and one in a type that has scales elsewhere (fp8 and the like).

    Raises:
        ConversionError: names the file, the tensor and its type.
    """
    if not dtype.is_floating_point:
        raise ConversionError(f"{path}: {name} is of the type {dtype}, not of floating-point numbers")
    if dtype not in DTYPE_NAMES:
        known = ", ".join(str(kind) for kind in DTYPE_NAMES if kind.is_floating_point)
        raise ConversionError(
            f"{path}: {name} is of the type {dtype}: quantized, not read. Save it again as one of {known}"
        )
