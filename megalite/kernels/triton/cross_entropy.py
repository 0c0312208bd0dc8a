"""Triton cross-entropy over this rank's vocabulary columns: reads logits once per pass; the backward is in place."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.triton.launch import accumulator, multiprocessors, next_power_of_2, warps

WIDEST = 4096  # columns per block; whole rows of 64k and more would spill registers
RESIDENT = 4  # programs per multiprocessor; with fewer rows, rows are split into parts
MERGED = 256  # parts of rows that a program merges
LOWEST = tl.constexpr(-3.4028234663852886e38)  # initial running maximum: finite, because -inf - -inf is NaN


class Cut(NamedTuple):
    """Grid (n, parts) for [n, v] logits: each program processes a span of one row in blocks."""

    parts: int
    span: int  # columns per part, a multiple of `block`
    block: int
    warps: int


def cut(n: int, v: int, programs: int) -> Cut:
    """Return one program per row if there are `programs` rows, else several programs per row."""
    block = min(next_power_of_2(v), WIDEST)
    blocks = max(triton.cdiv(v, block), 1)
    wanted = min(max(triton.cdiv(programs, max(n, 1)), 1), blocks)
    span = triton.cdiv(blocks, wanted) * block
    return Cut(max(triton.cdiv(v, span), 1), span, block, warps(block))


@triton.jit
def _column(labels: tl.tensor, row: tl.tensor, first: tl.tensor, v: tl.tensor) -> tl.tensor:
    """Return the column of a row's label, -1 if another rank has it."""
    column = tl.load(labels + row) - first
    return tl.where((column >= 0) & (column < v), column, -1).to(tl.int32)


@triton.jit(do_not_specialize=["first"])
def _forward(
    logits: tl.tensor,
    labels: tl.tensor,
    stats: tl.tensor,
    first: tl.tensor,
    n: tl.tensor,
    v: tl.tensor,
    row_stride: tl.tensor,
    span: tl.tensor,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Store maximum, sum of exponentials and label's logit of part `program_id(1)` of a row in stats [parts, 3, n]."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    begin = part * span
    end = tl.minimum(begin + span, v)
    base = logits + row * row_stride
    # A lane is one 16-byte load: maximum and sum are kept per lane and reduced after the loop.
    within = tl.arange(0, LANES)[:, None] * (BLOCK // LANES) + tl.arange(0, BLOCK // LANES)[None, :]
    maximum = tl.full((LANES,), LOWEST, WIDE)
    total = tl.zeros((LANES,), WIDE)
    while begin < end:
        columns = begin + within
        z = tl.load(base + columns, mask=columns < v, other=-float("inf")).to(WIDE)
        higher = tl.maximum(maximum, tl.max(z, axis=1))
        total = total * tl.exp(maximum - higher) + tl.sum(tl.exp(z - higher[:, None]), axis=1)
        maximum = higher
        begin += BLOCK
    highest = tl.max(maximum, axis=0)
    total = tl.sum(total * tl.exp(maximum - highest), axis=0)
    column = _column(labels, row, first, v)
    inside = (column >= part * span) & (column < end)
    picked = tl.load(base + column, mask=inside, other=0.0).to(WIDE)
    out = stats + part * 3 * n + row
    tl.store(out, highest)
    tl.store(out + n, total)
    tl.store(out + 2 * n, picked)


@triton.jit
def _merge(
    partial: tl.tensor, stats: tl.tensor, n: tl.tensor, parts: tl.tensor, PARTS: tl.constexpr, ROWS: tl.constexpr
) -> None:
    """Merge [parts, 3, n] into stats [3, n], with the formula that merges tensor-parallel ranks."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.arange(0, PARTS)[:, None]
    mask = (part < parts) & (rows < n)[None, :]
    source = partial + part * 3 * n + rows[None, :]
    maximum = tl.load(source, mask=mask, other=LOWEST)
    total = tl.load(source + n, mask=mask, other=0.0)
    picked = tl.load(source + 2 * n, mask=mask, other=0.0)
    highest = tl.max(maximum, axis=0)
    total = tl.sum(total * tl.exp(maximum - highest[None, :]), axis=0)
    tl.store(stats + rows, highest, mask=rows < n)
    tl.store(stats + n + rows, total, mask=rows < n)
    tl.store(stats + 2 * n + rows, tl.sum(picked, axis=0), mask=rows < n)


@triton.jit(do_not_specialize=["first"])
def _backward(
    logits: tl.tensor,
    labels: tl.tensor,
    logsumexp: tl.tensor,
    grad: tl.tensor,
    first: tl.tensor,
    v: tl.tensor,
    row_stride: tl.tensor,
    span: tl.tensor,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Overwrite the logits with their gradient; rows with an output gradient of 0 are not read."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, v)
    column = _column(labels, row, first, v)
    shift = tl.load(logsumexp + row).to(WIDE)
    scale = tl.load(grad + row).to(WIDE)
    read = tl.where(scale != 0, end, begin)
    base = logits + row * row_stride
    while begin < end:
        columns = begin + tl.arange(0, BLOCK)
        z = tl.load(base + columns, mask=columns < read, other=0.0).to(WIDE)
        difference = tl.exp(z - shift) - tl.where(columns == column, 1.0, 0.0)
        product = tl.where(columns < read, difference * scale, 0.0)
        tl.store(base + columns, product.to(logits.dtype.element_ty), mask=columns < end)
        begin += BLOCK


def cross_entropy_forward(logits: Tensor, labels: Tensor, first: int | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """See `megalite.kernels.cross_entropy`: log Σ_r d_r·exp(m_r) over ranks is the log-sum-exp of the row.

    Padding columns contain a very negative number or -inf. A logit that is NaN or +inf makes d NaN. The logits are
    saved, or a copy if their rows overlap or their columns are not contiguous; m is the row's maximum."""
    (n, v), first = logits.shape, first or 0
    if logits.stride(1) != 1 or logits.stride(0) < v:
        logits = logits.contiguous()
    parts, span, block, warp_count = cut(n, v, multiprocessors(logits.device) * RESIDENT)
    stats = logits.new_empty((parts, 3, n), dtype=torch.promote_types(logits.dtype, torch.float32))
    if n == 0:
        return stats[0], (logits, stats[0, 0])
    _forward[n, parts](
        *(logits, labels.contiguous(), stats, first, n, v, logits.stride(0), span),
        BLOCK=block,
        LANES=max(block * logits.element_size() // 16, 1),
        WIDE=accumulator(logits.dtype),
        num_warps=warp_count,
    )
    merged = stats[0]
    if parts > 1:
        merged = torch.empty_like(merged)
        padded = next_power_of_2(parts)
        rows = max(MERGED // padded, 1)
        _merge[(triton.cdiv(n, rows),)](stats, merged, n, parts, PARTS=padded, ROWS=rows)
    maximum, total, picked = merged
    own = (labels >= first) & (labels < first + v)
    stats = torch.stack((maximum, total, torch.where(own, picked - maximum, 0.0)))
    return stats, (logits, maximum + total.log())


def cross_entropy_backward(
    saved: Sequence[Tensor], labels: Tensor, first: int | None, logsumexp: Tensor | None, grad: Tensor
) -> Tensor:
    """See `megalite.kernels.cross_entropy`: written over the logits and returned.

    If the gradient of a token is 0 (an ignored token), its row becomes exactly 0, whatever its logits are."""
    logits, own = saved
    (n, v), first = logits.shape, first or 0
    if n == 0:
        return logits
    parts, span, block, warp_count = cut(n, v, multiprocessors(logits.device) * RESIDENT)
    shift = (own if logsumexp is None else logsumexp).contiguous()
    _backward[n, parts](
        *(logits, labels.contiguous(), shift, grad.contiguous(), first, v, logits.stride(0), span),
        BLOCK=block,
        WIDE=accumulator(logits.dtype),
        num_warps=warp_count,
    )
    torch.autograd.graph.increment_version(logits)  # like torch's kernels, so that a second backward raises an error
    return logits
