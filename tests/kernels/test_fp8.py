"""fp8 products against the same arithmetic in fp64, and against the bf16 products that they replace."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels.fp8 import (
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
from megalite.kernels.matmul import PLAIN

SHAPE = (6, 2, 64, 48)  # rows in two dimensions, i, o


def drawn(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).bfloat16()


def quantise(x: Tensor, dtype: torch.dtype) -> Rounded:
    return cast(x, largest(x), dtype)


def restored(x: Tensor, dtype: torch.dtype, *, rowwise: bool = False) -> Tensor:
    """Return x after rounding, to emulate a factor."""
    rounded, undo = cast_rows(x, dtype) if rowwise else quantise(x, dtype)
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


def test_a_row_has_its_own_scale() -> None:
    x = drawn(2, 5, 64) * torch.tensor([1e-9, 1.0, 3e4, 0.0, 2.0]).bfloat16()[:, None]
    data, undo = cast_rows(x, E4M3)
    assert undo.shape == (5, 1)
    for row in range(5):
        alone = quantise(x[row : row + 1], E4M3)
        assert torch.equal(data[row : row + 1].view(torch.uint8), alone.data.view(torch.uint8))
        assert torch.equal(undo[row, 0], alone.undo)


def scaled_mm(a: Tensor, b: Tensor, undo_a: Tensor, undo_b: Tensor, **rest: Any) -> Tensor:
    """Emulates torch's product with CUDA's requirements; torch's own on a CPU supports no rowwise scales."""
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
def test_products_are_those_of_the_rounded_factors(bias: bool, scale: float, rowwise: bool, product: str) -> None:
    if rowwise and product == "torch's":
        pytest.skip("on a CPU it takes no scales of rows")
    s, b, i, o = SHAPE
    x, weight, grad = (drawn(3, s, b, i, scale=scale), drawn(4, o, i, scale=0.02), drawn(5, s, b, o, scale=scale))
    added = drawn(6, o, scale=scale) if bias else None
    products = Fp8Products(rowwise=rowwise)
    of_x, of_grad = products.measure(x), products.measure(grad)
    assert (of_x is None) == rowwise
    y, grad_x = products.output(x, weight, added, of_x), products.input_grad(grad, weight, of_grad)
    assert (y.shape, grad_x.shape) == ((s, b, o), (s, b, i))
    assert y.dtype == grad_x.dtype == torch.bfloat16
    x, grad = x.flatten(0, 1), grad.flatten(0, 1)
    emulated = restored(x, E4M3, rowwise=rowwise) @ restored(weight, E4M3, rowwise=rowwise).t()
    if added is not None:
        emulated = emulated + added.double()
    assert relative(y.flatten(0, 1), emulated) <= 4e-3
    turned = restored(weight.t(), E4M3, rowwise=rowwise).t()
    assert relative(grad_x.flatten(0, 1), restored(grad, E5M2, rowwise=rowwise) @ turned) <= 4e-3
    # Two factors rounded to 3 and 3, or 2 and 3 bits.
    assert 5e-3 < relative(y.flatten(0, 1), PLAIN.output(x, weight, added)) <= 0.06
    assert 5e-3 < relative(grad_x.flatten(0, 1), PLAIN.input_grad(grad, weight)) <= 0.1


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_weight_gradients(rowwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight gradients sum over rows, so each column has a scale. With 12 rows the product stays in bf16."""
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    products = Fp8Products(rowwise=rowwise)
    for rows in (32, 12):
        x, grad = drawn(3, rows, 48), drawn(5, rows, 64, scale=1e-4)
        multiply = products.weight_grad(products.measure(x), products.measure(grad))
        assert multiply is not None
        found, exact = multiply(grad, x), grad.double().t() @ x.double()
        if rows == 12:
            assert torch.equal(found, grad.t() @ x)
            continue
        assert found.dtype == (torch.bfloat16 if rowwise else torch.float32)
        factors = restored(grad.t(), E5M2, rowwise=rowwise), restored(x.t(), E4M3, rowwise=rowwise)
        assert relative(found, factors[0] @ factors[1].t()) <= (4e-3 if rowwise else 1e-6)
        assert 5e-3 < relative(found, exact) <= 0.1
    assert Fp8Products(weight_grads=False).weight_grad(None, None) is None


def in_blocks(x: Tensor, rows: int) -> Tensor:
    """Return x with each block of rows x 128 rounded to e4m3 by the largest power of two that fits, written plainly."""
    found = torch.empty(x.shape)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], 128):
            block = x[i : i + rows, j : j + 128].float()
            scale = 2.0 ** math.floor(math.log2(448.0 / float(block.abs().max())))
            found[i : i + rows, j : j + 128] = (block * scale).to(E4M3).float() / scale
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_blockwise_products_are_those_of_the_rounded_blocks(bias: bool) -> None:
    x, weight, grad = drawn(3, 64, 2, 256), drawn(4, 384, 256, scale=0.02), drawn(5, 64, 2, 384, scale=1e-4)
    x[..., :128] *= 3e5  # beside which the other channels of a token would be lost
    products, added = BlockProducts(), drawn(6, 384) if bias else None
    y, grad_x = products.output(x, weight, added), products.input_grad(grad, weight)
    multiply = products.weight_grad(products.measure(x), products.measure(grad))
    assert multiply is not None
    x, grad = x.flatten(0, 1), grad.flatten(0, 1)
    want = (in_blocks(x, 1) @ in_blocks(weight, 128).t()).bfloat16()
    assert torch.equal(y.flatten(0, 1), want if added is None else want + added)
    squares = in_blocks(weight, 128).t().contiguous()
    assert torch.equal(grad_x.flatten(0, 1), (in_blocks(grad, 1) @ squares.t()).bfloat16())
    found = multiply(grad, x)
    assert found.dtype == torch.float32
    assert torch.equal(found, in_blocks(grad.t(), 1) @ in_blocks(x.t(), 1).t())
    assert torch.equal(multiply(grad[:96], x[:96]), grad[:96].t() @ x[:96])
    for ours, exact in ((grad_x.flatten(0, 1), grad @ weight), (found, grad.double().t() @ x.double())):
        assert 5e-3 < relative(ours, exact) <= 0.06
    small = x[:, 128:]
    assert relative(in_blocks(x, 1)[:, 128:], small) <= 0.04 < 0.5 < relative(restored(x, E4M3)[:, 128:], small)


def test_shards_of_blocks_are_rounded_like_the_whole() -> None:
    """Shards have the bits and the scales of the whole: layers split over tp, batches over dp, cp or microbatches."""
    products, x = BlockProducts(), drawn(3, 256, 384)
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


def test_scales_lie_as_torch_wants_them() -> None:
    """torch's shape inference checks CUDA's rules on tensors without data."""
    products = BlockProducts()
    for tokens, inner, outer in ((128, 128, 128), (384, 640, 256), (256, 512, 1152)):
        x, weight, grad = (drawn(1, *shape).to("meta") for shape in ((tokens, inner), (outer, inner), (tokens, outer)))
        y, grad_x = products.output(x, weight, drawn(1, outer).to("meta")), products.input_grad(grad, weight)
        multiply = products.weight_grad(None, None)
        assert multiply is not None
        found = multiply(grad, x)
        assert (y.shape, grad_x.shape, found.shape) == ((tokens, outer), (tokens, inner), (outer, inner))
        assert (y.dtype, grad_x.dtype, found.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_a_weight_is_rounded_once_while_it_does_not_change() -> None:
    calls: list[int] = []

    def counted(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Rounded:
        calls.append(x.shape[0])
        return cast(x, largest, dtype)

    products, weight = Fp8Products((largest, counted, cast_rows)), drawn(4, 64, 48)
    x, grad = drawn(3, 32, 48), drawn(5, 32, 64)
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


def test_a_cpu_has_none() -> None:
    assert why_not_fp8(torch.device("cpu")) == "cpu has no matrix products in fp8"


@pytest.mark.parametrize(
    ("capability", "version", "has"),
    [((9, 0), "12.9", True), ((9, 0), "13.0", True), ((9, 0), "12.8", False), ((10, 0), "13.0", False)],
)
def test_blockwise_is_of_hopper(
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
def test_products_on_cuda() -> None:
    device = torch.device("cuda")
    reason = why_not_fp8(device)
    if reason is not None:
        pytest.skip(reason)
    x, weight, grad = drawn(3, 512, 2, 256), drawn(4, 384, 256, scale=0.02), drawn(5, 512, 2, 384)
    on = [each.to(device) for each in (x.flatten(0, 1), grad.flatten(0, 1))]
    for rowwise in (False, True):
        products = Fp8Products(rowwise=rowwise)
        y = products.output(x.to(device), weight.to(device), None).flatten(0, 1)
        grad_x = products.input_grad(grad.to(device), weight.to(device)).flatten(0, 1)
        multiply = products.weight_grad(*map(products.measure, on))
        assert multiply is not None
        grad_weight = multiply(on[1], on[0])
        factors = {
            (name, turned): restored(each.t() if turned else each, dtype, rowwise=rowwise)
            for name, each, dtype in (
                ("x", x.flatten(0, 1), E4M3),
                ("w", weight, E4M3),
                ("g", grad.flatten(0, 1), E5M2),
            )
            for turned in (False, True)
        }
        assert relative(y.cpu(), factors["x", False] @ factors["w", False].t()) <= 1e-2
        assert relative(grad_x.cpu(), factors["g", False] @ factors["w", True].t()) <= 1e-2
        assert relative(grad_weight.cpu(), factors["g", True] @ factors["x", True].t()) <= 1e-2
    if why_not_blockwise(device) is None:
        blocks = BlockProducts()
        assert (
            relative(blocks.output(x.to(device), weight.to(device), None).cpu(), blocks.output(x, weight, None)) <= 1e-2
        )
        found = blocks.input_grad(grad.to(device), weight.to(device)).cpu()
        assert relative(found, blocks.input_grad(grad, weight)) <= 1e-2
        multiply = blocks.weight_grad(None, None)
        assert multiply is not None
        # Tensor cores of compute capability 9 add products of fp8 in some 14 bits (arXiv 2412.19437, 3.3.2).
        assert relative(multiply(on[1], on[0]).cpu(), multiply(grad.flatten(0, 1), x.flatten(0, 1))) <= 1e-2
