"""Triton kernels of MLP activations: one pass each in forward and backward; gated ones save only their input."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.bases import Function
from megalite.kernels.triton.launch import Tile, accumulator, multiprocessors, next_power_of_2, rows_of, warps
from megalite.kernels.triton.partial_sums import sum_of_programs

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

    One pass computes the gradients of bias and x, with the same order of sums in every run on a device.
    """
    return _BiasGelu.apply(x, bias, _gelu(tanh, x.dtype))


def swiglu(x: Tensor) -> Tensor:
    """See `layer_ops.swiglu`; saves only x."""
    return _Gated.apply(x, SILU.value)


def geglu(x: Tensor, *, tanh: bool = False) -> Tensor:
    """See `layer_ops.geglu`; saves only x."""
    return _Gated.apply(x, _gelu(tanh, x.dtype))
