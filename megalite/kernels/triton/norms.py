"""Triton kernels for LayerNorm and RMSNorm over the last dimension, of a tensor or of a residual sum.

A program reads its rows once and keeps them in registers, several short ones at a time; rows that are too long are read
twice in a loop. Statistics are fp32 (fp64 for fp64). The backward needs the input and one or two numbers per row."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.bases import Function
from megalite.kernels.triton.launch import accumulator, row_tile, rows_of
from megalite.kernels.triton.norm_backward import gradients


@triton.jit
def _summed(
    inputs: tl.tuple,
    strides: tl.tuple,
    row: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    SCALE: tl.constexpr,
    N: tl.constexpr,
    ACC: tl.constexpr,
) -> tl.tensor:
    """Return x + keep · (branch + bias) · SCALE at (row, column); 0 outside."""
    x, branch, bias, keep = inputs
    here = (row < rows) & (column < N)
    place = row.to(tl.int64)
    z = tl.load(x + place * strides[0] + column, mask=here, other=0.0).to(ACC)
    if branch is not None:
        part = tl.load(branch + place * strides[1] + column, mask=here, other=0.0).to(ACC)
        if bias is not None:
            part += tl.load(bias + column, mask=column < N, other=0.0).to(ACC)
        if keep is not None:
            kept = tl.load(keep + place * N + column, mask=here, other=0)
            part = tl.where(kept != 0, part * SCALE, 0.0)
        elif SCALE != 1.0:
            part *= SCALE
        z += part
    return z


@triton.jit
def _scaled(
    z: tl.tensor, parameters: tl.tuple, column: tl.tensor, OFFSET: tl.constexpr, N: tl.constexpr, ACC: tl.constexpr
) -> tl.tensor:
    """Return z · (OFFSET + weight) + norm_bias."""
    weight, norm_bias = parameters
    out = z * (tl.load(weight + column, mask=column < N, other=0.0).to(ACC) + OFFSET)
    if norm_bias is not None:
        out += tl.load(norm_bias + column, mask=column < N, other=0.0).to(ACC)
    return out


@triton.jit
def forward_kernel(
    inputs: tl.tuple,
    strides: tl.tuple,
    parameters: tl.tuple,
    outputs: tl.tuple,
    rows: tl.tensor,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """Compute y = norm(z) · (OFFSET + weight) + norm_bias for ROWS whole rows of z = x + keep · (branch + bias) ·
    SCALE.

    Without norm_bias the norm is RMSNorm; without branch z is x. `total` receives z rounded to its type, and the norm
    uses the rounded z. statistics [1 or 2, rows]: the reciprocal root and, for LayerNorm, the mean."""
    y, total, statistics = outputs
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    z = _summed(inputs, strides, row[:, None], column, rows, SCALE, N, ACC)
    real = row < rows
    here = real[:, None] & (column < N)
    place = row.to(tl.int64)[:, None] * N + column
    if total is not None:
        rounded = z.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=here)
        z = rounded.to(ACC)
    if parameters[1] is not None:
        mean = tl.sum(z, 1) / N
        tl.store(statistics + rows + row, mean, mask=real)
        z = tl.where(here, z - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(z * z, 1) / N + EPS)
    tl.store(statistics + row, inverse, mask=real)
    out = _scaled(z * inverse[:, None], parameters, column, OFFSET, N, ACC)
    tl.store(y + place, out.to(y.dtype.element_ty), mask=here)


@triton.jit
def wide_forward_kernel(
    inputs: tl.tuple,
    strides: tl.tuple,
    parameters: tl.tuple,
    outputs: tl.tuple,
    rows: tl.tensor,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """`forward_kernel` for one row, BLOCK columns at a time; the second read hits the cache."""
    y, total, statistics = outputs
    row = tl.program_id(0)
    place = row.to(tl.int64)
    mean = tl.zeros([], ACC)
    squares = tl.zeros([], ACC)  # sum of squared differences from `mean`, over the columns so far
    start = tl.zeros([], tl.int32)
    while start < N:
        column = start + tl.arange(0, BLOCK)
        z = _summed(inputs, strides, row, column, rows, SCALE, N, ACC)
        if total is not None:
            rounded = z.to(total.dtype.element_ty)
            tl.store(total + place * N + column, rounded, mask=column < N)
            z = rounded.to(ACC)
        if parameters[1] is not None:  # combine the moments of two sets of columns
            count = tl.minimum(BLOCK, N - start).to(ACC)
            difference = tl.sum(z, 0) / count - mean
            z = tl.where(column < N, z - (mean + difference), 0.0)
            share = count / (start.to(ACC) + count)
            squares += difference * difference * start.to(ACC) * share
            mean += difference * share
        squares += tl.sum(z * z, 0)
        start += BLOCK
    if parameters[1] is not None:
        tl.store(statistics + rows + row, mean)
    inverse = tl.rsqrt(squares / N + EPS)
    tl.store(statistics + row, inverse)
    if total is not None:
        tl.debug_barrier()  # another thread may have written the element of the sum that this thread reads
    start = tl.zeros([], tl.int32)
    while start < N:
        column = start + tl.arange(0, BLOCK)
        if total is not None:
            z = tl.load(total + place * N + column, mask=column < N, other=0.0).to(ACC)
        else:
            z = tl.load(inputs[0] + place * strides[0] + column, mask=column < N, other=0.0).to(ACC)
        out = _scaled((z - mean) * inverse, parameters, column, OFFSET, N, ACC)
        tl.store(y + place * N + column, out.to(y.dtype.element_ty), mask=column < N)
        start += BLOCK


Inputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""x, branch, bias and keep; 2-D tensors are [rows, n] with contiguous rows; keep is contiguous."""


def normalise(
    inputs: Inputs, scale: float, weight: Tensor, norm_bias: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y [rows, n], z [rows, n], statistics [1 or 2, rows]) of `forward_kernel`; without a branch z is x."""
    x, branch = inputs[:2]
    rows, n = x.shape
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    total = None if branch is None else torch.empty_like(y)
    kinds = 1 if norm_bias is None else 2
    statistics = torch.empty((kinds, rows), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    if rows:
        tile = row_tile(n)  # the wide kernel runs if the block is less than n
        strides = x.stride(0), 0 if branch is None else branch.stride(0)
        tensors = (inputs, strides, (weight, norm_bias), (y, total, statistics), rows)
        constants = {"SCALE": scale, "OFFSET": offset, "EPS": eps, "N": n, "BLOCK": tile.block}
        constants |= {"ACC": accumulator(x.dtype), "num_warps": tile.warps}
        if tile.block < n:
            wide_forward_kernel[(rows,)](*tensors, **constants)
        else:
            forward_kernel[(triton.cdiv(rows, tile.rows),)](*tensors, **constants, ROWS=tile.rows)
    return y, x if total is None else total, statistics


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float) -> Tensor:
        rows = rows_of(x)
        y, _, statistics = normalise((rows, None, None, None), 1.0, weight, bias, eps, offset)
        ctx.save_for_backward(rows, weight, bias, statistics)
        ctx.offset = offset
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        rows, weight, bias, statistics = ctx.saved_tensors
        dx, _, sums = gradients(rows_of(dy), None, rows, weight, None, 1.0, statistics, ctx.offset)
        return dx.view(dy.shape), sums[0], None if bias is None else sums[1], None, None


def rmsnorm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """See `layer_ops.rms_norm`: computed in fp32, in fp64 for fp64, in one pass.

    The gradients have the same bits in every run on a device."""
    return _Norm.apply(x, weight, None, eps, float(zero_centered))


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """See `layer_ops.layer_norm`; types and gradients as in `rmsnorm`."""
    return _Norm.apply(x, weight, bias, eps, float(zero_centered))


class _AddNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        branch: Tensor,
        bias: Tensor | None,
        keep: Tensor | None,
        scale: float,
        residual: Tensor,
        weight: Tensor,
        norm_bias: Tensor | None,
        eps: float,
        offset: float,
    ) -> tuple[Tensor, Tensor]:
        kept = None if keep is None else keep.contiguous()
        inputs = rows_of(residual), rows_of(branch), bias, kept
        y, total, statistics = normalise(inputs, scale, weight, norm_bias, eps, offset)
        total = total.view(residual.shape)
        ctx.save_for_backward(total, weight, kept, statistics)
        ctx.scale, ctx.offset, ctx.branch = scale, offset, branch.dtype
        ctx.bias = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return y.view(residual.shape), total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Any, ...]:
        total, weight, keep, statistics = ctx.saved_tensors
        dy = torch.zeros_like(total) if dy is None else dy
        same = keep is None and ctx.scale == 1.0 and ctx.branch == total.dtype
        dz, dbranch, sums = gradients(
            *(rows_of(dy), None if dtotal is None else rows_of(dtotal), rows_of(total), weight, keep),
            *(ctx.scale, statistics, ctx.offset),
            branch=None if same else ctx.branch,
            bias=ctx.bias,
        )
        dresidual = dz.view(total.shape)
        dbranch = dresidual if dbranch is None else dbranch.view(total.shape)
        dnorm_bias = sums[1].to(weight.dtype) if statistics.shape[0] == 2 else None
        dbias = None if ctx.bias is None else sums[-1].to(ctx.bias)
        return dbranch, dbias, None, None, dresidual, sums[0].to(weight.dtype), dnorm_bias, None, None


def add_norm(
    branch: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    p: float,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """See `layer_ops.add_norm`: x is rounded to the residual's type before it is normalised.

    The backward needs x, `keep` and one or two numbers per row, and processes the gradients of both outputs in one
    pass. The gradients have the same bits in every run on a device."""
    scale = factor if keep is None else factor / (1.0 - p)
    return _AddNorm.apply(branch, bias, keep, scale, residual, weight, norm_bias, eps, float(zero_centered))
