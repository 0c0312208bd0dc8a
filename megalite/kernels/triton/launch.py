"""What the launchers of all Triton kernels share: sizes of tiles, warps and grids as pure functions of shapes."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run in Triton's interpreter, which is settled when their modules are imported."""

WIDEST_BLOCK = 8192
"""Elements of a row that one program holds in registers at a time; longer rows are gone over in a loop."""

TILE = 2048  # elements that a program takes at once where rows are shorter than that


class Tile(NamedTuple):
    """What one program holds at a time."""

    rows: int  # rows, a power of two
    block: int  # columns, a power of two; where less than the row's length, the program loops over them
    warps: int


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not less than n (1 for n <= 1)."""
    return 1 << max(n - 1, 0).bit_length()


def warps(elements: int, per_thread: int = 16) -> int:
    """Warps for a tile of so many elements, at so many per thread: a power of two from 1 to 16.

    Sixteen elements of a half type are two loads of 16 bytes; more than 16 warps would leave 64 registers per thread.
    """
    return min(max(next_power_of_2(elements // (32 * per_thread)), 1), 16)


@functools.cache
def row_tile(n: int) -> Tile:
    """The tile for work on rows of n elements: one row or part of one, or several short ones."""
    block = min(next_power_of_2(n), WIDEST_BLOCK)
    rows = max(TILE // block, 1)
    return Tile(rows, block, warps(rows * block))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; 2 where kernels are interpreted, so that a grid is small and yet has several programs."""
    if INTERPRETED:
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(pieces: int, device: torch.device, per_multiprocessor: int = 1) -> int:
    """Persistent programs that share so many pieces of work: as many as the device runs at once, none without work."""
    return min(pieces, multiprocessors(device) * per_multiprocessor)


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """The type that kernels compute in: fp64 for fp64, else fp32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """torch's name of `accumulator`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_of(x: Tensor) -> Tensor:
    """x [..., n] as [rows, n] with dense rows: a view where there is one, else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
