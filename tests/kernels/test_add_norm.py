"""Residual sum, dropout and norm in one are these one after the other."""

import pytest
import torch

from megalite.kernels.add_norm import add_norm
from megalite.kernels.norms import layer_norm, rms_norm


def drawn(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_it_is_its_parts(normalization: str, biased: bool, dropped: bool, zero_centered: bool) -> None:
    branch, residual, weight = drawn(0, 3, 2, 8), drawn(1, 3, 2, 8), drawn(2, 8)
    bias = drawn(3, 8) if biased else None
    norm_bias = drawn(4, 8) if normalization == "LayerNorm" else None
    keep = drawn(5, 3, 2, 8) > 0 if dropped else None
    given = [each for each in (branch, bias, residual, weight, norm_bias) if each is not None]

    x = branch if bias is None else branch + bias
    x = residual + (x if keep is None else x * keep / 0.7)
    if norm_bias is None:
        normed = rms_norm(x, weight, 1e-5, zero_centered=zero_centered)
    else:
        normed = layer_norm(x, weight, norm_bias, 1e-5, zero_centered=zero_centered)
    expected = torch.autograd.grad((normed * drawn(6, 3, 2, 8) + x.square()).sum(), given)

    ours, total = add_norm(
        *(branch, bias, keep, 0.3, residual, weight, norm_bias, 1e-5), zero_centered=zero_centered
    )
    torch.testing.assert_close(total, x)
    torch.testing.assert_close(ours, normed)
    grads = torch.autograd.grad((ours * drawn(6, 3, 2, 8) + total.square()).sum(), given)
    for ours_grad, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours_grad, theirs)
