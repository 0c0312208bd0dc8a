"""AdamW over a flat shard in one pass: clipping, both moments, the weights and their copy in a half type."""

import math

import torch
import triton
import triton.language as tl

from megalite.kernels.triton.launch import warps

BLOCK = 1024
"""Elements of a program."""

PER_THREAD = 4
"""Elements: one load of 16 bytes from each fp32 tensor. With twice as many, bf16 gradients would be loaded 16 bytes
at a time too, and then be moved between threads by way of shared memory."""


@triton.jit
def _update(
    param: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    copy: tl.tensor,
    factor: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    decay: tl.tensor,
    rate1: tl.tensor,
    rate2: tl.tensor,
    step_size: tl.tensor,
    correction: tl.tensor,
    eps: tl.tensor,
) -> None:
    p = tl.load(param + offsets, mask=mask)
    g = tl.load(grad + offsets, mask=mask).to(tl.float32)
    m = tl.load(exp_avg + offsets, mask=mask)
    v = tl.load(exp_avg_sq + offsets, mask=mask)
    if factor is not None:
        g *= tl.load(factor).to(tl.float32)
    # In this form the moments settle at g and g² exactly; with beta rounded to fp32, beta·m + (1 - beta)·g would not.
    m += (g - m) * rate1
    v += (g * g - v) * rate2
    p -= p * decay
    # The exact root and quotient cost nothing here: the time goes into memory.
    p -= tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), correction) + eps)
    tl.store(param + offsets, p, mask=mask)
    tl.store(exp_avg + offsets, m, mask=mask)
    tl.store(exp_avg_sq + offsets, v, mask=mask)
    if copy is not None:
        tl.store(copy + offsets, p.to(copy.dtype.element_ty), mask=mask)


@triton.jit
def _adam(
    param: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    copy: tl.tensor,
    factor: tl.tensor,
    n: tl.tensor,
    decay: tl.tensor,
    rate1: tl.tensor,
    rate2: tl.tensor,
    step_size: tl.tensor,
    correction: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    # Without a mask, loads are 16 bytes wide whatever n is.
    if start + BLOCK <= n:
        _update(
            *(param, grad, exp_avg, exp_avg_sq, copy, factor, offsets, None),
            *(decay, rate1, rate2, step_size, correction, eps),
        )
    else:
        _update(
            *(param, grad, exp_avg, exp_avg_sq, copy, factor, offsets, offsets < n),
            *(decay, rate1, rate2, step_size, correction, eps),
        )


def adam(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: torch.Tensor | None,
    copy: torch.Tensor | None,
) -> None:
    """AdamW (arXiv 1711.05101), in place, with g = grad · factor.

    m = β1·m + (1 - β1)·g, v = β2·v + (1 - β2)·g², p = p·(1 - lr·weight_decay) - lr·m̂ / (√v̂ + eps) with m̂, v̂
    corrected for `step` updates, this one among them. The corrections are computed here, in double.

    Args:
        param, exp_avg, exp_avg_sq: [n] in fp32.
        grad: [n] in fp32 or a half type.
        factor: a number on the device (a clipping coefficient, 1/scale), which the host never waits for.
        copy: [n], gets the new param rounded to its type.
    """
    tensors = [x for x in (param, grad, exp_avg, exp_avg_sq, copy) if x is not None]
    assert all(x.is_contiguous() and x.numel() == param.numel() for x in tensors), (
        "flat buffers of one length"
    )
    n = param.numel()
    if n == 0:
        return
    _adam[(triton.cdiv(n, BLOCK),)](
        *(param, grad, exp_avg, exp_avg_sq, copy, factor, n),
        *(lr * weight_decay, 1.0 - beta1, 1.0 - beta2),
        *(lr / (1.0 - beta1**step), math.sqrt(1.0 - beta2**step), eps),
        BLOCK=BLOCK,
        num_warps=warps(BLOCK, PER_THREAD),
    )
