"""A LAMB step over a piece of one tensor in two passes over memory, between which norms are summed over ranks."""

import torch
import triton
import triton.language as tl

from megalite.kernels.lamb import Direction
from megalite.kernels.triton.adam import BLOCK, PER_THREAD
from megalite.kernels.triton.launch import warps


@triton.jit
def _take(
    param: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    squares: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    rate1: tl.tensor,
    rate2: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
) -> None:
    g = tl.load(grad + offsets, mask=mask)
    m = tl.load(exp_avg + offsets, mask=mask)
    v = tl.load(exp_avg_sq + offsets, mask=mask)
    # In this form the moments settle at g and g² exactly; with beta rounded to fp32, beta·m + (1 - beta)·g would not.
    m += (g - m) * rate1
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
def _moments(
    param: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    squares: tl.tensor,
    n: tl.tensor,
    rate1: tl.tensor,
    rate2: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    # Without a mask, loads are 16 bytes wide whatever n is.
    if start + BLOCK <= n:
        _take(
            *(param, grad, exp_avg, exp_avg_sq, squares, offsets, None),
            *(rate1, rate2, scale, eps, decay),
        )
    else:
        _take(
            *(param, grad, exp_avg, exp_avg_sq, squares, offsets, offsets < n),
            *(rate1, rate2, scale, eps, decay),
        )


@triton.jit
def _move(
    param: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    step_size: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
) -> None:
    p = tl.load(param + offsets, mask=mask)
    m = tl.load(exp_avg + offsets, mask=mask)
    v = tl.load(exp_avg_sq + offsets, mask=mask)
    p -= p * decay
    p -= tl.div_rn(step_size * m, tl.sqrt_rn(v) + eps)
    tl.store(param + offsets, p, mask=mask)


@triton.jit
def _step(
    param: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    n: tl.tensor,
    step_size: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _move(param, exp_avg, exp_avg_sq, offsets, None, step_size, eps, decay)
    else:
        _move(param, exp_avg, exp_avg_sq, offsets, offsets < n, step_size, eps, decay)


def lamb_moments(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    norms: bool,
) -> tuple[torch.Tensor, ...]:
    """In place: m = β1·m + (1 - β1)·g, v = β2·v + (1 - β2)·g². The gradient stays as it is.

    Squares are added up in fp32 within blocks of 1024 elements and in fp64 over the blocks, in the same order in every run.

    Args:
        param, grad, exp_avg, exp_avg_sq: [n] in fp32; a piece of flat buffers.
        step: number of this update, from 1.

    Returns:
        (‖x‖, ‖u‖) of the piece with u = m̂/(√v̂ + ε) + weight_decay·x, fp64 [] on its device, if `norms` are wanted; else
        nothing.
    """
    _check(param, grad, exp_avg, exp_avg_sq)
    direction = Direction.at(step, beta1=beta1, beta2=beta2, eps=eps)
    n = param.numel()
    count = triton.cdiv(n, BLOCK)
    squares = torch.empty((2, count), dtype=torch.float32, device=param.device) if norms else None
    if n > 0:
        _moments[(count,)](
            *(param, grad, exp_avg, exp_avg_sq, squares, n),
            *(1.0 - beta1, 1.0 - beta2, direction.scale, direction.eps, weight_decay),
            BLOCK=BLOCK,
            num_warps=warps(BLOCK, PER_THREAD),
        )
    return () if squares is None else squares.sum(dim=1, dtype=torch.float64).sqrt_().unbind()


def lamb_step(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """In place: x - rate·u, with u of the moments as `lamb_moments` has left them.

    Args:
        param, exp_avg, exp_avg_sq: [n] in fp32; a piece of flat buffers.
        rate: learning rate times trust ratio.
        step: number of this update, from 1.
    """
    _check(param, exp_avg, exp_avg_sq)
    direction = Direction.at(step, beta1=beta1, beta2=beta2, eps=eps)
    n = param.numel()
    if n > 0:
        _step[(triton.cdiv(n, BLOCK),)](
            *(param, exp_avg, exp_avg_sq, n),
            *(rate * direction.scale, direction.eps, rate * weight_decay),
            BLOCK=BLOCK,
            num_warps=warps(BLOCK, PER_THREAD),
        )


def _check(*tensors: torch.Tensor) -> None:
    first = tensors[0]
    assert all(
        x.dtype == torch.float32 and x.is_contiguous() and x.numel() == first.numel() for x in tensors
    ), "flat fp32 buffers of one length"
