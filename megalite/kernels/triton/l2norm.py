"""The norm of several flat tensors together, in fp64, without waiting for the device."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megalite.kernels.triton.launch import programs, warps

BLOCK = 4096
"""Elements that a program adds up at a time."""

RESIDENT = 4
"""Programs a multiprocessor."""


@triton.jit
def _square(values: tl.tensor) -> tl.tensor:
    if values.dtype == tl.bfloat16:
        values = values.to(tl.float32)
    values = values.to(tl.float64)
    return values * values


@triton.jit(do_not_specialize_on_alignment=["partial"])
def _sum_of_squares(
    x: tl.tensor, partial: tl.tensor, n: tl.tensor, stride: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Of every `stride`-th block of x, in fp64: there no square of an fp32 number is lost or too large."""
    program = tl.program_id(0)
    start = program.to(tl.int64) * BLOCK
    within = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    # Without a mask, loads are 16 bytes wide whatever n is.
    while start + BLOCK <= n:
        total += _square(tl.load(x + start + within))
        start += stride
    if start < n:
        total += _square(tl.load(x + start + within, mask=start + within < n, other=0.0))
    tl.store(partial + program, tl.sum(total, axis=0))


def l2norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """sqrt(Σ x²) over all elements of all tensors, an fp64 number on their device.

    What each program adds up is a function of the sizes and of the device alone, and so is the order of every sum: the
    result is the same to the bit in every run.

    Args:
        tensors: dense, on one device; at least one.
    """
    assert all(x.is_contiguous() for x in tensors), "a flat buffer"
    counts = [programs(triton.cdiv(x.numel(), BLOCK), x.device, RESIDENT) for x in tensors]
    partial = torch.empty(sum(counts), dtype=torch.float64, device=tensors[0].device)
    done = 0
    for x, count in zip(tensors, counts, strict=True):
        if count:
            _sum_of_squares[(count,)](
                x, partial[done:], x.numel(), count * BLOCK, BLOCK=BLOCK, num_warps=warps(BLOCK)
            )
            done += count
    return partial.sum().sqrt()
