"""Recurrences of linear attention, by chunks: the gated delta rule (arXiv 2412.06464) and Mamba-2's state space
(arXiv 2405.21060). Each head has a state that decays, and to which each token adds."""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.model import LINEAR_CHUNK
from megalite.kernels.bases import Function

Factor = Tensor | None
"""A factor of a scan's products; None: zero."""


class DeltaScan(Protocol):
    """U_c = W_c - R_c·S_c and S_{c+1} = d_c·S_c + K_cᵀ·U_c, for one chunk c after the other.

    Args:
        written, read, keys: W [..., chunks, tokens, dv], R and K [..., chunks, tokens, dk].
        decays: d [..., chunks]. `state`: the first S, [..., dk, dv].
        added: A [..., chunks, dk, dv], None: zero. If given, this is the scan of the gradients: from the last chunk to the
            first, U_c = W_c + R_c·S_c, and the next S is d_c·S_c - K_cᵀ·U_c + A_c.

    Returns U, the state that each chunk started from [..., chunks, dk, dv], and the last state."""

    def __call__(
        self, written: Tensor, read: Factor, keys: Factor, decays: Tensor, state: Tensor, added: Factor = None
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def delta_scan(
    written: Tensor, read: Factor, keys: Factor, decays: Tensor, state: Tensor, added: Factor = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `DeltaScan`; two products per chunk."""
    chunks, sign = range(decays.shape[-1]), -1 if added is None else 1
    corrections = written if read is None else torch.empty_like(written)
    states = written.new_empty(*written.shape[:-2], *state.shape[-2:])
    for c in chunks if added is None else reversed(chunks):
        states[..., c, :, :] = state
        value = written[..., c, :, :]
        if read is not None:
            value = torch.add(value, read[..., c, :, :] @ state, alpha=sign)
            corrections[..., c, :, :] = value
        state = decays[..., c, None, None] * state
        if keys is not None:
            state = torch.add(state, keys[..., c, :, :].mT @ value, alpha=-sign)
        if added is not None:
            state += added[..., c, :, :]
    return corrections, states, state


class Scan(Function):
    """A `DeltaScan` with gradients. Only the states are computed in order; the rest is products over all chunks."""

    @staticmethod
    def forward(
        ctx: Any, scan: DeltaScan, written: Tensor, read: Factor, keys: Tensor, decays: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        corrections, states, last = scan(written, read, keys, decays, state)
        ctx.scan = scan
        ctx.save_for_backward(read, keys, decays, corrections, states)
        return corrections, states, last

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_states: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        read, keys, decays, corrections, states = ctx.saved_tensors
        grad, after, grad_state = ctx.scan(grad, keys, read, decays, grad_last, grad_states)
        grad_decays = (states * after).sum(dim=(-2, -1))  # more exact than a product of long rows
        grad_read = None if read is None else -(grad @ states.mT)
        return None, grad, grad_read, corrections @ after.mT, grad_decays, grad_state


class _Inverse(Function):
    """(1 + L)⁻¹ of the part L of a matrix below its diagonal [..., n, n]: n right-hand sides, and none in the backward."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
        # The result of the transposed system has contiguous rows.
        inverse = torch.linalg.solve_triangular(matrix.mT, one, upper=True, left=False, unitriangular=True).mT
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return (inverse.mT @ grad @ inverse.mT).tril(-1).neg_()


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor,
    *,
    strengths: Tensor | None = None,
    scan: DeltaScan = delta_scan,
    state: Tensor | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute o_t = S_tᵀ·q_t with S_t = exp(g_t)·S_{t-1} + k_t·u_tᵀ, by chunks. In a state space u_t = v_t. By the delta rule
    u_t = β_t·(v_t - exp(g_t)·S_{t-1}ᵀ·k_t), a correction.

    The corrections of a chunk solve a triangular system, because each depends on the earlier ones only by k_t·k_j and the
    decay between them.

    Args:
        q, k: [b, key heads, s, dk].
        v: [b, key heads, r, s, dv], and g (`decays`, at most 0) and β (`strengths`; None: a state space) [b, key heads, r, s].
        scan: the kernel that passes the state from chunk to chunk.
        state: S before the first token, [b, key heads, r, dk, dv]; None: zero.
        offsets: places of the tokens in their documents, [s, b], if each document starts from a zero state.

    Returns the outputs [b, key heads, r, s, dv] and, without offsets, S after the last token."""
    length, size = q.shape[2], min(LINEAR_CHUNK, q.shape[2])
    padding = -length % size

    def chunked(x: Tensor, dim: int) -> Tensor:
        if padding:  # by nothing it would copy
            x = F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, padding))
        return x.unflatten(dim, (-1, size))

    q, k = (chunked(each, 2).unsqueeze(2) for each in (q, k))
    v, decays = chunked(v, 3), chunked(decays, 3)
    since = decays.cumsum(dim=-1)  # logarithm of the decay from the chunk's start
    places = torch.arange(size, device=q.device)
    distances = places.unsqueeze(1) - places
    visible = distances >= 0
    entered, left = since.exp(), (since[..., -1:] - since).exp()  # decay of the old state, and until the chunk's end
    if offsets is not None:
        offsets = chunked(offsets.t(), 1)[:, None, None]
        visible = visible & (distances <= offsets.unsqueeze(-1))
        entered = entered * (offsets > places)
        left = left * (size - 1 - places <= offsets[..., -1:])
    between = (since.unsqueeze(-1) - since.unsqueeze(-2)).masked_fill(~visible, -torch.inf).exp()
    written, read = v, None
    if strengths is not None:
        strengths = chunked(strengths, 3)
        system = (k @ k.mT) * between * strengths.unsqueeze(-1)
        inverse = _Inverse.apply(system) * strengths.unsqueeze(-2)
        written, read = inverse @ v, inverse @ (k * entered.unsqueeze(-1))
    state = v.new_zeros(*v.shape[:3], k.shape[-1], v.shape[-1]) if state is None else state
    added, states, state = Scan.apply(scan, written, read, k * left.unsqueeze(-1), entered[..., -1], state)
    outputs = (q * entered.unsqueeze(-1)) @ states + ((q @ k.mT) * between) @ added
    return outputs.flatten(3, 4)[..., :length, :], state
