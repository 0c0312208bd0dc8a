"""Triton kernel for RoPE (arXiv 2104.09864) in its half-split form: one read and one write."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.bases import Function
from megalite.kernels.triton.launch import Tile, accumulator, next_power_of_2


@triton.jit
def rope_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    batch: tl.tensor,
    strides: tl.tuple,
    cos_strides: tl.tuple,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BACK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """Rotate ROWS heads by their positions' angles, or back with BACK; a row is (position, sequence, head)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    here = (row < rows)[:, None] & (column < HALF)
    token = row // HEADS
    position = (token // batch).to(tl.int64)
    sequence = (token % batch).to(tl.int64)
    angle = (position * cos_strides[0] + sequence * cos_strides[1])[:, None] + column
    c = tl.load(cos + angle, mask=here, other=0.0).to(ACC)
    s = tl.load(sin + angle, mask=here, other=0.0).to(ACC)
    if BACK:
        s = -s
    place = position * strides[0] + sequence * strides[1] + (row % HEADS).to(tl.int64) * strides[2]
    first_at = x + place[:, None] + column
    first = tl.load(first_at, mask=here, other=0.0).to(ACC)
    second = tl.load(first_at + HALF, mask=here, other=0.0).to(ACC)
    out_at = y + row.to(tl.int64)[:, None] * (2 * HALF) + column
    tl.store(out_at, (first * c - second * s).to(y.dtype.element_ty), mask=here)
    tl.store(out_at + HALF, (second * c + first * s).to(y.dtype.element_ty), mask=here)


@functools.cache
def rope_tile(half: int, itemsize: int) -> Tile:
    """Return the heads per program: one 16-byte load per thread, half and tensor in 2 warps."""
    block = next_power_of_2(half)
    return Tile(max(2 * 32 * 16 // itemsize // block, 1), block, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    length, batch, heads, size = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        rows, half = length * batch * heads, size // 2
        tile = rope_tile(half, x.element_size())
        rope_kernel[(triton.cdiv(rows, tile.rows),)](
            *(x, cos, sin, y, rows, batch, x.stride()[:3], (cos.stride(0), 0 if cos.shape[1] == 1 else cos.stride(1))),
            HEADS=heads,
            HALF=half,
            BACK=back,
            ROWS=tile.rows,
            BLOCK=tile.block,
            ACC=accumulator(x.dtype),
            num_warps=tile.warps,
        )
    return y


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _rotate(dy, *ctx.saved_tensors, back=True), None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `layer_ops.apply_rope`: computed in fp32, in fp64 for fp64.

    x may be a slice of the fused projection: only its last stride must be 1. The tables get no gradient.
    """
    return _Rope.apply(x, cos, sin)
