"""Triton kernels of an optimizer step over flat fp32 tensors: AdamW, the two halves of LAMB, the norm of gradients."""

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.optimizer_ops import AdamSettings, Direction, MomentSettings
from megalite.kernels.triton.launch import programs, warps

BLOCK = 1024  # elements per program
PER_THREAD = 4
"""Elements per thread: one 16-byte load from each fp32 tensor. With twice as many, bf16 gradients would have 16-byte
loads too, and would then move between threads through shared memory."""


@triton.jit
def _over_blocks(tensors: tl.tuple, numbers: tl.tuple, n: tl.tensor, UPDATE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Run UPDATE on a block of n elements; without a mask, loads are 16 bytes wide for every n."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        UPDATE(tensors, offsets, None, numbers)
    else:
        UPDATE(tensors, offsets, offsets < n, numbers)


def _launch(update: Any, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]) -> None:
    assert tensors[0] is not None
    n = tensors[0].numel()
    if n > 0:
        grid, num_warps = (triton.cdiv(n, BLOCK),), warps(BLOCK, PER_THREAD)
        _over_blocks[grid](tensors, numbers, n, UPDATE=update, BLOCK=BLOCK, num_warps=num_warps)


def _check(*tensors: Tensor) -> None:
    first = tensors[0]
    assert all(x.dtype == torch.float32 and x.is_contiguous() and x.numel() == first.numel() for x in tensors), (
        "expected flat fp32 buffers of equal length"
    )


@triton.jit
def _adam(tensors: tl.tuple, offsets: tl.tensor, mask: tl.tensor, numbers: tl.tuple) -> None:
    param, grad, exp_avg, exp_avg_sq, copy, factor = tensors
    decay, rate1, rate2, step_size, correction, eps = numbers
    p = tl.load(param + offsets, mask=mask)
    g = tl.load(grad + offsets, mask=mask).to(tl.float32)
    m = tl.load(exp_avg + offsets, mask=mask)
    v = tl.load(exp_avg_sq + offsets, mask=mask)
    if factor is not None:
        g *= tl.load(factor).to(tl.float32)
    # In this form the moments converge to g and g² exactly; with beta rounded to fp32, beta·m + (1 - beta)·g would not.
    m += (g - m) * rate1
    v += (g * g - v) * rate2
    p -= p * decay
    # The exact root and quotient are free, because the kernel is limited by memory bandwidth.
    p -= tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), correction) + eps)
    tl.store(param + offsets, p, mask=mask)
    tl.store(exp_avg + offsets, m, mask=mask)
    tl.store(exp_avg_sq + offsets, v, mask=mask)
    if copy is not None:
        tl.store(copy + offsets, p.to(copy.dtype.element_ty), mask=mask)


def adam(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    factor: Tensor | None,
    copy: Tensor | None,
    **settings: Unpack[AdamSettings],
) -> None:
    """See `optimizer_ops.adam`, for fp32 with a gradient in fp32 or a half type. The host computes the bias corrections
    in double precision and never waits for `factor`."""
    _check(param, exp_avg, exp_avg_sq)
    assert all(x.is_contiguous() and x.numel() == param.numel() for x in (grad, copy) if x is not None)
    lr, beta1, beta2, step = settings["lr"], settings["beta1"], settings["beta2"], settings["step"]
    corrected = lr / (1.0 - beta1**step), math.sqrt(1.0 - beta2**step)
    numbers = (lr * settings["weight_decay"], 1.0 - beta1, 1.0 - beta2, *corrected, settings["eps"])
    _launch(_adam, (param, grad, exp_avg, exp_avg_sq, copy, factor), numbers)


@triton.jit
def _lamb_moments(tensors: tl.tuple, offsets: tl.tensor, mask: tl.tensor, numbers: tl.tuple) -> None:
    param, grad, exp_avg, exp_avg_sq, squares = tensors
    rate1, rate2, scale, eps, decay = numbers
    g = tl.load(grad + offsets, mask=mask)
    m = tl.load(exp_avg + offsets, mask=mask)
    v = tl.load(exp_avg_sq + offsets, mask=mask)
    m += (g - m) * rate1  # as in `_adam`
    v += (g * g - v) * rate2
    tl.store(exp_avg + offsets, m, mask=mask)
    tl.store(exp_avg_sq + offsets, v, mask=mask)
    if squares is not None:
        p = tl.load(param + offsets, mask=mask)
        u = tl.div_rn(scale * m, tl.sqrt_rn(v) + eps) + decay * p
        if mask is not None:
            p = tl.where(mask, p, 0.0)
            u = tl.where(mask, u, 0.0)
        program = tl.program_id(0)
        tl.store(squares + program, tl.sum(p * p, axis=0))
        tl.store(squares + tl.num_programs(0) + program, tl.sum(u * u, axis=0))


@triton.jit
def _lamb_step(tensors: tl.tuple, offsets: tl.tensor, mask: tl.tensor, numbers: tl.tuple) -> None:
    param, exp_avg, exp_avg_sq = tensors
    step_size, eps, decay = numbers
    p = tl.load(param + offsets, mask=mask)
    m = tl.load(exp_avg + offsets, mask=mask)
    v = tl.load(exp_avg_sq + offsets, mask=mask)
    p -= p * decay
    p -= tl.div_rn(step_size * m, tl.sqrt_rn(v) + eps)
    tl.store(param + offsets, p, mask=mask)


def lamb_moments(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    norms: bool,
    weight_decay: float,
    **settings: Unpack[MomentSettings],
) -> tuple[Tensor, ...]:
    """See `optimizer_ops.lamb_moments`, for fp32.

    Squares are summed in fp32 within blocks of 1024 elements and in fp64 over blocks, in the same order in every run.
    """
    _check(param, grad, exp_avg, exp_avg_sq)
    direction = Direction.at(**settings)
    count = triton.cdiv(param.numel(), BLOCK)
    squares = torch.empty((2, count), dtype=torch.float32, device=param.device) if norms else None
    rates = 1.0 - settings["beta1"], 1.0 - settings["beta2"]
    numbers = (*rates, direction.scale, direction.eps, weight_decay)
    _launch(_lamb_moments, (param, grad, exp_avg, exp_avg_sq, squares), numbers)
    return () if squares is None else squares.sum(dim=1, dtype=torch.float64).sqrt_().unbind()


def lamb_step(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    rate: float,
    weight_decay: float,
    **settings: Unpack[MomentSettings],
) -> None:
    """See `optimizer_ops.lamb_step`, for fp32."""
    _check(param, exp_avg, exp_avg_sq)
    direction = Direction.at(**settings)
    _launch(_lamb_step, (param, exp_avg, exp_avg_sq), (rate * direction.scale, direction.eps, rate * weight_decay))


NORM_BLOCK = 4096  # elements per block of a sum
RESIDENT = 4  # programs per multiprocessor


@triton.jit
def _square(values: tl.tensor) -> tl.tensor:
    if values.dtype == tl.bfloat16:
        values = values.to(tl.float32)
    values = values.to(tl.float64)
    return values * values


@triton.jit(do_not_specialize_on_alignment=["partial"])
def _sum_of_squares(x: tl.tensor, partial: tl.tensor, n: tl.tensor, stride: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Sum the squares of every `stride`-th block of x in fp64, in which squares of fp32 numbers are exact."""
    program = tl.program_id(0)
    start = program.to(tl.int64) * BLOCK
    within = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    # Without a mask, loads are 16 bytes wide for every n.
    while start + BLOCK <= n:
        total += _square(tl.load(x + start + within))
        start += stride
    if start < n:
        total += _square(tl.load(x + start + within, mask=start + within < n, other=0.0))
    tl.store(partial + program, tl.sum(total, axis=0))


def l2norm(tensors: Sequence[Tensor]) -> Tensor:
    """See `optimizer_ops.l2norm`, for contiguous tensors; the host does not wait for the device.

    The order of every sum depends only on the sizes and the device: the result has the same bits in every run."""
    assert all(x.is_contiguous() for x in tensors), "expected flat buffers"
    counts = [programs(triton.cdiv(x.numel(), NORM_BLOCK), x.device, RESIDENT) for x in tensors]
    partial = torch.empty(sum(counts), dtype=torch.float64, device=tensors[0].device)
    for x, count, own in zip(tensors, counts, partial.split(counts)):
        if count:
            sizes = x.numel(), count * NORM_BLOCK
            _sum_of_squares[(count,)](x, own, *sizes, BLOCK=NORM_BLOCK, num_warps=warps(NORM_BLOCK))
    return partial.sum().sqrt()
