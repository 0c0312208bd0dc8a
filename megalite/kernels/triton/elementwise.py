"""Triton kernels without sums along rows: activations of MLPs, RoPE (arXiv 2104.09864) in its half-split form, dropout masks.

Activations and RoPE are one pass each in forward and backward; gated activations save only their input."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

from megalite.kernels.bases import Function
from megalite.kernels.layer_ops import DROPOUT_COLUMNS, drop_threshold
from megalite.kernels.triton.launch import (
    Tile,
    accumulator,
    multiprocessors,
    next_power_of_2,
    rows_of,
    sum_of_programs,
    warps,
)

SILU, ERF, TANH, HALF_ERF = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
RESIDENT = 8  # programs of bias_gelu's backward per multiprocessor, limited by registers


@triton.jit
def _activate(z: tl.tensor, KIND: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return (f(z), f'(z)); the compiler removes an unused one."""
    if KIND == SILU:
        share = tl.sigmoid(z)
        return z * share, share * (1.0 + z * (1.0 - share))
    elif KIND == TANH:  # (1 + tanh(u)) / 2 = sigmoid(2u), as the square of a root, which costs less than a quotient
        root = tl.rsqrt(1.0 + tl.exp2(-2.302208198144325 * z * (1.0 + 0.044715 * z * z)))
        share = root * root
        slope = 1.5957691216057308 * (1.0 + 0.134145 * z * z)
        return z * share, share + z * share * (1.0 - share) * slope
    elif KIND == HALF_ERF:
        # tl.erf limits the rate. For half types this is precise enough: the tail of the normal distribution is its
        # density times a polynomial, fitted from 0 to 14 with a relative error of at most 3e-6.
        size = tl.abs(z)
        near = tl.rsqrt(1.0 + size * (0.57 + 0.093 * size))
        powers = 0.1121058396525132 + near * (0.05237590181342831 + near * 0.10155085433016785)
        powers = 0.1217506247280371 + near * (0.11221780032685616 + near * powers)
        density = tl.exp2(-0.7213475204444817 * z * z)
        tail = density * (near * powers)
        share = tl.where(z > 0.0, 1.0 - tail, tail)
        return tl.maximum(z, 0.0) - tl.minimum(size, 30.0) * tail, share + z * (0.3989422804014327 * density)
    else:
        share = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        return z * share, share + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)


@triton.jit
def _columns(rows: tl.tensor, first: tl.tensor, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr) -> tuple:
    """Return (columns [BLOCK], rows [ROWS, 1], mask) of a program; the grid runs along rows first."""
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(0) % tl.cdiv(N, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    return column, row.to(tl.int64)[:, None], (row < rows)[:, None] & (column < N)[None, :]


@triton.jit
def _with_bias(z: tl.tensor, bias: tl.tensor, column: tl.tensor, N: tl.constexpr, ACC: tl.constexpr) -> tl.tensor:
    if bias is not None:
        z += tl.load(bias + column, mask=column < N, other=0.0).to(ACC)[None, :]
    return z


@triton.jit
def activation_kernel(
    x: tl.tensor,
    bias: tl.tensor,
    dy: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    strides: tl.tuple,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """Compute out [rows, N] = f(x + bias); GATED: f(gate)·up of x [rows, 2N], or with dy its gradient [rows, 2N]."""
    column, place, here = _columns(rows, tl.program_id(0) // tl.cdiv(N, BLOCK) * ROWS, N, ROWS, BLOCK)
    gate_at = x + place * strides[0] + column[None, :]
    z = tl.load(gate_at, mask=here, other=0.0).to(ACC)
    if GATED:
        up = tl.load(gate_at + N, mask=here, other=0.0).to(ACC)
        value, slope = _activate(z, KIND)
        if dy is None:
            tl.store(out + place * N + column[None, :], (value * up).to(out.dtype.element_ty), mask=here)
        else:
            g = tl.load(dy + place * strides[1] + column[None, :], mask=here, other=0.0).to(ACC)
            out_at = out + place * (2 * N) + column[None, :]
            tl.store(out_at, (g * up * slope).to(out.dtype.element_ty), mask=here)
            tl.store(out_at + N, (g * value).to(out.dtype.element_ty), mask=here)
    else:
        value, _ = _activate(_with_bias(z, bias, column, N, ACC), KIND)
        tl.store(out + place * N + column[None, :], value.to(out.dtype.element_ty), mask=here)


@triton.jit
def bias_gelu_backward_kernel(
    dy: tl.tensor,
    x: tl.tensor,
    bias: tl.tensor,
    dx: tl.tensor,
    partials: tl.tensor,
    rows: tl.tensor,
    strides: tl.tuple,
    KIND: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """Compute dx = dy · gelu'(x + bias) in a strided loop over tiles; partials [programs, N]: its sums over rows."""
    across = tl.cdiv(N, BLOCK)
    share = tl.program_id(0) // across
    first = share * ROWS
    total = tl.zeros([ROWS, BLOCK], ACC)
    while first < rows:
        column, place, here = _columns(rows, first, N, ROWS, BLOCK)
        z = tl.load(x + place * strides[1] + column[None, :], mask=here, other=0.0).to(ACC)
        g = tl.load(dy + place * strides[0] + column[None, :], mask=here, other=0.0).to(ACC)
        _, slope = _activate(_with_bias(z, bias, column, N, ACC), KIND)
        g *= slope
        tl.store(dx + place * N + column[None, :], g.to(dx.dtype.element_ty), mask=here)
        total += g
        first += tl.num_programs(0) // across * ROWS
    if bias is not None:
        column, _, _ = _columns(rows, first, N, ROWS, BLOCK)
        tl.store(partials + share * N + column, tl.sum(total, 0), mask=column < N)


@functools.cache
def activation_tile(n: int, itemsize: int) -> Tile:
    """Return tiles of two 16-byte loads per thread in 4 warps: part of one row, or several short rows."""
    elements = 4 * 32 * 32 // itemsize
    block = min(next_power_of_2(n), elements)
    return Tile(elements // block, block, warps(elements, 32 // itemsize))


class _BiasGelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
        flat = rows_of(x)
        ctx.save_for_backward(flat, bias)
        ctx.kind = kind
        return _activated(flat, bias, None, kind, flat.shape[1], flat.shape[1]).view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, bias = ctx.saved_tensors
        (rows, n), flat = x.shape, rows_of(dy)
        dx = torch.empty((rows, n), dtype=x.dtype, device=x.device)
        tile = activation_tile(n, x.element_size())
        across = triton.cdiv(n, tile.block)
        resident = multiprocessors(x.device) * RESIDENT // across
        sharing = min(triton.cdiv(rows, tile.rows), max(resident, 1))
        partials = None
        if bias is not None:
            exact = torch.promote_types(x.dtype, torch.float32)
            partials = torch.empty((1, sharing, n), dtype=exact, device=x.device)
        if x.numel():
            tensors = (flat, x, bias, dx, partials, rows, (flat.stride(0), x.stride(0)))
            bias_gelu_backward_kernel[(sharing * across,)](*tensors, **_constants(ctx.kind, n, tile, x.dtype))
        return dx.view(dy.shape), None if partials is None else sum_of_programs(partials, bias.dtype)[0], None


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: int) -> Tensor:
        flat = rows_of(x)
        ctx.save_for_backward(flat)
        ctx.kind, n = kind, flat.shape[1] // 2
        return _activated(flat, None, None, kind, n, n).view(*x.shape[:-1], n)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        n = x.shape[1] // 2
        return _activated(x, None, rows_of(dy), ctx.kind, n, 2 * n).view(*dy.shape[:-1], 2 * n), None


def _activated(x: Tensor, bias: Tensor | None, dy: Tensor | None, kind: int, n: int, width: int) -> Tensor:
    """Run `activation_kernel` on x [rows, n], or with a gate [rows, 2n] -> [rows, width]."""
    rows = x.shape[0]
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if out.numel():
        tile = activation_tile(n, x.element_size())
        tensors = (x, bias, dy, out, rows, (x.stride(0), 0 if dy is None else dy.stride(0)))
        constants = _constants(kind, n, tile, x.dtype)
        activation_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.block),)](
            *tensors, GATED=x.shape[1] > n, **constants
        )
    return out


def _constants(kind: int, n: int, tile: Tile, dtype: torch.dtype) -> dict[str, Any]:
    sizes = {"N": n, "ROWS": tile.rows, "BLOCK": tile.block}
    return {"KIND": kind, **sizes, "ACC": accumulator(dtype), "num_warps": tile.warps}


def _gelu(tanh: bool, dtype: torch.dtype) -> int:
    if tanh:
        return TANH.value
    return HALF_ERF.value if dtype.itemsize == 2 else ERF.value


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, tanh: bool = False) -> Tensor:
    """See `layer_ops.bias_gelu`: computed in fp32, in fp64 for fp64, and rounded once; saves x.

    One pass computes the gradients of bias and x, with the same order of sums in every run on a device."""
    return _BiasGelu.apply(x, bias, _gelu(tanh, x.dtype))


def swiglu(x: Tensor) -> Tensor:
    """See `layer_ops.swiglu`; saves only x."""
    return _Gated.apply(x, SILU.value)


def geglu(x: Tensor, *, tanh: bool = False) -> Tensor:
    """See `layer_ops.geglu`; saves only x."""
    return _Gated.apply(x, _gelu(tanh, x.dtype))


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

    x may be a slice of the fused projection: only its last stride must be 1. The tables get no gradient."""
    return _Rope.apply(x, cos, sin)


CALLS = 512
"""Generator calls per program, for dropout masks."""


@triton.jit
def _two(words: tl.tensor, below: tl.tensor) -> tl.tensor:
    """Return one byte for each half of a 64-bit word, the low half first."""
    low = ((words & 0xFFFFFFFF) >= below).to(tl.uint64)
    high = ((words >> 32) >= below).to(tl.uint64)
    return low | (high << 8)


@triton.jit(do_not_specialize=["key", "sample", "first_head"])
def dropout_mask_kernel(
    keep: tl.tensor,
    rows: tl.tensor,
    strides: tl.tuple,
    key: tl.tensor,
    sample: tl.tensor,
    first_head: tl.tensor,
    below: tl.tensor,
    count: tl.tensor,
    heads: tl.tensor,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Draw eight elements of a row per generator call; WHOLE: store them as one int64 (see `dropout_mask`)."""
    blocks: tl.constexpr = (WIDTH + 7) // 8
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = index // blocks, index % blocks
    here = row < count
    one, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    place = tl.load(rows + row, mask=here, other=0)
    first = (place * blocks + column + 1).to(tl.uint64)
    nothing = first * 0
    third = nothing + (first_head + head).to(tl.uint64)
    own = nothing + (sample.to(tl.int64) + one).to(tl.uint64)
    a, b, c, d = philox_impl(first, nothing, third, nothing, nothing + key.to(tl.uint64), own)
    limit = nothing + below.to(tl.uint64)
    eight = _two(a, limit) | (_two(b, limit) << 16) | (_two(c, limit) << 32) | (_two(d, limit) << 48)
    at = keep + one.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]
    if WHOLE:
        tl.store(at + column, eight.to(tl.int64, bitcast=True), mask=here)
    else:
        for k in tl.static_range(8):
            inside = here & (column * 8 + k < WIDTH)
            tl.store(at + column * 8 + k, ((eight >> (8 * k)) & 1).to(tl.uint8), mask=inside)


def dropout_mask(keep: Tensor, rows: Tensor, *, key: int, samples: Sequence[int], first_head: int, p: float) -> None:
    """See `megalite.kernels.layer_ops.dropout_mask`; the sample indices must be consecutive."""
    assert list(samples) == list(range(samples[0], samples[0] + len(samples))), samples
    _, heads, count, width = keep.shape
    whole = width % DROPOUT_COLUMNS == 0 and all(stride % DROPOUT_COLUMNS == 0 for stride in keep.stride()[:3])
    elements = keep.view(torch.int64 if whole else torch.uint8)
    grid = triton.cdiv(count * -(-width // DROPOUT_COLUMNS), CALLS), len(samples) * heads
    dropout_mask_kernel[grid](
        *(elements, rows, elements.stride()[:3], key, samples[0], first_head, drop_threshold(p), count, heads),
        WIDTH=width,
        WHOLE=whole,
        BLOCK=CALLS,
        num_warps=warps(CALLS, per_thread=4),
    )
