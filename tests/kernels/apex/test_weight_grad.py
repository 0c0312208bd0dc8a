"""apex's weight gradients against float64, for every pair of types that it has."""

import pytest
import torch

from tests.kernels.apex.conftest import Adapter


@pytest.mark.parametrize(
    "dtype, main",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
)
def test_it_adds(adapter: Adapter, dtype: torch.dtype, main: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    # Rows that are not dense: the kernel reads plain memory.
    grad_y = torch.randn(6, 33, generator=generator).to(dtype).t()
    x = torch.randn(33, 20, generator=generator).to(dtype)[:, ::2]
    main_grad = torch.randn(6, 10, generator=generator).to(main)
    exact = main_grad.double() + grad_y.double().t() @ x.double()
    adapter("weight_grad").accumulate_weight_grad(main_grad, grad_y, x)
    limit = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[main]
    assert (main_grad.double() - exact).norm() <= limit * exact.norm()


def test_no_rows(adapter: Adapter) -> None:
    main_grad = torch.ones(6, 10)
    adapter("weight_grad").accumulate_weight_grad(main_grad, torch.empty(0, 6), torch.empty(0, 10))
    assert bool((main_grad == 1).all())
