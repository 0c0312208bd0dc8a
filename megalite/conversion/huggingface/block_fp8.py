"""Matrices in eight bits with one scale per block (DeepSeek-V3, Qwen3-FP8), read as the numbers that they stand for.

`X.weight` is float8_e4m3; `X.weight_scale_inv` has the factor of each block of `weight_block_size` rows and columns, the
blocks at the end being smaller.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from megalite.checkpoint.safetensors_header import Record
from megalite.conversion.huggingface.config_json import ModelFile

if TYPE_CHECKING:
    import torch

SCALE = "_scale_inv"
DTYPE = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16")

ReadElements = Callable[[str, int, int], "torch.Tensor"]


def read_block_size(file: ModelFile) -> tuple[int, int] | None:
    """Rows and columns that share a scale, as quantization_config says; None: nothing is quantized."""
    values = file.values.get("quantization_config")
    if not values:
        return None
    if isinstance(values, dict) and values.get("quant_method") == "mxfp4":
        return None  # the tensors' names say which are: see gpt_oss.py
    known = "only mxfp4, and fp8 with weight_block_size, such as [128, 128], is read"
    if not isinstance(values, dict) or values.get("quant_method") != "fp8" or values.get("fmt", "e4m3") != "e4m3":
        raise file.fault(f"quantization_config: {known}; convert the model that it was made from")
    size = values.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and 1 <= n < 1 << 20 for n in size):
        raise file.fault(f"quantization_config: weight_block_size is {str(size)[:60]!r}; {known}")
    return size[0], size[1]


def scale_fault(record: Record, scale: Record | None, block: tuple[int, int] | None) -> str | None:
    """What is wrong with the scales of a matrix in eight bits; None: nothing."""
    if block is None:
        return f"is {DTYPE} and config.json has no quantization_config"
    if scale is None:
        return f"is {DTYPE}, and {record.key}{SCALE} is missing"
    if len(record.shape) != 2:
        return f"is {DTYPE} of shape {list(record.shape)}; only matrices have a scale per block"
    expected = tuple(-(-size // step) for size, step in zip(record.shape, block, strict=True))
    if scale.shape != expected or scale.dtype not in SCALE_DTYPES:
        found = f"{scale.dtype} {list(scale.shape)}"
        return f"has scales {found}; of blocks of {list(block)} it is {' or '.join(SCALE_DTYPES)} {list(expected)}"
    return None


def read_scaled(read: ReadElements, record: Record, block: tuple[int, int], start: int, count: int) -> "torch.Tensor":
    """`count` elements of the matrix from the `start`-th on, flat, in float32: eight bits times the block's scale."""
    columns = record.shape[1]
    first, last = start // columns, (start + count - 1) // columns  # the rows that these elements are in
    across = -(-columns // block[1])
    top, bottom = first // block[0], last // block[0]
    scales = read(record.key + SCALE, top * across, (bottom + 1 - top) * across).float().view(-1, across)
    of_rows = scales.repeat_interleave(block[0], dim=0)[first - top * block[0] : last + 1 - top * block[0]]
    of_rows = of_rows.repeat_interleave(block[1], dim=1)[:, :columns]
    skipped = start - first * columns
    return read(record.key, start, count).float().mul_(of_rows.flatten()[skipped : skipped + count])
