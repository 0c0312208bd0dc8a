"""RMSNorm and LayerNorm by Triton and by torch against their definitions in float64, with gradients from those."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megalite.kernels.layer_ops import layer_norm, rms_norm
from megalite.kernels.triton.norms import layernorm, rmsnorm
from tests.kernels.triton.exact import DTYPES, LIMITS, assert_near, compare, distance, norm, numbers, run

pytestmark = pytest.mark.usefixtures("poisoned")
EPS = 1e-3  # large, so that leaving it out or putting it outside the root shows
FUNCTIONS = {"rms": rmsnorm, "layer": layernorm, "torch rms": rms_norm, "torch layer": layer_norm}
KINDS = pytest.mark.parametrize("kind", FUNCTIONS)
OURS = pytest.mark.parametrize("kind", ["rms", "layer"])


def ours(kind: str, zero_centered: bool = False) -> Callable[..., Tensor]:
    return partial(FUNCTIONS[kind], eps=EPS, zero_centered=zero_centered)


def exact(kind: str, zero_centered: bool = False) -> Callable[..., Tensor]:
    offset = float(zero_centered)
    if kind.endswith("rms"):
        return lambda x, weight: norm(x, weight, None, EPS, offset)
    return lambda x, weight, bias: norm(x, weight, bias, EPS, offset)


def limit_of(kind: str, dtype: torch.dtype) -> float:
    """torch's LayerNorm adds up gradients of half parameters in their type."""
    return LIMITS[dtype] * (4 if kind == "torch layer" and dtype in (torch.bfloat16, torch.float16) else 1)


def parameters(kind: str, n: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    weight, bias = (numbers(n, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    return [weight] if kind.endswith("rms") else [weight, bias]


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (3, 2, 96),
        (21, 100),
        (1, 1000),
        (3, 2049),
        *(pytest.param((1027, n), marks=pytest.mark.gpu) for n in (128, 2048, 5120, 8192, 12288, 65536)),
    ],
    ids=str,
)
def test_values_and_gradients(kind: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    x = numbers(*shape, dtype=dtype, device=device)
    inputs = [x, *parameters(kind, shape[-1], dtype, device)]
    compare(ours(kind), exact(kind), inputs, limit_of(kind, dtype))


@KINDS
def test_zero_centered(kind: str, device: torch.device) -> None:
    inputs = [numbers(5, 7, device=device), *parameters(kind, 7, torch.float64, device)]
    compare(ours(kind, zero_centered=True), exact(kind, zero_centered=True), inputs)


@KINDS
def test_rows_longer_than_a_block(kind: str, device: torch.device) -> None:
    """The forward has a kernel of its own for these; in float64 the backward has for 2049 elements."""
    n = 8192 + 8
    slope = torch.linspace(0.0, 50.0, n, dtype=torch.float64, device=device)  # blocks have means of their own
    inputs = [slope + numbers(2, n, device=device), *parameters(kind, n, torch.float64, device)]
    assert_near(ours(kind)(*(value.float() for value in inputs)), exact(kind)(*inputs))


@OURS
def test_one_element_a_row(kind: str, device: torch.device) -> None:
    inputs = [numbers(5, 1, device=device), *parameters(kind, 1, torch.float64, device)]
    found, expected = (run(f, inputs, [torch.ones_like(inputs[0])]) for f in (ours(kind), exact(kind)))
    for one, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@OURS
def test_no_rows(kind: str, device: torch.device) -> None:
    inputs = [numbers(2, 0, 12, device=device), *parameters(kind, 12, torch.float64, device)]
    (y,), (dx, *others) = run(ours(kind), inputs, [inputs[0]])
    assert y.shape == dx.shape == (2, 0, 12)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in others)


@OURS
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::2, :40],
        lambda x: x.transpose(0, 1),
        lambda x: x.transpose(0, 2),
        lambda x: x[:1].expand(4, 6, 50),
        lambda x: x[0, 0],
        lambda x: x[0, :, ::2],
    ],
    ids=["slice", "rows swapped", "no dense dimension", "expanded", "one row", "every other column"],
)
def test_any_strides(kind: str, view: Callable[[Tensor], Tensor], device: torch.device) -> None:
    x = view(numbers(4, 6, 50, device=device))
    compare(ours(kind), exact(kind), [x, *parameters(kind, x.shape[-1], torch.float64, device)])


@OURS
def test_an_expanded_gradient(kind: str, device: torch.device) -> None:
    """That of a sum has strides of 0."""
    inputs = [numbers(4, 10, device=device), *parameters(kind, 10, torch.float64, device)]
    found, expected = (
        run(lambda *args, f=f: f(*args).square().sum(), inputs, [torch.ones((), device=device).double()])
        for f in (ours(kind), exact(kind))
    )
    for one, other in zip(found[1], expected[1], strict=True):
        assert_near(one, other, 1e-12)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_great_numbers(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Squares beyond fp16, and sums beyond what bf16 can add up."""
    x = (1e4 * numbers(5, 300, device=device)).to(dtype)
    compare(ours(kind), exact(kind), [x, *parameters(kind, 300, dtype, device)])


@OURS
@pytest.mark.parametrize("n", [300, 8192 + 8])
def test_zeros_and_equal_elements(kind: str, n: int, device: torch.device) -> None:
    x = torch.tensor([[0.0], [3.0], [-1e4]], device=device).expand(3, n).contiguous()
    weight, bias = numbers(n, device=device).float(), numbers(n, device=device, seed=1).float()
    if kind.endswith("rms"):
        y = rmsnorm(x, weight, EPS)
        assert torch.equal(y[0], torch.zeros_like(weight))
        assert_near(y, norm(x.double(), weight.double(), None, EPS, 0.0))
    else:
        y = layernorm(x, weight, bias, EPS)
        assert torch.equal(y[0], bias)
        # The mean is as exact as fp32 is, and the reciprocal of the root is 1 / sqrt(EPS).
        assert ((y - bias).abs() <= 16 * 2**-24 * x.abs() / EPS**0.5 * weight.abs() + 1e-6).all()


def test_a_mean_far_from_zero(device: torch.device) -> None:
    """The variance is that of the differences; a difference of squares would have none of its digits."""
    x = 1e3 + numbers(3, 500, dtype=torch.float32, device=device)
    compare(ours("layer"), exact("layer"), [x, *parameters("layer", 500, torch.float32, device)], limit=1e-4)


@KINDS
def test_bf16_with_fp32_weights(kind: str, device: torch.device) -> None:
    x = numbers(4, 128, dtype=torch.bfloat16, device=device)
    limit = limit_of(kind, torch.bfloat16)
    compare(ours(kind), exact(kind), [x, *parameters(kind, 128, torch.float32, device)], limit)


@KINDS
def test_a_small_zero_centered_weight_is_not_rounded_away_in_bf16(kind: str, device: torch.device) -> None:
    """1 + 3/1024 rounds to 1 in bf16."""
    x = numbers(100, 64, dtype=torch.bfloat16, device=device)
    zero = torch.zeros(64, dtype=torch.bfloat16, device=device)
    rest = [] if kind.endswith("rms") else [zero]
    scaled, plain = (
        ours(kind, zero_centered=True)(x, weight, *rest).double().abs().mean().item()
        for weight in (zero + 3 / 1024, zero)
    )
    assert scaled / plain == pytest.approx(1 + 3 / 1024, rel=3e-4)


@OURS
@pytest.mark.parametrize("shape", [(11, 100), pytest.param((4099, 2048), marks=pytest.mark.gpu)], ids=str)
def test_the_same_bits_in_two_runs(kind: str, shape: tuple[int, int], device: torch.device) -> None:
    inputs = [numbers(*shape, device=device).float(), *parameters(kind, shape[1], torch.float32, device)]
    grad = numbers(*shape, device=device, seed=5).float()
    first, second = (run(ours(kind), inputs, [grad]) for _ in range(2))
    for one, other in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
        assert torch.equal(one, other)


@KINDS
def test_keeps_its_input_and_a_number_or_two_a_row(kind: str, device: torch.device) -> None:
    x = numbers(4, 3, 64, dtype=torch.bfloat16, device=device).requires_grad_()
    rest = [value.requires_grad_() for value in parameters(kind, 64, torch.bfloat16, device)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours(kind)(x, *rest)
    known = {value.data_ptr() for value in (x, *rest)}
    others = sum(t.numel() for t in kept if t.data_ptr() not in known)
    assert others == (12 if kind.endswith("rms") else 24)


@pytest.mark.gpu
@OURS
def test_more_elements_than_32_bits_count(kind: str, device: torch.device) -> None:
    n, rows = 4096, 2**31 // 4096 + 5
    inputs = [torch.randn(rows, n, dtype=torch.bfloat16, device=device), *parameters(kind, n, torch.bfloat16, device)]
    grad = torch.zeros_like(inputs[0])
    grad[-3:] = numbers(3, n, dtype=torch.bfloat16, device=device)
    (y,), (dx, *others) = run(ours(kind), inputs, [grad])
    few = [inputs[0][-3:].double(), *(value.double() for value in inputs[1:])]
    (exact_y,), (exact_dx, *exact_others) = run(exact(kind), few, [grad[-3:].double()])
    assert not y.isnan().any()
    assert distance(y[-3:], exact_y) < 4e-3
    assert distance(dx[-3:], exact_dx) < 4e-3
    assert not dx[:-3].any()
    for one, other in zip(others, exact_others, strict=True):
        assert_near(one, other)
