"""Triton kernels for fp8: one pass finds the largest element, another scales, rounds and transposes; rowwise scales
need one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.quantization import E4M3, E5M2, Rounded
from megalite.kernels.triton.launch import Tile, row_tile, warps

_TOP = {E4M3: 8, E5M2: 15}
"""Exponent e of the type's largest number, 1.75·2^e."""
_LEAST, _THREE_QUARTERS, _INFINITE, _NAN = map(tl.constexpr, (27 << 23, 0x600000, 0x7F800000, 0x7FC00000))
"""fp32 bit patterns as integers: 2^-100, the fraction of 1.75, infinity, NaN."""


@triton.jit
def _magnitude(x: tl.tensor) -> tl.tensor:
    """Return |x| in fp32 as integers, which have the same order as the numbers, with NaN above all."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _tile(
    x: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor, columns: tl.tensor, strides: tl.tuple
) -> tl.tensor:
    at = x + row.to(tl.int64)[:, None] * strides[0] + column.to(tl.int64)[None, :] * strides[1]
    return tl.load(at, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def largest_kernel(
    x: tl.tensor,
    maximum: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    strides: tl.tuple,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute maximum = max(maximum, |x|) as integers; the order of atomics does not change a maximum."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = _magnitude(_tile(x, row, column, rows, columns, strides))
    tl.atomic_max(maximum, tl.max(tl.max(values, axis=1), axis=0), sem="relaxed")


@triton.jit
def cast_kernel(
    x: tl.tensor,
    largest: tl.tensor,
    y: tl.tensor,
    undo: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    span: tl.tensor,
    strides: tl.tuple,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute y = x·2^k and undo = 2^-k for `span` columns of ROWS rows; without `largest`, k is chosen per row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    within = tl.arange(0, BLOCK)
    first = tl.program_id(1) * span
    stop = tl.minimum(first + span, columns)
    most = tl.zeros((ROWS,), tl.int32)
    if largest is not None:
        most += tl.load(largest)
    else:
        start = first
        while start < stop:
            values = _magnitude(_tile(x, row, start + within, rows, columns, strides))
            most = tl.maximum(most, tl.max(values, axis=1))
            start += BLOCK
    # 2^k with the largest k for which most·2^k <= 1.75·2^TOP, from the numbers' bit fields.
    bounded = tl.maximum(most, _LEAST)
    above = ((bounded & 0x7FFFFF) > _THREE_QUARTERS).to(tl.int32)
    exponent = 254 + TOP - (bounded >> 23) - above
    finite = most < _INFINITE
    scale = tl.where(finite, exponent << 23, _NAN).to(tl.float32, bitcast=True)
    back = tl.where(finite, (254 - exponent) << 23, _NAN).to(tl.float32, bitcast=True)
    if largest is None:
        tl.store(undo + row, back, mask=row < rows)
    else:
        is_first = (row == 0) & (tl.program_id(1) == 0)
        tl.store(undo + row * 0, back, mask=is_first)
    start = first
    while start < stop:
        column = start + within
        values = _tile(x, row, column, rows, columns, strides).to(tl.float32) * scale[:, None]
        at = y + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(at, values.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])
        start += BLOCK


def _tile_of(x: Tensor, *, rowwise: bool) -> Tile:
    """Return a tile along rows for contiguous rows; for a transposed view one that is wide in both dimensions."""
    if x.stride(1) == 1:
        return row_tile(x.shape[1])
    rows, block = (16, 256) if rowwise else (64, 64)
    return Tile(rows, block, warps(rows * block))


def largest(x: Tensor) -> Tensor:
    """See `megalite.kernels.quantization.largest`, for x [n, i]."""
    maximum = torch.zeros((), dtype=torch.float32, device=x.device)
    tile = _tile_of(x, rowwise=False)
    grid = triton.cdiv(x.shape[0], tile.rows), triton.cdiv(x.shape[1], tile.block)
    if x.numel():
        largest_kernel[grid](
            *(x, maximum.view(torch.int32), *x.shape, x.stride()),
            ROWS=tile.rows,
            BLOCK=tile.block,
            num_warps=tile.warps,
        )
    return maximum


def cast(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Rounded:
    """See `megalite.kernels.quantization.cast`."""
    return _cast(x, largest.view(torch.int32), dtype)


def cast_rows(x: Tensor, dtype: torch.dtype) -> Rounded:
    """See `megalite.kernels.quantization.cast_rows`."""
    return _cast(x, None, dtype)


def _cast(x: Tensor, largest: Tensor | None, dtype: torch.dtype) -> Rounded:
    rowwise = largest is None
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    undo = torch.empty((x.shape[0], 1) if rowwise else (), dtype=torch.float32, device=x.device)
    tile = _tile_of(x, rowwise=rowwise)
    span = x.shape[1] if rowwise else tile.block
    grid = triton.cdiv(x.shape[0], tile.rows), triton.cdiv(x.shape[1], span)
    cast_kernel[grid](
        *(x, largest, y, undo, *x.shape, span, x.stride()),
        TOP=_TOP[dtype],
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
    )
    return Rounded(y, undo)
