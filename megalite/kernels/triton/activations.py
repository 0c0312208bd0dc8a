"""MLP nonlinearities by Triton kernels, one pass each way; the gated ones keep their input alone for the backward."""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.triton.launch import (
    accumulator,
    accumulator_dtype,
    multiprocessors,
    next_power_of_2,
    rows_of,
    warps,
)

SILU, ERF, TANH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
RESIDENT = 7  # programs of bias_gelu's backward a multiprocessor, as many as its registers hold


@triton.jit
def _activate(z: tl.tensor, KIND: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(f(z), f'(z)); what is not used is not computed."""
    if KIND == SILU:
        share = tl.sigmoid(z)
        return z * share, share * (1.0 + z * (1.0 - share))
    elif KIND == TANH:  # (1 + tanh(u)) / 2 = sigmoid(2u)
        share = tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * z * z)
        return z * share, share + z * share * (1.0 - share) * slope
    else:
        share = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        return z * share, share + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)


@triton.jit
def bias_gelu_kernel(
    x: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    KIND: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """y = gelu(x + bias) for ROWS rows and BLOCK columns; neighbours in a row are neighbours in the grid."""
    across = tl.cdiv(N, BLOCK)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (column < N)[None, :]
    place = row.to(tl.int64)[:, None]
    z = tl.load(x + place * stride + column[None, :], mask=here, other=0.0).to(ACC)
    if bias is not None:
        z += tl.load(bias + column, mask=column < N, other=0.0).to(ACC)[None, :]
    value, _ = _activate(z, KIND)
    tl.store(y + place * N + column[None, :], value.to(y.dtype.element_ty), mask=here)


@triton.jit
def bias_gelu_backward_kernel(
    dy: tl.tensor,
    x: tl.tensor,
    bias: tl.tensor,
    dx: tl.tensor,
    partials: tl.tensor,
    rows: tl.tensor,
    dy_stride: tl.tensor,
    x_stride: tl.tensor,
    KIND: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """dx = dy · gelu'(x + bias) in BLOCK columns of every so many tiles of ROWS rows; partials [programs, N]: its sums."""
    across = tl.cdiv(N, BLOCK)
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    sharing = tl.num_programs(0) // across
    first = tl.program_id(0) // across * ROWS
    total = tl.zeros([ROWS, BLOCK], ACC)
    while first < rows:
        row = first + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & (column < N)[None, :]
        place = row.to(tl.int64)[:, None]
        z = tl.load(x + place * x_stride + column[None, :], mask=here, other=0.0).to(ACC)
        g = tl.load(dy + place * dy_stride + column[None, :], mask=here, other=0.0).to(ACC)
        if bias is not None:
            z += tl.load(bias + column, mask=column < N, other=0.0).to(ACC)[None, :]
        _, slope = _activate(z, KIND)
        g *= slope
        tl.store(dx + place * N + column[None, :], g.to(dx.dtype.element_ty), mask=here)
        total += g
        first += sharing * ROWS
    if bias is not None:
        place = tl.program_id(0) // across * N + column
        tl.store(partials + place, tl.sum(total, 0), mask=column < N)


@triton.jit
def gated_kernel(
    x: tl.tensor,
    dy: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    dy_stride: tl.tensor,
    KIND: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """out [rows, N] = f(gate) · up of x [rows, 2N]; with dy its gradient instead, out [rows, 2N]."""
    across = tl.cdiv(N, BLOCK)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (column < N)[None, :]
    place = row.to(tl.int64)[:, None]
    gate_at = x + place * x_stride + column[None, :]
    gate = tl.load(gate_at, mask=here, other=0.0).to(ACC)
    up = tl.load(gate_at + N, mask=here, other=0.0).to(ACC)
    value, slope = _activate(gate, KIND)
    if dy is None:
        tl.store(out + place * N + column[None, :], (value * up).to(out.dtype.element_ty), mask=here)
    else:
        g = tl.load(dy + place * dy_stride + column[None, :], mask=here, other=0.0).to(ACC)
        out_at = out + place * (2 * N) + column[None, :]
        tl.store(out_at, (g * up * slope).to(out.dtype.element_ty), mask=here)
        tl.store(out_at + N, (g * value).to(out.dtype.element_ty), mask=here)


class Cut(NamedTuple):
    """How [rows, n] is shared out among programs that know no whole rows."""

    rows: int
    block: int
    across: int  # blocks to a row
    warps: int


@functools.cache
def cut(n: int, itemsize: int) -> Cut:
    """Tiles of two loads of 16 bytes per thread in 4 warps: a piece of one row, or several short rows."""
    elements = 4 * 32 * 32 // itemsize
    block = min(next_power_of_2(n), elements)
    return Cut(elements // block, block, triton.cdiv(n, block), warps(elements, 32 // itemsize))


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
        flat = rows_of(x)
        rows, n = flat.shape
        y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
        if y.numel():
            tile = cut(n, x.element_size())
            bias_gelu_kernel[(triton.cdiv(rows, tile.rows) * tile.across,)](
                *(flat, bias, y, rows, flat.stride(0)), **_constants(kind, n, tile, x.dtype)
            )
        ctx.save_for_backward(flat, bias)
        ctx.kind = kind
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, bias = ctx.saved_tensors
        (rows, n), flat = x.shape, rows_of(dy)
        dx = torch.empty((rows, n), dtype=x.dtype, device=x.device)
        tile = cut(n, x.element_size())
        resident = multiprocessors(x.device) * RESIDENT // tile.across
        sharing = min(triton.cdiv(rows, tile.rows), max(resident, 1))
        partials = None
        if bias is not None:
            partials = torch.empty((sharing, n), dtype=accumulator_dtype(x.dtype), device=x.device)
        if x.numel():
            bias_gelu_backward_kernel[(sharing * tile.across,)](
                *(flat, x, bias, dx, partials, rows, flat.stride(0), x.stride(0)),
                **_constants(ctx.kind, n, tile, x.dtype),
            )
        return dx.view(dy.shape), None if partials is None else partials.sum(0).to(bias.dtype), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: int) -> Tensor:
        flat = rows_of(x)
        ctx.save_for_backward(flat)
        ctx.kind = kind
        y = _gated(flat, None, kind)
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return _gated(x, rows_of(dy), ctx.kind).view(*dy.shape[:-1], x.shape[1]), None


def _gated(x: Tensor, dy: Tensor | None, kind: int) -> Tensor:
    rows, n = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, n if dy is None else 2 * n), dtype=x.dtype, device=x.device)
    if out.numel():
        tile = cut(n, x.element_size())
        gated_kernel[(triton.cdiv(rows, tile.rows) * tile.across,)](
            *(x, dy, out, rows, x.stride(0), 0 if dy is None else dy.stride(0)), **_constants(kind, n, tile, x.dtype)
        )
    return out


def _constants(kind: int, n: int, tile: Cut, dtype: torch.dtype) -> dict[str, Any]:
    sizes = {"N": n, "ROWS": tile.rows, "BLOCK": tile.block}
    return {"KIND": kind, **sizes, "ACC": accumulator(dtype), "num_warps": tile.warps}


def bias_gelu(x: Tensor, bias: Tensor | None, *, tanh: bool = False) -> Tensor:
    """See `layer_ops.bias_gelu`: computed in fp32, in fp64 for fp64, and rounded once; keeps x.

    The bias's gradient comes in the same pass as that of x, in the same order in every run on a device.
    """
    return _BiasGelu.apply(x, bias, TANH.value if tanh else ERF.value)


def swiglu(x: Tensor) -> Tensor:
    """See `layer_ops.swiglu`; keeps x alone."""
    return _Gated.apply(x, SILU.value)


def geglu(x: Tensor, *, tanh: bool = False) -> Tensor:
    """See `layer_ops.geglu`; keeps x alone."""
    return _Gated.apply(x, TANH.value if tanh else ERF.value)
