"""apex's norms against float64, through stand-ins that take what apex takes."""

from collections.abc import Callable

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.kernels.norms import layer_norm, rms_norm
from tests.kernels.apex.conftest import Adapter

LIMITS = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def gradients(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], zero_centered: bool
) -> list[torch.Tensor]:
    leaves = [
        tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in inputs
    ]
    y = function(*leaves, 1e-5, zero_centered=zero_centered)
    grad = torch.arange(y.numel()).view(y.shape).double().cos().to(y.dtype)
    # A gradient that is not dense, as of a permuted output.
    grad = grad.transpose(0, -1).contiguous().transpose(0, -1)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("size", [17, 1000])  # in no list of sizes that were compiled
@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_values_and_gradients(
    adapter: Adapter, name: str, size: int, dtype: torch.dtype, zero_centered: bool
) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 3, 5, generator=generator).to(dtype).permute(2, 1, 0)
    factors = [0.1 * torch.randn(size, generator=generator).to(dtype) + (not zero_centered)]
    if name == "layernorm":
        factors.append(torch.randn(size, generator=generator).to(dtype))
    found = gradients(getattr(adapter("norms"), name), [x, *factors], zero_centered)
    exact = gradients(
        rms_norm if name == "rmsnorm" else layer_norm, [t.double() for t in (x, *factors)], zero_centered
    )
    for ours, right in zip(found, exact, strict=True):
        assert ours.dtype == dtype and ours.shape == right.shape
        assert (ours.double() - right).norm() <= LIMITS[dtype] * right.norm()


def test_the_factor_is_not_rounded(adapter: Adapter) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(8, 64, generator=generator), 0.1 * torch.randn(64, generator=generator)
    x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
    exact = rms_norm(x.double(), weight.double(), 1e-5, zero_centered=True)
    norms = adapter("norms")

    def error(y: torch.Tensor) -> float:
        return ((y - exact) / exact).abs().max().item()

    assert error(norms.rmsnorm(x, weight, 1e-5, zero_centered=True)) < 2**-8  # of one rounding
    assert error(norms.rmsnorm(x, 1 + weight, 1e-5)) > 1.25 * 2**-8  # of two


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_no_rows(adapter: Adapter, name: str) -> None:
    x = torch.empty(4, 0, 32, requires_grad=True)
    factors = [torch.ones(32, requires_grad=True) for _ in range(1 + (name == "layernorm"))]
    y = getattr(adapter("norms"), name)(x, *factors, 1e-5)
    assert y.shape == x.shape
    grads = torch.autograd.grad(y.sum(), [x, *factors])
    assert grads[0].shape == x.shape
    assert all(bool((grad == 0).all()) for grad in grads[1:])


def test_more_than_an_int_can_address(adapter: Adapter) -> None:
    x = torch.empty(1, dtype=torch.bfloat16).expand(2**16, 2**15)  # no memory
    adapter("limits").check_elements("rmsnorm", x)
    x = torch.empty(2**31 + 8, dtype=torch.bfloat16, device="meta").view(-1, 8)
    with pytest.raises(
        ConfigError, match=r"rmsnorm=apex takes less than 2\^31 elements .* use rmsnorm=torch"
    ):
        adapter("norms").rmsnorm(x, torch.ones(8, dtype=torch.bfloat16, device="meta"), 1e-5)
