"""Dequantize matrices while reading: fp8 with a scale per block, and gpt-oss's MXFP4."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megalite.checkpoint.safetensors_header import Record
from megalite.conversion.huggingface.config_json import ModelFile

if TYPE_CHECKING:
    import torch

ReadElements = Callable[[str, int, int], "torch.Tensor"]  # (name, start, count) -> stored elements, flat


class BlockFp8:
    """Matrices in e4m3 with a factor per `block` of rows and columns (DeepSeek-V3, Qwen3-FP8). The last blocks may be
    smaller."""

    read_as, _scales = "float32", ("F32", "BF16")

    def __init__(self, block: tuple[int, int]) -> None:
        self._block = block
        self.description = f"those in fp8 are read as fp32 times their block scales ({block[0]} x {block[1]})"

    def scales_of(self, name: str) -> str:
        return f"{name}_scale_inv"

    def fault(self, record: Record, scales: Record | None) -> str | None:
        """Return what is wrong with a matrix, or None."""
        if scales is None:
            return f"is {record.dtype}, and {self.scales_of(record.key)} is missing"
        if len(record.shape) != 2:
            return f"is {record.dtype} of shape {list(record.shape)}; only matrices have a scale per block"
        expected = tuple(-(-size // step) for size, step in zip(record.shape, self._block, strict=True))
        if scales.shape != expected or scales.dtype not in self._scales:
            found, block = f"{scales.dtype} {list(scales.shape)}", list(self._block)
            return (
                f"has scales {found}; with blocks of {block} they must be {' or '.join(self._scales)} {list(expected)}"
            )
        return None

    def read(self, read: ReadElements, record: Record, start: int, count: int, _room: object = None) -> "torch.Tensor":
        """Read elements [start, start + count), flat."""
        (height, width), columns = self._block, record.shape[1]
        first, last = start // columns, (start + count - 1) // columns  # first and last row of these elements
        across, top = -(-columns // width), first // height
        scales = read(self.scales_of(record.key), top * across, (last // height + 1 - top) * across)
        per_row = scales.float().view(-1, across).repeat_interleave(height, dim=0)
        per_row = per_row[first - top * height : last + 1 - top * height]
        factors = per_row.repeat_interleave(width, dim=1)[:, :columns].flatten()[start - first * columns :][:count]
        return read(record.key, start, count).float().mul_(factors)


PACKED = "_blocks"  # suffix of a packed tensor's name
_GROUP = 32  # numbers per scale; a scale is a power of two, stored as a byte with its exponent + 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))  # values of the 4-bit codes; a byte's low half comes first


def packed_shape(experts: int, rows: int, width: int) -> tuple[int, ...]:
    """Return the shape of the packed bytes of matrices [experts, rows, width], in groups along the width."""
    return experts, rows, -(-width // _GROUP), _GROUP // 2


class Mxfp4:
    """Matrices with two 4-bit numbers in each byte. bf16 represents all values exactly."""

    read_as, description = "bfloat16", "those in MXFP4 are read as bf16"

    def scales_of(self, name: str) -> str:
        return f"{name.removesuffix(PACKED)}_scales"

    def fault(self, record: Record, scales: Record | None) -> str | None:
        """Return what is wrong with packed matrices, or None."""
        if not record.key.endswith(PACKED):
            return f"is {record.dtype}; weights must be BF16, F16, F32 or F64"
        if scales is None:
            return f"has no {self.scales_of(record.key)}"
        if scales.shape != record.shape[:-1] or scales.dtype != record.dtype:
            found, expected = list(scales.shape), list(record.shape[:-1])
            return f"has scales {scales.dtype} {found}; they must be {record.dtype} {expected}"
        return None

    def read(self, read: ReadElements, record: Record, start: int, count: int, _room: object = None) -> "torch.Tensor":
        """Read numbers [start, start + count), flat."""
        first, last = start // _GROUP, -(-(start + count) // _GROUP)
        packed = read(record.key, first * _GROUP // 2, (last - first) * _GROUP // 2)
        exponents = read(self.scales_of(record.key), first, last - first).int() - 127
        codes = packed.repeat_interleave(2)
        codes[1::2] >>= 4
        values = exponents.float().new_tensor(_VALUES)[(codes & 15).long()]
        scaled = values.view(-1, _GROUP).ldexp(exponents.unsqueeze(1)).bfloat16()
        return scaled.flatten()[start - first * _GROUP :][:count]


def quantized_kinds(file: ModelFile) -> Mapping[str, BlockFp8 | Mxfp4]:
    """Map stored dtypes to their dequantization. fp8 is included only if quantization_config defines its blocks. Raises
    ConversionError: quantization_config has another kind."""
    found: dict[str, BlockFp8 | Mxfp4] = {"U8": Mxfp4()}  # packed tensors are recognized by their names
    values = file.values.get("quantization_config")
    if not values or (isinstance(values, dict) and values.get("quant_method") == "mxfp4"):
        return found
    known = "supported: mxfp4, and fp8 with weight_block_size, such as [128, 128]"
    if not isinstance(values, dict) or values.get("quant_method") != "fp8" or values.get("fmt", "e4m3") != "e4m3":
        raise file.fault(f"quantization_config: {known}; convert the original, unquantized model instead")
    size = values.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and 1 <= n < 1 << 20 for n in size):
        raise file.fault(f"quantization_config: weight_block_size is {str(size)[:60]!r}; {known}")
    return found | {"F8_E4M3": BlockFp8((size[0], size[1]))}
