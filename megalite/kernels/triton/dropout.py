"""Triton kernel for dropout masks: one launch for all samples and heads, one byte written per element."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

from megalite.kernels.dropout import COLUMNS, threshold
from megalite.kernels.triton.launch import warps

BLOCK = 512
"""Generator calls per program."""


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
    """See `megalite.kernels.dropout.dropout_mask`; the sample indices must be consecutive."""
    assert list(samples) == list(range(samples[0], samples[0] + len(samples))), samples
    _, heads, count, width = keep.shape
    whole = width % COLUMNS == 0 and all(stride % COLUMNS == 0 for stride in keep.stride()[:3])
    elements = keep.view(torch.int64 if whole else torch.uint8)
    grid = triton.cdiv(count * -(-width // COLUMNS), BLOCK), len(samples) * heads
    dropout_mask_kernel[grid](
        *(elements, rows, elements.stride()[:3], key, samples[0], first_head, threshold(p), count, heads),
        WIDTH=width,
        WHOLE=whole,
        BLOCK=BLOCK,
        num_warps=warps(BLOCK, per_thread=4),
    )
