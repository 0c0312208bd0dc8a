"""Shared by Triton kernels: launch sizes as pure functions of shapes, and the sum over the programs of a kernel."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter; fixed when their modules are imported."""

WIDEST_BLOCK = 8192
"""Largest number of elements of a row in a program's registers; longer rows are processed in a loop."""

TILE = 2048  # elements per program for shorter rows


class Tile(NamedTuple):
    """Part of a matrix that one program processes at a time."""

    rows: int  # a power of two
    block: int  # columns, a power of two; if less than the row's length, the program loops over the row
    warps: int


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is not less than n (1 for n <= 1)."""
    return 1 << max(n - 1, 0).bit_length()


def warps(elements: int, per_thread: int = 16) -> int:
    """Return the number of warps for a tile, a power of two from 1 to 16.

    Sixteen elements of a half type are two 16-byte loads; more than 16 warps would leave 64 registers per thread."""
    return min(max(next_power_of_2(elements // (32 * per_thread)), 1), 16)


@functools.cache
def row_tile(n: int) -> Tile:
    """Return the tile for rows of n elements: one row or part of one, or several short ones."""
    block = min(next_power_of_2(n), WIDEST_BLOCK)
    rows = max(TILE // block, 1)
    return Tile(rows, block, warps(rows * block))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the device's multiprocessors, or 2 in the interpreter, for a small grid with several programs."""
    if INTERPRETED:
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(pieces: int, device: torch.device, per_multiprocessor: int = 1) -> int:
    """Return the number of persistent programs for `pieces` of work: at most what the device runs at once."""
    return min(pieces, multiprocessors(device) * per_multiprocessor)


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """Return the type in which kernels compute: fp64 for fp64, else fp32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def rows_of(x: Tensor) -> Tensor:
    """Return x [..., n] as [rows, n] with contiguous rows, a view if possible."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


PROGRAMS, COLUMNS, WARPS = 128, 16, 8
"""Tile of the sum. Its columns are few, so that there are enough tiles for all multiprocessors: a sum over 528 programs of
2048 columns takes 7 µs on an H200 where torch's takes 22."""


@triton.jit
def _sum_kernel(
    partials: tl.tensor,
    sums: tl.tensor,
    programs: tl.tensor,
    n: tl.tensor,
    PROGRAMS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    kind = tl.program_id(1)
    first = partials + kind.to(tl.int64) * programs * n
    total = tl.zeros([PROGRAMS, COLUMNS], partials.dtype.element_ty)
    start = tl.zeros([], tl.int32)
    while start < programs:
        program = start + tl.arange(0, PROGRAMS)[:, None]
        total += tl.load(first + program * n + column, mask=(program < programs) & (column < n), other=0.0)
        start += PROGRAMS
    total = tl.sum(total, 0, keep_dims=True)
    tl.store(sums + kind * n + column, total.to(sums.dtype.element_ty), mask=column < n)


def sum_of_programs(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sums [kinds, n], rounded to `dtype`, of contiguous partials [kinds, programs, n] in fp32 or fp64."""
    kinds, programs, n = partials.shape
    sums = torch.empty((kinds, n), dtype=dtype, device=partials.device)
    _sum_kernel[(triton.cdiv(n, COLUMNS), kinds)](
        *(partials, sums, programs, n), PROGRAMS=PROGRAMS, COLUMNS=COLUMNS, num_warps=WARPS
    )
    return sums
