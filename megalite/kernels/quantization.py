"""Matrix products of linear layers in fp8, and 8-bit integers with one scale per block for messages.

fp8: e4m3 for activations and weights, e5m2 for gradients, sums in fp32. Scales are powers of two, computed from the
tensors of the product itself, so no scaling state exists between steps. Tensorwise: one scale per tensor, which takes one
pass over it. Rowwise: one scale per row of the first factor and per column of the second; one kernel computes and applies
them. Blockwise (arXiv 2412.19437): one scale per 128 elements along the summed dimension, and per 128 x 128 block of a
weight; every factor is e4m3."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.strategies import INTEGER_BLOCK, integer_bytes
from megalite.kernels.matmul import Products, WeightProduct
from megalite.kernels.probes import why_not_capability

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16  # both dimensions of a weight must be multiples of it, because rows of the factors are 16-byte aligned
BLOCK = 128
_SMALLEST = 2.0**-100  # lower bound on the largest element when the scale is computed, for tensors of zeros


def why_not_fp8(device: torch.device) -> str | None:
    """Return why the device cannot multiply in fp8, or None."""
    return why_not_capability(device, (8, 9), "matrix products in fp8")


def why_not_blockwise(device: torch.device) -> str | None:
    """Return why a device with fp8 products does not support blockwise scales, or None. A CPU multiplies in fp32."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9 or [int(part) for part in (torch.version.cuda or "0").split(".")] < [12, 9]:
        return (
            f"fp8_recipe blockwise requires compute capability 9 and CUDA 12.9, but this device has {major}.{minor} "
            f"and torch has CUDA {torch.version.cuda}; use --fp8-recipe tensorwise"
        )
    return None


class Rounded(NamedTuple):
    """A contiguous fp8 matrix [n, i] and its inverse scales in fp32: a scalar, [n, 1], or for blocks [n, i/128] or
    [n/128, i/128]."""

    data: Tensor
    undo: Tensor


def largest(x: Tensor) -> Tensor:
    """Return the largest magnitude in x, an fp32 scalar on its device; NaN if x contains one."""
    return torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)


def cast(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Rounded:
    """Return x·2^k in fp8 and 2^-k with the largest k that fits, for x [n, i] of any strides.

    An infinity or NaN turns everything with the same scale into NaN, which the step's check of loss and norm detects.
    """
    bounded = largest.clamp(min=_SMALLEST)
    _, exponent = torch.frexp(torch.finfo(dtype).max / bounded)
    # 2^k from its bits: on a GPU, ldexp computes a power that may be an ulp off. The difference turns infinity into
    # NaN.
    scale = ((exponent + 126) << 23).view(torch.float32) + (bounded - bounded)
    rounded = (x * scale.to(x.dtype)).to(dtype, memory_format=torch.contiguous_format)
    return Rounded(rounded, scale.reciprocal())


def cast_rows(x: Tensor, dtype: torch.dtype) -> Rounded:
    """`cast` with a scale for each row."""
    return cast(x, torch.linalg.vector_norm(x, float("inf"), dim=1, keepdim=True, dtype=torch.float32), dtype)


Fp8Kernels = tuple[
    Callable[[Tensor], Tensor],
    Callable[[Tensor, Tensor, torch.dtype], Rounded],
    Callable[[Tensor, torch.dtype], Rounded],
]
"""Kernels of the operation `fp8`: `largest`, `cast` and `cast_rows`."""
Side = Literal["rows", "columns"]


class Fp8Products(Products):
    """Products of bf16 tensors through torch's scaled matrix product.

    Args:
        rowwise: one scale per row and column instead of one per tensor (see the module docstring).
        weight_grads: compute weight gradients in fp8 too; otherwise in bf16."""

    measures = True
    alignment = ALIGNMENT
    """Required divisor of both dimensions of weights, and of a microbatch's rows for weight gradients in fp8."""

    def __init__(
        self, kernels: Fp8Kernels = (largest, cast, cast_rows), *, rowwise: bool = False, weight_grads: bool = True
    ) -> None:
        self._largest, self._cast, self._cast_rows = kernels
        self._rowwise, self._weight_grads = rowwise, weight_grads
        self._kept: dict[Tensor, tuple[Tensor | None, dict[Side, Rounded]]] | None = None

    @contextmanager
    def caching_weights(self) -> Iterator[None]:
        """Cache the fp8 weights inside, where weights must not change. 2 bytes per element if backwards run too."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def weight(self, weight: Tensor, side: Side) -> Rounded:
        """Return weight [o, i] in e4m3 for a product that sums over i (`rows`, [o, i]) or o (`columns`, [i, o])."""
        matrix, kept = weight.flatten(0, -2), self._kept
        of_weight, sides = (None, {}) if kept is None or weight not in kept else kept[weight]
        if side not in sides:
            of_weight = self.measure(matrix) if of_weight is None else of_weight
            sides[side] = self._rounded_weight(matrix if side == "rows" else matrix.t(), of_weight)
            if kept is not None:
                kept[weight] = of_weight, sides
        return sides[side]

    def measure(self, x: Tensor) -> Tensor | None:
        return None if self._rowwise else self._largest(x.flatten(0, -2))

    def _rounded(self, x: Tensor, of_x: Tensor | None, dtype: torch.dtype) -> Rounded:
        return self._cast_rows(x, dtype) if of_x is None else self._cast(x, of_x, dtype)

    def _rounded_weight(self, matrix: Tensor, of_weight: Tensor | None) -> Rounded:
        return self._rounded(matrix, of_weight, E4M3)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None, of_x: Tensor | None = None) -> Tensor:
        of_x = self.measure(x) if of_x is None else of_x
        x8 = self._rounded(x.flatten(0, -2), of_x, E4M3)
        # Fast accumulation keeps fewer bits of partial sums, which is usual in the forward.
        y = self._product(x8, self.weight(weight, "rows"), x.dtype, bias=bias, use_fast_accum=x.is_cuda)
        return y.view(*x.shape[:-1], y.shape[1])

    def input_grad(self, grad_y: Tensor, weight: Tensor, of_grad: Tensor | None = None) -> Tensor:
        of_grad = self.measure(grad_y) if of_grad is None else of_grad
        grad8 = self._rounded(grad_y.flatten(0, -2), of_grad, E5M2)
        grad_x = self._product(grad8, self.weight(weight, "columns"), grad_y.dtype)
        return grad_x.view(*grad_y.shape[:-1], weight.shape[-1])

    def weight_grad(self, of_x: Tensor | None, of_grad: Tensor | None) -> WeightProduct | None:
        """Return the product for weight gradients, in fp32, or rowwise in x's type, the only one that torch supports.

        If the number of rows is not a multiple of `alignment`, the product is in bf16."""
        return (lambda grad_y, x: self._weight_grad(grad_y, x, of_x, of_grad)) if self._weight_grads else None

    def _weight_grad(self, grad_y: Tensor, x: Tensor, of_x: Tensor | None, of_grad: Tensor | None) -> Tensor:
        if x.shape[0] % self.alignment:
            return grad_y.t() @ x
        grad8, x8 = self._rounded(grad_y.t(), of_grad, E5M2), self._rounded(x.t(), of_x, E4M3)
        return self._product(grad8, x8, x.dtype if self._rowwise else torch.float32)

    def _product(
        self, a: Rounded, b: Rounded, dtype: torch.dtype, *, bias: Tensor | None = None, use_fast_accum: bool = False
    ) -> Tensor:
        """Compute a [n, k] · b [m, k]ᵀ + bias [m] -> [n, m]."""
        return torch._scaled_mm(
            *(a.data, b.data.t(), a.undo, b.undo.t()), bias=bias, out_dtype=dtype, use_fast_accum=use_fast_accum
        )


class BlockProducts(Fp8Products):
    """Blockwise products, for dimensions that are multiples of 128. A CPU, without fp8 products, multiplies in fp32."""

    alignment = BLOCK

    def measure(self, x: Tensor) -> None:
        return None

    def _rounded(self, x: Tensor, of_x: Tensor | None, dtype: torch.dtype) -> Rounded:
        data, undo = self._cast_rows(x.reshape(-1, BLOCK), E4M3)
        return Rounded(data.view(x.shape), undo.view(x.shape[0], -1))

    def _rounded_weight(self, matrix: Tensor, of_weight: Tensor | None) -> Rounded:
        squares = matrix.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2)
        data, undo = self._cast_rows(squares.reshape(-1, BLOCK * BLOCK), E4M3)
        data = data.view(squares.shape).transpose(1, 2).reshape(matrix.shape)
        return Rounded(data, undo.view(squares.shape[:2]))

    def _product(
        self, a: Rounded, b: Rounded, dtype: torch.dtype, *, bias: Tensor | None = None, use_fast_accum: bool = False
    ) -> Tensor:
        if a.data.device.type == "cpu":
            y = (_restored(a) @ _restored(b).t()).to(dtype)
        elif b.undo.shape[0] == b.data.shape[0]:
            y = _scaled_mm(a, b, _columns_first(b.undo), F.ScalingType.BlockWise1x128, dtype)
        else:  # for 128 x 128 blocks torch requires columns padded to a multiple of four scales
            scales = F.pad(b.undo, (0, -b.undo.shape[1] % 4)).t()
            y = _scaled_mm(a, b, scales, F.ScalingType.BlockWise128x128, dtype)
        return y if bias is None else y.add_(bias)


def _scaled_mm(a: Rounded, b: Rounded, scales: Tensor, recipe: F.ScalingType, dtype: torch.dtype) -> Tensor:
    by_row = F.ScalingType.BlockWise1x128
    return F.scaled_mm(a.data, b.data.t(), _columns_first(a.undo), by_row, scales, recipe, output_dtype=dtype)


def _columns_first(scales: Tensor) -> Tensor:
    return scales.t().contiguous().t()


def _restored(factor: Rounded) -> Tensor:
    """Convert back to fp32, without rounding."""
    data, undo = factor
    for dim in range(2):
        undo = undo.repeat_interleave(data.shape[dim] // undo.shape[dim], dim)
    return data.float() * undo


INTEGER_CHUNK = 128 * INTEGER_BLOCK
"""Elements that go through all passes together, so that they stay in a CPU's cache."""

LARGEST_INTEGER = 127

TINY_BLOCK = 1e-30
"""A block of smaller values is encoded as zeros, because the inverse of its scale could overflow."""


@dataclass
class Integers:
    """Encoder and decoder of `size` values.

    In a block of x, s = max|x|/127 and q = round(x/s), so |x - s·q| <= s/2 and 0 stays 0. The encoded row contains all
    s in the type of the values, then all q."""

    size: int
    dtype: torch.dtype
    device: torch.device
    _chunks: list[tuple[int, int, int]] = field(init=False)
    """(start, stop, elements per block)."""
    _scratch: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        whole = self.size // INTEGER_BLOCK * INTEGER_BLOCK
        step = INTEGER_CHUNK if self.device.type == "cpu" else max(whole, 1)
        self._chunks = [(start, min(start + step, whole), INTEGER_BLOCK) for start in range(0, whole, step)]
        if whole < self.size:
            self._chunks.append((whole, self.size, self.size - whole))
        widest = max(stop - start for start, stop, _ in self._chunks)
        self._scratch = torch.empty(widest, dtype=self.dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        return integer_bytes(self.size, self.dtype.itemsize)

    def _split(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a row's integers and scales; the row must be aligned for the scales' type."""
        return row[-self.size :].view(torch.int8), row[: -self.size].view(self.dtype)

    def encode(self, values: torch.Tensor, row: torch.Tensor, *, more: torch.Tensor | None = None) -> None:
        """Encode `values` [size] into the integers and scales of `row` [nbytes], uint8; `values` becomes the error.

        Args:
            more: added to `values` first."""
        codes, scales = self._split(row)
        for start, stop, block in self._chunks:
            x = values[start:stop].view(-1, block)
            y = self._scratch[: stop - start].view(-1, block)
            if more is not None:
                x.add_(more[start:stop].view(-1, block))
            torch.abs(x, out=y)
            scale = y.amax(dim=1, keepdim=True).div_(LARGEST_INTEGER)
            # Not ">=": a NaN must stay a NaN, to show in the gradient norm.
            scale.masked_fill_(scale < TINY_BLOCK / LARGEST_INTEGER, 0.0)
            inverse = scale.reciprocal()
            inverse.masked_fill_(scale == 0.0, 0.0)
            torch.mul(x, inverse, out=y)
            codes[start:stop].view(-1, block).copy_(y.round_())
            x.sub_(y.mul_(scale))
            scales[start // INTEGER_BLOCK : -(-stop // INTEGER_BLOCK)].copy_(scale.view(-1))

    def decode(self, row: torch.Tensor, values: torch.Tensor, *, factor: float | None = None) -> None:
        """Write the decoded row into `values` [size]; with a factor, add factor times the decoded row to `values`."""
        codes, scales = self._split(row)
        if factor is not None:
            scales = scales * factor
        for start, stop, block in self._chunks:
            x = values[start:stop].view(-1, block)
            y = x if factor is None else self._scratch[: stop - start].view(-1, block)
            y.copy_(codes[start:stop].view(-1, block))
            y.mul_(scales[start // INTEGER_BLOCK : -(-stop // INTEGER_BLOCK)].view(-1, 1))
            if factor is not None:
                x.add_(y)
