"""Products in fp8 against the same arithmetic in fp64, and against the products in bf16 that they stand for."""

import pytest
import torch
from torch import Tensor

from megalite.kernels.matmul import E4M3, E5M2, PLAIN, Fp8Products, quantise, why_not_fp8

SHAPE = (6, 2, 64, 48)  # rows in two dimensions, i, o


def drawn(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).bfloat16()


def restored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What of x is left after rounding: the emulation of a factor."""
    rounded, undo = quantise(x, dtype)
    return rounded.double() * undo.double()


def relative(ours: Tensor, other: Tensor) -> float:
    return float((ours.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize(("dtype", "largest", "bits"), [(E4M3, 448.0, 3), (E5M2, 57344.0, 2)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 3e4])
def test_a_tensor_fills_the_range_by_a_power_of_two(
    dtype: torch.dtype, largest: float, bits: int, scale: float
) -> None:
    x = drawn(0, 33, 7, scale=scale)
    rounded, undo = quantise(x, dtype)
    mantissa, _ = torch.frexp(undo)
    assert float(mantissa) == 0.5
    assert undo.dtype == torch.float32 and undo.dim() == 0
    assert largest / 2 < float(rounded.double().abs().max()) <= largest
    kept = rounded.double().abs() > largest * 2.0**-12
    error = (rounded.double() * undo.double() - x.double()).abs() / x.double().abs()
    assert float(error[kept].max()) <= 2.0 ** -(bits + 1)


def test_rounding_does_not_depend_on_the_neighbours() -> None:
    """A shard without the tensor's largest element has another scale and the same values."""
    x = drawn(1, 64)
    x[0] = 3.0 * x[1:].abs().max()
    assert float(quantise(x, E4M3)[1]) != float(quantise(x[1:], E4M3)[1])
    normal = x[1:].abs() > x[0] * 2.0**-12
    assert torch.equal(restored(x, E4M3)[1:][normal], restored(x[1:], E4M3)[normal])


def test_zeros_stay_zeros_and_what_is_not_finite_spoils_all() -> None:
    assert restored(torch.zeros(4, 4, dtype=torch.bfloat16), E4M3).eq(0.0).all()
    for bad in (float("inf"), -float("inf"), float("nan")):
        x = drawn(2, 8)
        x[3] = bad
        assert restored(x, E5M2).isnan().all(), bad


@pytest.mark.parametrize("scale", [1e-6, 1.0, 100.0])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_rounded_factors(bias: bool, scale: float) -> None:
    s, b, i, o = SHAPE
    x, weight, grad = (drawn(3, s, b, i, scale=scale), drawn(4, o, i, scale=0.02), drawn(5, s, b, o, scale=scale))
    added = drawn(6, o, scale=scale) if bias else None
    products = Fp8Products()
    y, grad_x = products.output(x, weight, added), products.input_grad(grad, weight)
    assert (y.shape, grad_x.shape) == ((s, b, o), (s, b, i))
    assert y.dtype == grad_x.dtype == torch.bfloat16
    emulated = restored(x, E4M3) @ restored(weight, E4M3).t()
    if added is not None:
        emulated = emulated + added.double()
    assert relative(y, emulated) <= 4e-3
    assert relative(grad_x, restored(grad, E5M2) @ restored(weight, E4M3)) <= 4e-3
    # Two factors rounded to 3 and 3, or 2 and 3 bits.
    assert 5e-3 < relative(y, PLAIN.output(x, weight, added)) <= 0.06
    assert 5e-3 < relative(grad_x, PLAIN.input_grad(grad, weight)) <= 0.1


def test_columns_in_any_layout() -> None:
    """Slices of activations, a transposed weight."""
    products = Fp8Products()
    x, weight, grad = (drawn(7, 12, 4, 32)[2:10, ::2], drawn(8, 32, 48).t(), drawn(9, 48, 8, 2).permute(1, 2, 0))
    packed = products.output(x.contiguous(), weight.contiguous(), None)
    assert torch.equal(products.output(x, weight.contiguous(), None), packed)
    assert torch.equal(
        products.input_grad(grad, weight.contiguous()), products.input_grad(grad.contiguous(), weight.contiguous())
    )


def test_a_cpu_has_none() -> None:
    assert why_not_fp8(torch.device("cpu")) == "cpu has no matrix products in fp8"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_products_on_cuda() -> None:
    device = torch.device("cuda")
    reason = why_not_fp8(device)
    if reason is not None:
        pytest.skip(reason)
    x, weight, grad = drawn(3, 512, 2, 256), drawn(4, 384, 256, scale=0.02), drawn(5, 512, 2, 384)
    products = Fp8Products()
    y = products.output(x.to(device), weight.to(device), None)
    grad_x = products.input_grad(grad.to(device), weight.to(device))
    assert relative(y.cpu(), restored(x, E4M3) @ restored(weight, E4M3).t()) <= 1e-2
    assert relative(grad_x.cpu(), restored(grad, E5M2) @ restored(weight, E4M3)) <= 1e-2
