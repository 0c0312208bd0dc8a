"""The weight gradient is added to the main gradient in the main gradient's precision."""

import pytest
import torch
from torch import Tensor

from megalite.kernels.matmul import accumulate_weight_grad


def draw_operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(40, width, generator=generator).to(dtype) for width in (6, 8))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "dtype, main, tolerance",
    [
        (torch.float64, torch.float64, 1e-13),
        (torch.float32, torch.float32, 1e-5),
        # On CPU each product is rounded to its type before the addition: to 8 bits in bf16.
        (torch.bfloat16, torch.float32, 2**-7),
        (torch.float16, torch.float32, 2**-10),
    ],
)
def test_weight_gradients_accumulate(dtype: torch.dtype, main: torch.dtype, tolerance: float) -> None:
    grad_y, x = draw_operands(dtype)
    start = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(main)
    main_grad = start.clone()
    for _ in range(3):
        accumulate_weight_grad(main_grad, grad_y, x)
    product = torch.einsum("no,ni->oi", grad_y.double(), x.double())
    assert main_grad.dtype == main
    error = (main_grad.double() - start.double() - 3 * product).abs().max() / product.abs().max()
    assert error <= 3 * tolerance, error


def test_weight_gradients_are_added_through_a_view() -> None:
    flat = torch.zeros(60, dtype=torch.float64)
    grad_y, x = (tensor.double() for tensor in draw_operands(torch.float32))
    accumulate_weight_grad(flat[8:56].view(6, 8), grad_y, x)
    torch.testing.assert_close(flat[8:56].view(6, 8), grad_y.t() @ x)
    assert not flat[:8].any()
    assert not flat[56:].any()
