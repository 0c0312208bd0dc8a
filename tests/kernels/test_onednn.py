"""oneDNN's fp32 products: numbers, selection rules, and whole steps of several layouts with them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.config.errors import ConfigError
from megalite.kernels import matmul, probes, registry
from megalite.kernels.matmul import LEAST_ROWS, Products, onednn_accumulate_weight_grad, onednn_matmul
from megalite.kernels.probes import cpu_kinds, why_not_onednn
from megalite.kernels.registry import Kernels, KernelUse, why_not

CPU = torch.device("cpu")
OPERATIONS = ("matmul", "weight_grad")

pytestmark = pytest.mark.skipif(why_not_onednn("cpu") is not None, reason=str(why_not_onednn("cpu")))


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_accurate(found: Tensor, exact: Tensor) -> None:
    """Compare within fp32's rounding of the largest element."""
    assert found.dtype == torch.float32 and found.shape == exact.shape
    assert (found.double() - exact).abs().max() <= 1e-5 * exact.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("shape", [(0,), (1,), (65,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("size", [(1, 1), (33, 17)], ids=str)
def test_products_are_accurate(shape: tuple[int, ...], transposed: bool, size: tuple[int, int]) -> None:
    inner, outer = size
    a, bias = draw(1, *shape, inner), draw(2, outer)
    b = draw(3, outer, inner).t() if transposed else draw(3, inner, outer)
    exact = a.double() @ b.double()
    if not a.numel():
        assert onednn_matmul(a, b).shape == exact.shape
        return
    assert_accurate(onednn_matmul(a, b), exact)
    assert_accurate(onednn_matmul(a, b, bias), exact + bias.double())
    if a.dim() == 2:
        out = torch.full_like(exact, 9.0, dtype=torch.float32)
        assert onednn_matmul(a, b, bias, out=out) is out
        assert_accurate(out, exact + bias.double())


@pytest.mark.parametrize(
    "outputs, rows, blocks", [(48, 3, False), (48, 4, True), (48, 16, True), (48, 17, False), (50, 8, False)]
)
def test_products_of_few_rows_use_blocks_of_the_weight(
    outputs: int, rows: int, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only outside autograd and with torch's kernel: MKL would copy the weight first."""
    x, weight, bias = draw(1, 1, rows, 40), draw(2, outputs, 40), draw(3, outputs)
    exact = x.double() @ weight.double().t()
    for stacked in (False, True):
        products = Products(matmul.matmul, stacked=stacked)
        assert_accurate(products.output_alone(x, weight.view(2, -1, 40) if stacked else weight, None), exact)
        assert_accurate(products.output_alone(x, weight, bias), exact + bias.double())
    for kernel, passed_on in ((matmul.matmul, not blocks), (onednn_matmul, True)):
        for stacked in (False, True):
            products = Products(kernel, stacked=stacked)
            monkeypatch.setattr(products, "output", lambda *given: given)
            for given in ((x, weight.view(2, -1, 40) if stacked else weight, None), (x, weight, bias)):
                found = products.output_alone(*given)
                same = isinstance(found, tuple) and all(a is b for a, b in zip(found, given, strict=True))
                assert same == passed_on


def test_products_accept_views() -> None:
    """Inputs are a slice of a tied embedding, and activations in another memory order."""
    table, x = draw(1, 50, 40), draw(2, 9, 6, 20).transpose(0, 1)
    assert_accurate(onednn_matmul(x, table[10:30, 8:31]), x.double() @ table[10:30, 8:31].double())
    assert_accurate(
        onednn_matmul(x[..., :15], table[10:30, 8:23].t()), x[..., :15].double() @ table[10:30, 8:23].double().t()
    )


def test_non_finite_inputs_give_non_finite_outputs() -> None:
    a, b = draw(1, 4, 8), draw(2, 8, 3)
    a[1, 2], a[3, 0] = torch.nan, torch.inf
    found = onednn_matmul(a, b)
    assert found[1].isnan().all() and not found[3].isfinite().any() and found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("rows", [0, 1, LEAST_ROWS - 1, LEAST_ROWS, 200])
def test_weight_gradients_accumulate(rows: int) -> None:
    x, grad_y = draw(1, rows, 40), draw(2, rows, 24)
    flat = torch.full((30 + 24 * 40,), 0.5)
    main_grad = flat[10:-20].view(24, 40)
    for _ in range(2):
        onednn_accumulate_weight_grad(main_grad, grad_y, x)
    exact = 0.5 + 2.0 * (grad_y.double().t() @ x.double())
    torch.testing.assert_close(main_grad.double(), exact, rtol=1e-5, atol=1e-4)
    assert (flat[:10] == 0.5).all() and (flat[-20:] == 0.5).all()


@pytest.mark.parametrize(
    "kind, dtype, size, backend",
    [
        (("amd-avx512",), torch.float32, 128, "onednn"),
        ((), torch.float32, 128, "torch"),
        (("amd-avx512",), torch.float32, 127, "torch"),  # the operator's overhead of 15 microseconds dominates
        (("amd-avx512",), torch.bfloat16, 1024, "torch"),
        (("amd-avx512",), torch.float64, 1024, "torch"),
    ],
)
def test_rules_choose_onednn_for_fp32_on_amd(
    kind: tuple[str, ...], dtype: torch.dtype, size: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "cpu_kinds", lambda: kind)
    kernels = Kernels()
    for operation in OPERATIONS:
        kernels.get(operation, device=CPU, dtype=dtype, size=size)
    assert [choice.backend for choice in kernels.chosen] == [backend] * 2


@pytest.mark.parametrize(
    "vendor, capability, kinds",
    [
        ("AuthenticAMD", "AVX512", ("amd-avx512",)),
        ("AuthenticAMD", "AVX2", ()),
        ("GenuineIntel", "AVX512", ()),
        (None, "AVX512", ()),
    ],
)
def test_cpu_kinds_of_processors(
    vendor: str | None, capability: str, kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    about = tmp_path / "cpuinfo"
    if vendor is not None:
        about.write_text(f"processor : 0\nvendor_id : {vendor}\n")
    assert cpu_kinds(about) == kinds


def test_onednn_needs_a_cpu_and_fp32() -> None:
    assert why_not("matmul", "onednn", KernelUse("cuda", torch.float32, 256)) == "onednn needs a CPU, not cuda"
    with pytest.raises(ConfigError, match=r"cannot be used: it supports float32, not bfloat16; use matmul=torch"):
        Kernels({"matmul": "onednn"}).get("matmul", device=CPU, dtype=torch.bfloat16, size=256)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_self_check_rejects_a_wrong_operator(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not document this operator, so its meaning may change."""
    right = matmul._onednn_product
    monkeypatch.setattr(matmul, "_onednn_product", lambda a, b, bias: 1.001 * right(a, b, bias))
    probes._why_wrong.cache_clear()
    try:
        reason = why_not(operation, "onednn", KernelUse("cpu", torch.float32, 256))
    finally:
        probes._why_wrong.cache_clear()
    assert reason is not None and reason.startswith("onednn's kernel differs from torch in its self-check")
