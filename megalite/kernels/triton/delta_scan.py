"""Triton kernel of linear attention: one program passes columns of a head's state through all chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.linear_attention import Factor
from megalite.kernels.triton.launch import next_power_of_2, rows_of

KEYS, COLUMNS = 32, 32
"""Rows and columns of the state that a program has in registers. The columns are few, so that there are more programs."""


@triton.jit
def _scan_kernel(
    written: tl.tensor,
    read: tl.tensor,
    keys: tl.tensor,
    decays: tl.tensor,
    added: tl.tensor,
    corrections: tl.tensor,
    states: tl.tensor,
    last: tl.tensor,
    chunks: tl.tensor,
    length: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    written_stride: tl.tensor,
    read_stride: tl.tensor,
    keys_stride: tl.tensor,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """`states` has the first chunk's state; each next one is written there and read back, since it is an output."""
    head = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    token, tokens, offset = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None, :], tl.arange(0, KEYS)
    values = (token < length) & (column < dv)
    done = tl.zeros([], tl.int32)
    while done < chunks:
        chunk = head * chunks + (chunks - 1 - done if BACKWARD else done)
        row = chunk * length + token
        value = tl.load(written + row * written_stride + column, mask=values, other=0.0)
        if read is not None:
            for start in tl.range(0, dk, KEYS):
                across, down = start + offset[None, :], start + offset[:, None]
                factor = tl.load(read + row * read_stride + across, mask=(token < length) & (across < dk), other=0.0)
                state = tl.load(states + (chunk * dk + down) * dv + column, mask=(down < dk) & (column < dv), other=0.0)
                product = tl.dot(factor, state, input_precision=PRECISION)
                value = value + product if BACKWARD else value - product
            tl.store(corrections + row * dv + column, value, mask=values)
        decay = tl.load(decays + chunk)
        done += 1
        following = states + (chunk - 1 if BACKWARD else chunk + 1) * dk * dv
        following = last + head * dk * dv if done == chunks else following
        for start in tl.range(0, dk, KEYS):
            down = start + offset[:, None]
            place, inside = down * dv + column, (down < dk) & (column < dv)
            state = tl.load(states + chunk * dk * dv + place, mask=inside, other=0.0) * decay
            if BACKWARD:
                state += tl.load(added + chunk * dk * dv + place, mask=inside, other=0.0)
            if keys is not None:
                # Read transposed: by tl.trans, each element would be copied to shared memory on its own.
                transposed = keys + (chunk * length + tokens) * keys_stride + down
                factor = tl.load(transposed, mask=(tokens < length) & (down < dk), other=0.0)
                gained = tl.dot(factor, value, input_precision=PRECISION)
                state = state - gained if BACKWARD else state + gained
            tl.store(following + place, state, mask=inside)
        tl.debug_barrier()  # other threads of this program read what was stored


def delta_scan(
    written: Tensor, read: Factor, keys: Factor, decays: Tensor, state: Tensor, added: Factor = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `megalite.kernels.linear_attention.DeltaScan`. Factors are rounded to TF32 if torch's products are (`--tf32`), else
    split into three, which is as exact as fp32."""
    (chunks, length, dv), dk = written.shape[-3:], state.shape[-2]
    corrections = written if read is None else torch.empty_like(written, memory_format=torch.contiguous_format)
    states, last = (
        written.new_empty(*written.shape[:-2], dk, dv),
        torch.empty_like(state, memory_format=torch.contiguous_format),
    )
    states.select(-3, 0 if added is None else -1).copy_(state)
    rows = [None if factor is None else rows_of(factor) for factor in (written, read, keys)]
    _scan_kernel[state.shape[:-2].numel(), triton.cdiv(dv, COLUMNS)](
        *(*rows, decays.contiguous(), None if added is None else added.contiguous()),
        *(corrections, states, last, chunks, length, dk, dv, *(0 if row is None else row.stride(0) for row in rows)),
        TOKENS=max(next_power_of_2(length), 16),  # the least dimension of tl.dot
        KEYS=KEYS,
        COLUMNS=COLUMNS,
        BACKWARD=added is not None,
        PRECISION="tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3",
    )
    return corrections, states, last
