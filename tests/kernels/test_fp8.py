"""fp8 products against the same arithmetic in fp64, and against the bf16 products that they replace."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels.matmul import PLAIN
from megalite.kernels.quantization import (
    E4M3,
    E5M2,
    BlockProducts,
    Fp8Products,
    Rounded,
    cast,
    cast_rows,
    largest,
    why_not_blockwise,
    why_not_fp8,
)

SHAPE = (6, 2, 64, 48)  # rows in two dimensions, i, o


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).bfloat16()


def quantize(x: Tensor, dtype: torch.dtype) -> Rounded:
    return cast(x, largest(x), dtype)


def dequantized(x: Tensor, dtype: torch.dtype, *, rowwise: bool = False) -> Tensor:
    """Return x quantized and dequantized, to emulate a factor."""
    rounded, undo = cast_rows(x, dtype) if rowwise else quantize(x, dtype)
    return rounded.double() * undo.double()


def relative_error(ours: Tensor, other: Tensor) -> float:
    return float((ours.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize(("dtype", "largest", "bits"), [(E4M3, 448.0, 3), (E5M2, 57344.0, 2)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 3e4])
def test_tensors_are_scaled_by_a_power_of_two_to_fill_the_range(
    dtype: torch.dtype, largest: float, bits: int, scale: float
) -> None:
    x = draw(0, 33, 7, scale=scale)
    rounded, undo = quantize(x, dtype)
    mantissa, _ = torch.frexp(undo)
    assert float(mantissa) == 0.5
    assert undo.dtype == torch.float32 and undo.dim() == 0
    assert largest / 2 < float(rounded.double().abs().max()) <= largest
    kept = rounded.double().abs() > largest * 2.0**-12
    error = (rounded.double() * undo.double() - x.double()).abs() / x.double().abs()
    assert float(error[kept].max()) <= 2.0 ** -(bits + 1)


def test_rounding_does_not_depend_on_other_elements() -> None:
    """A shard without the tensor's largest element has another scale but the same values."""
    x = draw(1, 64)
    x[0] = 3.0 * x[1:].abs().max()
    assert float(quantize(x, E4M3)[1]) != float(quantize(x[1:], E4M3)[1])
    normal = x[1:].abs() > x[0] * 2.0**-12
    assert torch.equal(dequantized(x, E4M3)[1:][normal], dequantized(x[1:], E4M3)[normal])


def test_zeros_stay_zero_and_non_finite_values_make_all_nan() -> None:
    assert dequantized(torch.zeros(4, 4, dtype=torch.bfloat16), E4M3).eq(0.0).all()
    for bad in (float("inf"), -float("inf"), float("nan")):
        x = draw(2, 8)
        x[3] = bad
        assert dequantized(x, E5M2).isnan().all(), bad


def test_rows_have_separate_scales() -> None:
    x = draw(2, 5, 64) * torch.tensor([1e-9, 1.0, 3e4, 0.0, 2.0]).bfloat16()[:, None]
    data, undo = cast_rows(x, E4M3)
    assert undo.shape == (5, 1)
    for row in range(5):
        alone = quantize(x[row : row + 1], E4M3)
        assert torch.equal(data[row : row + 1].view(torch.uint8), alone.data.view(torch.uint8))
        assert torch.equal(undo[row, 0], alone.undo)


def scaled_mm(a: Tensor, b: Tensor, undo_a: Tensor, undo_b: Tensor, **rest: Any) -> Tensor:
    """Emulate torch's product with CUDA's requirements; on a CPU torch supports no rowwise scales."""
    assert a.is_contiguous() and b.t().is_contiguous() and not any(size % 16 for size in (a.shape[1], *b.shape))
    assert undo_a.dtype == undo_b.dtype == torch.float32 and {a.dtype, b.dtype} <= {E4M3, E5M2} and b.dtype == E4M3
    rowwise = undo_a.dim() == 2
    assert (undo_a.shape, undo_b.shape) == (((len(a), 1), (1, b.shape[1])) if rowwise else ((), ()))
    assert not rowwise or rest["out_dtype"] == torch.bfloat16
    y = (a.double() * undo_a.double()) @ (b.double() * undo_b.double())
    bias = rest.get("bias")
    return (y if bias is None else y + bias.double()).to(rest["out_dtype"])


@pytest.fixture(params=["torch's", "by definition"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "torch's":
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    return str(request.param)


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 100.0])
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_those_of_rounded_factors(bias: bool, scale: float, rowwise: bool, product: str) -> None:
    if rowwise and product == "torch's":
        pytest.skip("torch supports no rowwise scales on a CPU")
    s, b, i, o = SHAPE
    x, weight, grad = (draw(3, s, b, i, scale=scale), draw(4, o, i, scale=0.02), draw(5, s, b, o, scale=scale))
    added = draw(6, o, scale=scale) if bias else None
    products = Fp8Products(rowwise=rowwise)
    of_x, of_grad = products.measure(x), products.measure(grad)
    assert (of_x is None) == rowwise
    y, grad_x = products.output(x, weight, added, of_x), products.input_grad(grad, weight, of_grad)
    assert (y.shape, grad_x.shape) == ((s, b, o), (s, b, i))
    assert y.dtype == grad_x.dtype == torch.bfloat16
    x, grad = x.flatten(0, 1), grad.flatten(0, 1)
    emulated = dequantized(x, E4M3, rowwise=rowwise) @ dequantized(weight, E4M3, rowwise=rowwise).t()
    if added is not None:
        emulated = emulated + added.double()
    assert relative_error(y.flatten(0, 1), emulated) <= 4e-3
    transposed = dequantized(weight.t(), E4M3, rowwise=rowwise).t()
    assert relative_error(grad_x.flatten(0, 1), dequantized(grad, E5M2, rowwise=rowwise) @ transposed) <= 4e-3
    # Errors of factors with 3 and 3, or 2 and 3 mantissa bits.
    assert 5e-3 < relative_error(y.flatten(0, 1), PLAIN.output(x, weight, added)) <= 0.06
    assert 5e-3 < relative_error(grad_x.flatten(0, 1), PLAIN.input_grad(grad, weight)) <= 0.1


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_weight_gradients_equal_those_of_rounded_factors(rowwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight gradients sum over rows, so each column has a scale. With 12 rows the product stays in bf16."""
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    products = Fp8Products(rowwise=rowwise)
    for rows in (32, 12):
        x, grad = draw(3, rows, 48), draw(5, rows, 64, scale=1e-4)
        multiply = products.weight_grad(products.measure(x), products.measure(grad))
        assert multiply is not None
        found, exact = multiply(grad, x), grad.double().t() @ x.double()
        if rows == 12:
            assert torch.equal(found, grad.t() @ x)
            continue
        assert found.dtype == (torch.bfloat16 if rowwise else torch.float32)
        factors = dequantized(grad.t(), E5M2, rowwise=rowwise), dequantized(x.t(), E4M3, rowwise=rowwise)
        assert relative_error(found, factors[0] @ factors[1].t()) <= (4e-3 if rowwise else 1e-6)
        assert 5e-3 < relative_error(found, exact) <= 0.1
    assert Fp8Products(weight_grads=False).weight_grad(None, None) is None


def round_in_blocks(x: Tensor, rows: int) -> Tensor:
    """Round each block of rows x 128 to e4m3, scaled by the largest power of two that fits."""
    found = torch.empty(x.shape)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], 128):
            block = x[i : i + rows, j : j + 128].float()
            scale = 2.0 ** math.floor(math.log2(448.0 / float(block.abs().max())))
            found[i : i + rows, j : j + 128] = (block * scale).to(E4M3).float() / scale
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_blockwise_products_equal_those_of_rounded_blocks(bias: bool) -> None:
    x, weight, grad = draw(3, 64, 2, 256), draw(4, 384, 256, scale=0.02), draw(5, 64, 2, 384, scale=1e-4)
    x[..., :128] *= 3e5  # one scale per token would lose the other channels
    products, added = BlockProducts(), draw(6, 384) if bias else None
    y, grad_x = products.output(x, weight, added), products.input_grad(grad, weight)
    multiply = products.weight_grad(products.measure(x), products.measure(grad))
    assert multiply is not None
    x, grad = x.flatten(0, 1), grad.flatten(0, 1)
    want = (round_in_blocks(x, 1) @ round_in_blocks(weight, 128).t()).bfloat16()
    assert torch.equal(y.flatten(0, 1), want if added is None else want + added)
    squares = round_in_blocks(weight, 128).t().contiguous()
    assert torch.equal(grad_x.flatten(0, 1), (round_in_blocks(grad, 1) @ squares.t()).bfloat16())
    found = multiply(grad, x)
    assert found.dtype == torch.float32
    assert torch.equal(found, round_in_blocks(grad.t(), 1) @ round_in_blocks(x.t(), 1).t())
    assert torch.equal(multiply(grad[:96], x[:96]), grad[:96].t() @ x[:96])
    for ours, exact in ((grad_x.flatten(0, 1), grad @ weight), (found, grad.double().t() @ x.double())):
        assert 5e-3 < relative_error(ours, exact) <= 0.06
    small, blockwise, tensorwise = (each[:, 128:] for each in (x, round_in_blocks(x, 1), dequantized(x, E4M3)))
    assert relative_error(blockwise, small) <= 0.04 < 0.5 < relative_error(tensorwise, small)


def test_shards_have_the_bits_of_the_whole_tensor() -> None:
    """Bits and scales do not depend on how layers are split over tp, or tokens over dp, cp and microbatches."""
    products, x = BlockProducts(), draw(3, 256, 384)
    x[:128] *= 1e-9
    rows, columns = (products._rounded(each, None, E4M3) for each in (x, x.t()))
    squares = products._rounded_weight(x, None)
    for part in (slice(0, 128), slice(128, 256)):
        for whole, shard, row, step in (
            (rows, products._rounded(x[part], None, E4M3), part, 1),
            (columns, products._rounded(x[:, part].t(), None, E4M3), part, 1),
            (squares, products._rounded_weight(x[part], None), part, 128),
        ):
            assert torch.equal(whole.data[row].view(torch.uint8), shard.data.view(torch.uint8))
            assert torch.equal(whole.undo[row.start // step : row.stop // step], shard.undo)
    assert torch.equal(products._rounded(x[:, 128:], None, E4M3).undo, rows.undo[:, 1:])
    assert torch.equal(products._rounded_weight(x.t(), None).undo, squares.undo.t())


def test_scales_have_the_layout_that_torch_requires() -> None:
    """torch's shape inference checks CUDA's rules on tensors without data."""
    products = BlockProducts()
    for tokens, inner, outer in ((128, 128, 128), (384, 640, 256), (256, 512, 1152)):
        x, weight, grad = (draw(1, *shape).to("meta") for shape in ((tokens, inner), (outer, inner), (tokens, outer)))
        y, grad_x = products.output(x, weight, draw(1, outer).to("meta")), products.input_grad(grad, weight)
        multiply = products.weight_grad(None, None)
        assert multiply is not None
        found = multiply(grad, x)
        assert (y.shape, grad_x.shape, found.shape) == ((tokens, outer), (tokens, inner), (outer, inner))
        assert (y.dtype, grad_x.dtype, found.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_unchanged_weight_is_rounded_once() -> None:
    calls: list[int] = []

    def counted(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Rounded:
        calls.append(x.shape[0])
        return cast(x, largest, dtype)

    products, weight = Fp8Products((largest, counted, cast_rows)), draw(4, 64, 48)
    x, grad = draw(3, 32, 48), draw(5, 32, 64)
    with products.caching_weights():
        first = products.output(x, weight, None)
        calls.clear()
        for _ in range(3):
            assert torch.equal(products.output(x, weight, None), first)
            products.input_grad(grad, weight)
        assert calls == [32, 32, 48, *[32] * 4]
    weight.neg_()
    assert torch.equal(products.output(x, weight, None), -first)
    with products.caching_weights():
        assert torch.equal(products.output(x, weight, None), -first)


def test_fp8_is_unavailable_on_cpu() -> None:
    assert why_not_fp8(torch.device("cpu")) == "cpu has no matrix products in fp8"


@pytest.mark.parametrize(
    ("capability", "version", "has"),
    [((9, 0), "12.9", True), ((9, 0), "13.0", True), ((9, 0), "12.8", False), ((10, 0), "13.0", False)],
)
def test_blockwise_needs_hopper_and_cuda_12_9(
    capability: tuple[int, int], version: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", version)
    reason = why_not_blockwise(torch.device("cuda"))
    assert (reason is None) == has
    assert has or (
        reason is not None
        and f"{capability[0]}.{capability[1]} and torch has CUDA {version}; use --fp8-recipe tensorwise" in reason
    )


@pytest.mark.gpu
def test_products_on_cuda_equal_those_of_rounded_factors() -> None:
    device = torch.device("cuda")
    reason = why_not_fp8(device)
    if reason is not None:
        pytest.skip(reason)
    x, weight, grad = draw(3, 512, 2, 256), draw(4, 384, 256, scale=0.02), draw(5, 512, 2, 384)
    on = [each.to(device) for each in (x.flatten(0, 1), grad.flatten(0, 1))]
    for rowwise in (False, True):
        products = Fp8Products(rowwise=rowwise)
        y = products.output(x.to(device), weight.to(device), None).flatten(0, 1)
        grad_x = products.input_grad(grad.to(device), weight.to(device)).flatten(0, 1)
        multiply = products.weight_grad(*map(products.measure, on))
        assert multiply is not None
        grad_weight = multiply(on[1], on[0])
        factors = {
            (name, transposed): dequantized(each.t() if transposed else each, dtype, rowwise=rowwise)
            for name, each, dtype in (
                ("x", x.flatten(0, 1), E4M3),
                ("w", weight, E4M3),
                ("g", grad.flatten(0, 1), E5M2),
            )
            for transposed in (False, True)
        }
        assert relative_error(y.cpu(), factors["x", False] @ factors["w", False].t()) <= 1e-2
        assert relative_error(grad_x.cpu(), factors["g", False] @ factors["w", True].t()) <= 1e-2
        assert relative_error(grad_weight.cpu(), factors["g", True] @ factors["x", True].t()) <= 1e-2
    if why_not_blockwise(device) is None:
        blocks = BlockProducts()
        found = blocks.output(x.to(device), weight.to(device), None).cpu()
        assert relative_error(found, blocks.output(x, weight, None)) <= 1e-2
        found = blocks.input_grad(grad.to(device), weight.to(device)).cpu()
        assert relative_error(found, blocks.input_grad(grad, weight)) <= 1e-2
        multiply = blocks.weight_grad(None, None)
        assert multiply is not None
        # Tensor cores of compute capability 9 add products of fp8 in about 14 bits (arXiv 2412.19437, 3.3.2).
        assert relative_error(multiply(on[1], on[0]).cpu(), multiply(grad.flatten(0, 1), x.flatten(0, 1))) <= 1e-2
