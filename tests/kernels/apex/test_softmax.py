"""Attention with apex's causal softmax against torch's, and the sizes that it does not take."""

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.kernels.softmax import causal_softmax_backward, causal_softmax_forward
from megalite.kernels.unfused_attention import unfused_attention
from tests.kernels.apex.conftest import Adapter

LIMITS = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
"""Scores, probabilities and dropped probabilities are each rounded."""


def functions(adapter: Adapter) -> tuple:
    module = adapter("softmax")
    return module.causal_softmax_forward, module.causal_softmax_backward


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("head_size", [16, 24])  # a scale that a half type holds, and one that it does not
@pytest.mark.parametrize("drops", [False, True])
def test_attention(adapter: Adapter, dtype: torch.dtype, head_size: int, drops: bool) -> None:
    generator = torch.Generator().manual_seed(head_size)
    q = torch.randn(20, 2, 4, head_size, generator=generator).to(dtype).permute(1, 2, 0, 3)
    k, v = (
        torch.randn(20, 2, 2, head_size, generator=generator).to(dtype).permute(1, 2, 0, 3) for _ in range(2)
    )
    grad = torch.randn(2, 4, 20, head_size, generator=generator)
    keep = torch.rand(2, 4, 20, 20, generator=generator) >= 0.3 if drops else None
    found, exact = [], []
    for results, wide in ((found, dtype), (exact, torch.float64)):
        leaves = [tensor.to(wide).requires_grad_() for tensor in (q, k, v)]
        visible = torch.ones(20, 20, dtype=torch.bool).tril()
        causal = functions(adapter) if wide == dtype else None
        out = unfused_attention(*leaves, visible=None if causal else visible, keep=keep, p=0.3, causal=causal)
        results += [out.detach(), *torch.autograd.grad(out, leaves, grad.to(wide))]
    for ours, right in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - right).norm() <= LIMITS[dtype] * right.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_torchs_own_is_the_masked_softmax_to_the_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 4, 20, 8, generator=generator).to(dtype) for _ in range(4)]
    keep = torch.rand(2, 4, 20, 20, generator=generator) >= 0.3
    results = []
    for causal in (None, (causal_softmax_forward, causal_softmax_backward)):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
        visible = torch.ones(20, 20, dtype=torch.bool).tril() if causal is None else None
        out = unfused_attention(*leaves, visible=visible, keep=keep, p=0.3, causal=causal)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, tensors[3])])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize(
    "shape, reason",
    [
        ((2, 4, 16), "it takes sequences of 17 to 16384 tokens, not 16"),
        ((2, 4, 22), "it takes sequences of a multiple of 4 tokens, not 22"),
        ((2, 3, 20), "it takes 8 matrices of 20 x 20 scores at a time, and there are 6"),
        ((1, 3, 132), "it takes 4 matrices of 132 x 132 scores at a time, and there are 3"),
    ],
)
def test_sizes_that_are_refused(adapter: Adapter, shape: tuple[int, int, int], reason: str) -> None:
    scores = torch.zeros(*shape, shape[-1], dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=f"softmax=apex cannot be used: {reason}; use softmax=torch"):
        functions(adapter)[0](scores, 0.25)


def test_the_longest(adapter: Adapter) -> None:
    limit = adapter("limits").softmax_limit
    assert limit(16384) is None and limit(17) is not None and limit(20) is None
    assert limit(16388) == "it takes sequences of 17 to 16384 tokens, not 16388"


def test_the_scale_is_not_rounded(adapter: Adapter) -> None:
    """The kernel's own parameter is of the scores' type."""
    seen = []
    module = adapter("softmax")
    module.kernels.forward = lambda scores, scale: (seen.append(scale), scores)[1]
    for scale in (24**-0.5, 0.25):
        module.causal_softmax_forward(torch.ones(2, 4, 20, 20, dtype=torch.bfloat16), scale)
    assert seen == [1.0, 0.25]
