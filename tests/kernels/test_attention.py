"""Attention against a loop over queries, keys and heads."""

import math
from collections.abc import Callable

import pytest
import torch

from megalite.kernels.attention import causal_attention

Mask = Callable[[int, int], torch.Tensor]


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor | None = None
) -> torch.Tensor:
    """Query i of s_q sees the keys up to s_k - s_q + i; head h reads group h // (heads / groups)."""
    b, heads, s_q, d = q.shape
    groups, s_k = k.shape[1], k.shape[2]
    rows = []
    for n in range(b):
        for head in range(heads):
            group = head // (heads // groups)
            for i in range(s_q):
                seen = s_k - s_q + i + 1
                scores = torch.stack([q[n, head, i] @ k[n, group, j] for j in range(seen)]) / math.sqrt(d)
                weights = scores.exp() / scores.exp().sum()
                if keep is not None:
                    weights = weights * keep[n, head, i, :seen]
                rows.append(weights @ v[n, group, :seen])
    return torch.stack(rows).view(b, heads, s_q, d)


def tensors(
    heads: int, groups: int, s_q: int, s_k: int, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, s_q, 4), (2, groups, s_k, 4), (2, groups, s_k, 4))
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def keep_all(probabilities: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(probabilities)


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("fused", [True, False])
def test_values_and_gradients(heads: int, groups: int, fused: bool) -> None:
    ours_in = [tensor.requires_grad_() for tensor in tensors(heads, groups, 6, 6)]
    plain_in = [tensor.detach().clone().requires_grad_() for tensor in ours_in]
    ours = causal_attention(*ours_in, keep_mask=None if fused else keep_all)
    expected = plain(*plain_in)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours.backward(grad)
    expected.backward(grad)
    for one, other in zip(ours_in, plain_in, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-12)


def test_one_query_against_a_cache_sees_every_key() -> None:
    q, k, v = tensors(4, 2, 1, 9)
    torch.testing.assert_close(
        causal_attention(q, k, v, causal=False), plain(q, k, v), rtol=1e-12, atol=1e-12
    )


def test_dropped_probabilities_take_no_part_and_the_rest_are_scaled() -> None:
    q, k, v = tensors(4, 2, 5, 5)
    keep = (torch.rand(2, 4, 5, 5, generator=torch.Generator().manual_seed(2)) < 0.7).double() / 0.7
    ours = causal_attention(q, k, v, keep_mask=lambda probabilities: keep)
    torch.testing.assert_close(ours, plain(q, k, v, keep), rtol=1e-12, atol=1e-12)


def test_the_mask_sees_the_shape_of_the_probabilities() -> None:
    shapes = []

    def keep_mask(probabilities: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(probabilities.shape))
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 4, 5, dtype=torch.float64))
        return torch.ones_like(probabilities)

    causal_attention(*tensors(4, 2, 5, 5), keep_mask=keep_mask)
    assert shapes == [(2, 4, 5, 5)]


@pytest.mark.parametrize("fused", [True, False])
def test_bf16_is_within_its_rounding(fused: bool) -> None:
    q, k, v = tensors(4, 2, 16, 16, torch.bfloat16)
    ours = causal_attention(q, k, v, keep_mask=None if fused else keep_all)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), plain(q.double(), k.double(), v.double()), rtol=3e-2, atol=2e-2)
