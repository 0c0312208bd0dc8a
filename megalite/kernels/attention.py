"""Causal attention: fused through torch's scaled_dot_product_attention, or unfused where dropout needs a mask."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

KeepMask = Callable[[torch.Tensor], torch.Tensor]
"""Takes the probabilities [b, heads, s, s]; gives the scaled keep-mask of the same shape."""


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    keep_mask: KeepMask | None = None,
) -> torch.Tensor:
    """softmax(q·kᵀ/sqrt(d))·v with a causal mask aligned to the last key.

    Args:
        q: [b, heads, s_q, d].
        k, v: [b, groups, s_k, d] with heads a multiple of groups; s_k = s_q, or s_q = 1 against a cache.
        causal: False where every key is visible (one query after a cache).
        keep_mask: dropout of the probabilities; with it the probabilities are materialised.
    """
    repeats = q.shape[1] // k.shape[1]
    half = q.dtype in (torch.bfloat16, torch.float16)
    if keep_mask is None and (repeats == 1 or (q.is_cuda and half)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=repeats > 1)
    if repeats > 1:
        # Neither the CPU's fused kernel nor CUDA's for fp32 has a grouped form.
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    if keep_mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    scores = (
        (q @ k.transpose(-2, -1)).float()
        if q.dtype in (torch.bfloat16, torch.float16)
        else q @ k.transpose(-2, -1)
    )
    scores = scores / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    probabilities = scores.softmax(dim=-1)
    return (probabilities * keep_mask(probabilities)).to(v.dtype) @ v
