"""Triton kernels for the gradients of LayerNorm and RMSNorm, of a tensor or of a residual sum.

Persistent programs loop over the rows; each sums its rows' gradients of weight and biases in fp32 (fp64 for fp64). A
small sum over the programs follows, in the same order every run."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.triton.launch import (
    Tile,
    accumulator,
    multiprocessors,
    next_power_of_2,
    row_tile,
    sum_of_programs,
)

REGISTERS = 128
"""Registers per thread of `backward_kernel`, so that a multiprocessor with 65 536 runs RESIDENT_WARPS at once."""

RESIDENT_WARPS = 16


@triton.jit
def row_sums_kernel(
    inputs: tl.tuple,
    strides: tl.tuple,
    weight: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """Compute sums [1 or 2, rows]: means over a long row of g · normed and of g, for g = dy · (OFFSET + weight)."""
    dy, _, z, _, statistics = inputs
    row = tl.program_id(0)
    place = row.to(tl.int64)
    inverse = tl.load(statistics + row)
    mean = tl.load(statistics + rows + row) if CENTRED else 0.0
    along = tl.zeros([BLOCK], ACC)
    plain = tl.zeros([BLOCK], ACC)
    start = tl.zeros([], tl.int32)
    while start < N:
        column = start + tl.arange(0, BLOCK)
        inside = column < N
        g = tl.load(dy + place * strides[0] + column, mask=inside, other=0.0).to(ACC)
        g *= tl.load(weight + column, mask=inside, other=0.0).to(ACC) + OFFSET
        value = tl.load(z + place * strides[2] + column, mask=inside, other=0.0).to(ACC)
        along += g * ((value - mean) * inverse)
        plain += g
        start += BLOCK
    tl.store(sums + row, tl.sum(along, 0) / N)
    if CENTRED:
        tl.store(sums + rows + row, tl.sum(plain, 0) / N)


@triton.jit
def _row_mean(values: tl.tensor, sums: tl.tensor, row: tl.tensor, rows: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """Return row means [ROWS, 1]: from `sums` if given, else of `values`, which are 0 outside the row."""
    if sums is not None:
        mean = tl.load(sums + row, mask=row < rows, other=0.0)
    else:
        mean = tl.sum(values, 1) / N
    return mean[:, None]


@triton.jit
def _inside(row: tl.tensor, column: tl.tensor, rows: tl.tensor, N: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """Return the mask of valid elements; a single row is always valid."""
    inside = (column < N)[None, :]
    if ROWS > 1:
        inside = inside & (row < rows)[:, None]
    return inside


@triton.jit
def _z_and_dy(
    inputs: tl.tuple,
    strides: tl.tuple,
    first: tl.tensor,
    rows: tl.tensor,
    column: tl.tensor,
    N: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load the rows of the next loop iteration; after the last one the values are unused."""
    row = first + tl.arange(0, ROWS)
    if ROWS == 1:
        row = tl.minimum(row, rows - 1)
    inside, place = _inside(row, column, rows, N, ROWS), row.to(tl.int64)[:, None]
    z = tl.load(inputs[2] + place * strides[2] + column[None, :], mask=inside, other=0.0)
    return z, tl.load(inputs[0] + place * strides[0] + column[None, :], mask=inside, other=0.0)


@triton.jit
def backward_kernel(
    inputs: tl.tuple,
    strides: tl.tuple,
    weight: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tuple,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    N: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """Compute dz = the norm's gradient + dtotal and dbranch = keep · dz · SCALE (if any), in a strided loop over rows.

    partials [kinds, programs, N]: this program's sums over its rows of the gradients of the weight, of the norm's bias
    (CENTRED) and of the branch's (BIAS). With `sums` the program's second index selects BLOCK columns."""
    _, dtotal, _, keep, statistics = inputs
    dz, dbranch, partials = outputs
    programs = tl.num_programs(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    dweight = tl.zeros([ROWS, BLOCK], ACC)
    dnorm_bias = tl.zeros([ROWS, BLOCK], ACC)
    dbias = tl.zeros([ROWS, BLOCK], ACC)
    first = tl.program_id(0) * ROWS
    if AHEAD:
        z_next, dy_next = _z_and_dy(inputs, strides, first, rows, column, N, ROWS)
    while first < rows:
        row = first + tl.arange(0, ROWS)
        here = _inside(row, column, rows, N, ROWS)
        place = row.to(tl.int64)[:, None]
        dense = place * N + column[None, :]
        following = first + programs * ROWS
        if AHEAD:  # prefetch the next iteration's rows during this one
            normed, g = z_next.to(ACC), dy_next.to(ACC)
            z_next, dy_next = _z_and_dy(inputs, strides, following, rows, column, N, ROWS)
        else:
            z_here, dy_here = _z_and_dy(inputs, strides, first, rows, column, N, ROWS)
            normed, g = z_here.to(ACC), dy_here.to(ACC)
        first = following
        inverse = tl.load(statistics + row, mask=row < rows, other=0.0)[:, None]
        if CENTRED:
            normed -= tl.load(statistics + rows + row, mask=row < rows, other=0.0)[:, None]
            dnorm_bias += g
        normed *= inverse
        dweight += g * normed
        # Loaded from the cache in each iteration, because registers have no space for it.
        factor = tl.load(weight + column, mask=inside, other=0.0).to(ACC) + OFFSET
        g = g * factor[None, :]
        out = g - normed * _row_mean(g * normed, sums, row, rows, N)
        if CENTRED:
            out -= _row_mean(g, sums, row + rows, 2 * rows, N)
        out *= inverse
        if dtotal is not None:
            out += tl.load(dtotal + place * strides[1] + column[None, :], mask=here, other=0.0).to(ACC)
        tl.store(dz + dense, out.to(dz.dtype.element_ty), mask=here)
        if keep is not None:
            out = tl.where(tl.load(keep + dense, mask=here, other=0) != 0, out * SCALE, 0.0)
        elif SCALE != 1.0:
            out *= SCALE
        if dbranch is not None:
            tl.store(dbranch + dense, out.to(dbranch.dtype.element_ty), mask=here)
        if BIAS:
            dbias += out  # 0 for rows beyond the last, because `inverse` is 0
    partials += tl.program_id(0) * N + column
    tl.store(partials, tl.sum(dweight, 0), mask=inside)
    if CENTRED:
        partials += programs * N
        tl.store(partials, tl.sum(dnorm_bias, 0), mask=inside)
    if BIAS:
        tl.store(partials + programs * N, tl.sum(dbias, 0), mask=inside)


@functools.cache
def backward_tile(n: int, itemsize: int) -> Tile:
    """Return the tile of rows of n elements; it is less than a row only if `row_sums_kernel` runs first."""
    each = 32 // itemsize  # two 16-byte loads per thread and tensor
    block = next_power_of_2(n)
    if block > 16 * 32 * each:
        return Tile(1, 4 * 32 * each, 4)
    if block >= 4 * 32 * each:
        return Tile(1, block, block // (32 * each))
    return Tile(max(4 * 32 * each // 2 // block, 1), block, 4)


def backward_grid(rows: int, n: int, tile: Tile, device: torch.device) -> tuple[int, int]:
    """Return (programs along rows, programs along columns), at most what the device runs at once."""
    across = triton.cdiv(n, tile.block)
    resident = multiprocessors(device) * RESIDENT_WARPS // tile.warps
    return min(triton.cdiv(rows, tile.rows), max(resident // across, 1)), across


def gradients(
    dy: Tensor,
    dtotal: Tensor | None,
    z: Tensor,
    weight: Tensor,
    keep: Tensor | None,
    scale: float,
    statistics: Tensor,
    offset: float,
    *,
    branch: torch.dtype | None = None,
    bias: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (dz, dbranch, sums [kinds, n] in weight's type, promoted with `bias`) of `backward_kernel` for the outputs of `normalise`.

    Args:
        dy, dtotal, z: [rows, n] with contiguous rows.
        branch: type of the branch's gradient, if it is a different tensor from dz.
        bias: type of the branch's bias; the sum of its gradient is then the last of the sums."""
    rows, n = z.shape
    centred = statistics.shape[0] == 2
    kinds = 1 + centred + (bias is not None)
    dtype = weight.dtype if bias is None else torch.promote_types(weight.dtype, bias)
    exact = torch.promote_types(z.dtype, torch.float32)
    dz = torch.empty((rows, n), dtype=z.dtype, device=z.device)
    dbranch = None if branch is None else torch.empty((rows, n), dtype=branch, device=z.device)
    if rows == 0:
        return dz, dbranch, torch.zeros((kinds, n), dtype=dtype, device=z.device)
    tile = backward_tile(n, z.element_size())
    grid = backward_grid(rows, n, tile, z.device)
    constants = {"OFFSET": offset, "CENTRED": centred, "N": n, "ACC": accumulator(z.dtype)}
    inputs = dy, dtotal, z, keep, statistics
    strides = dy.stride(0), 0 if dtotal is None else dtotal.stride(0), z.stride(0)
    sums = None
    if tile.block < n:
        sums, wide = torch.empty_like(statistics), row_tile(n)
        tensors = (inputs, strides, weight, sums, rows)
        row_sums_kernel[(rows,)](*tensors, **constants, BLOCK=wide.block, num_warps=wide.warps)
    partials = torch.empty((kinds, grid[0], n), dtype=exact, device=z.device)
    backward_kernel[grid](
        *(inputs, strides, weight, sums, rows, (dz, dbranch, partials)),
        **constants,
        SCALE=scale,
        BIAS=bias is not None,
        AHEAD=tile.warps < 16 or kinds < 3,  # with all three sums, prefetching would spill registers
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
        maxnreg=REGISTERS,
    )
    return dz, dbranch, sum_of_programs(partials, dtype)
