"""Dropout with a given mask."""

import pytest
import torch

from megalite.kernels.layer_ops import masked_dropout


def test_values_and_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 7, dtype=torch.float64, generator=generator).requires_grad_()
    keep = torch.rand(5, 2, 7, generator=generator) >= 0.25
    grad = torch.randn(5, 2, 7, dtype=torch.float64, generator=generator)
    y = masked_dropout(x, keep, 0.25)
    y.backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(y, torch.where(keep, x / 0.75, 0.0), rtol=1e-14, atol=0)
    torch.testing.assert_close(x.grad, torch.where(keep, grad / 0.75, 0.0), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_byte_an_element_is_kept(dtype: torch.dtype) -> None:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        masked_dropout(torch.ones(40, dtype=dtype).requires_grad_(), torch.ones(40, dtype=torch.bool), 0.1)
    assert [(tensor.dtype, tensor.numel()) for tensor in kept] == [(torch.bool, 40)]
