"""Activations by Triton and by torch against their definitions in float64, with gradients from those."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megalite.kernels import layer_ops
from megalite.kernels.triton.activations import bias_gelu, geglu, swiglu
from tests.kernels.triton.exact import DTYPES, compare, distance, numbers, run

pytestmark = pytest.mark.usefixtures("poisoned")
Function = Callable[..., Tensor]


def gelu(z: Tensor, tanh: bool) -> Tensor:
    if tanh:
        return z * 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3)))
    return z * 0.5 * torch.erfc(-z / math.sqrt(2.0))


def exact_bias_gelu(x: Tensor, bias: Tensor | None, *, tanh: bool = False) -> Tensor:
    return gelu(x if bias is None else x + bias, tanh)


def gated(x: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
    f = x.shape[-1] // 2
    return activate(x[..., :f]) * x[..., f:]


def silu(z: Tensor) -> Tensor:
    return z / (1.0 + torch.exp(-z))


EXACT = [partial(gated, activate=f) for f in (silu, partial(gelu, tanh=False), partial(gelu, tanh=True))]
GATED: dict[str, tuple[Function, Function]] = {
    "swiglu": (swiglu, EXACT[0]),
    "geglu": (geglu, EXACT[1]),
    "geglu_tanh": (partial(geglu, tanh=True), EXACT[2]),
    "torch swiglu": (layer_ops.swiglu, EXACT[0]),
    "torch geglu": (layer_ops.geglu, EXACT[1]),
    "torch geglu_tanh": (partial(layer_ops.geglu, tanh=True), EXACT[2]),
}
GELU = pytest.mark.parametrize("function", [bias_gelu, layer_ops.bias_gelu], ids=["triton", "torch"])
LARGE = [pytest.param((1027, f), marks=pytest.mark.gpu) for f in (128, 5504, 8192, 28672)]
SHAPES = pytest.mark.parametrize("shape", [(3, 2, 90), (1, 2100), *LARGE], ids=str)
NAMES = pytest.mark.parametrize("name", GATED)


@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@GELU
@SHAPES
def test_bias_gelu(
    function: Function, tanh: bool, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if function is layer_ops.bias_gelu and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("torch rounds the sum with the bias")
    inputs = [numbers(*shape, dtype=dtype, device=device), numbers(shape[-1], dtype=dtype, device=device, seed=1)]
    compare(partial(function, tanh=tanh), partial(exact_bias_gelu, tanh=tanh), inputs)


@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
@GELU
def test_gelu_without_bias(function: Function, tanh: bool, device: torch.device) -> None:
    x = numbers(5, 7, device=device)
    compare(partial(function, tanh=tanh), partial(exact_bias_gelu, tanh=tanh), [x, None])


@NAMES
@pytest.mark.parametrize("dtype", DTYPES)
@SHAPES
def test_gated(name: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    x = numbers(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device)
    compare(*GATED[name], [x])


def test_rows_that_programs_share(device: torch.device) -> None:
    """More tiles than programs: each adds up the bias's gradient over several."""
    rows = 20 * 32  # 32 rows are a tile, and the interpreter runs 14 programs
    inputs = [numbers(rows + 3, 32, dtype=torch.float32, device=device), numbers(32, device=device).float()]
    compare(bias_gelu, exact_bias_gelu, inputs, limit=3e-6)


@pytest.mark.parametrize(
    "view",
    [lambda x: x[:, ::2, :8], lambda x: x.transpose(0, 1), lambda x: x.transpose(1, 2), lambda x: x[0, 0]],
    ids=["slice", "rows swapped", "no dense dimension", "one row"],
)
def test_any_strides(view: Callable[[Tensor], Tensor], device: torch.device) -> None:
    x = view(numbers(4, 6, 10, device=device))
    compare(bias_gelu, exact_bias_gelu, [x, numbers(x.shape[-1], device=device, seed=1)])
    compare(*GATED["swiglu"], [x])


@NAMES
def test_an_expanded_gradient(name: str, device: torch.device) -> None:
    """That of a sum has strides of 0."""
    x = numbers(3, 12, device=device)
    grads = [run(lambda v, f=f: f(v).sum(), [x], [torch.ones((), device=device).double()])[1][0] for f in GATED[name]]
    assert distance(*grads) < 1e-13


def test_no_rows(device: torch.device) -> None:
    x, bias = numbers(0, 3, 12, device=device), numbers(12, device=device)
    (y,), (dx, dbias) = run(bias_gelu, [x, bias], [x])
    assert y.shape == dx.shape == x.shape
    assert torch.equal(dbias, torch.zeros_like(bias))
    (y,), (dx,) = run(swiglu, [x], [x[..., :6]])
    assert y.shape == (0, 3, 6)
    assert dx.shape == x.shape


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # numpy's, where infinity is meant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bias_gelu", "bias_gelu_tanh", "swiglu", "geglu", "geglu_tanh"])
def test_great_numbers(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Far from 0 the functions are 0 or z and their slopes 0 or 1, and nothing overflows on the way."""
    z = torch.tensor([-1e4, -300.0, -90.0, 0.0, 90.0, 300.0, 1e4], dtype=dtype, device=device)
    ones, relu = torch.ones_like(z), z.clamp(min=0.0)
    slope = torch.where(z == 0, 0.5, (z > 0).to(dtype))
    if name in GATED:
        (y,), (grad,) = run(GATED[name][0], [torch.cat((z, ones))], [ones])
        assert torch.equal(grad[7:], relu)
        grad = grad[:7]
    else:
        (y,), (grad,) = run(partial(bias_gelu, bias=None, tanh=name.endswith("tanh")), [z], [ones])
    assert torch.equal(y, relu)
    torch.testing.assert_close(grad, slope, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
@pytest.mark.parametrize("shape", [(60, 33), pytest.param((4099, 8192), marks=pytest.mark.gpu)], ids=str)
def test_the_same_bits_in_two_runs(tanh: bool, shape: tuple[int, int], device: torch.device) -> None:
    inputs = [numbers(*shape, device=device).float(), numbers(shape[1], device=device).float()]
    grad = numbers(*shape, device=device, seed=5).float()
    first, second = (run(partial(bias_gelu, tanh=tanh), inputs, [grad]) for _ in range(2))
    for one, other in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
        assert torch.equal(one, other)


def test_keep_their_input_alone(device: torch.device) -> None:
    x = numbers(4, 3, 64, dtype=torch.bfloat16, device=device).requires_grad_()
    bias = numbers(64, dtype=torch.bfloat16, device=device).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        bias_gelu(x, bias)
        for function, _ in GATED.values():
            function(x)
    assert {value.data_ptr() for value in kept} == {x.data_ptr(), bias.data_ptr()}


@pytest.mark.gpu
@NAMES
def test_more_elements_than_32_bits_count(name: str, device: torch.device) -> None:
    ours, exact = GATED[name]
    x = torch.randn(2**31 // 8192 + 5, 8192, dtype=torch.bfloat16, device=device)
    grad = torch.randn(len(x), 4096, dtype=torch.bfloat16, device=device)
    (y,), (dx,) = run(ours, [x], [grad])
    assert not y.isnan().any()
    assert not dx.isnan().any()
    (exact_y,), (exact_dx,) = run(exact, [x[-3:].double()], [grad[-3:].double()])
    assert distance(y[-3:], exact_y) < 4e-3
    assert distance(dx[-3:], exact_dx) < 4e-3


@pytest.mark.gpu
def test_bias_gelu_of_more_elements_than_32_bits_count(device: torch.device) -> None:
    x = torch.randn(2**31 // 8192 + 5, 8192, dtype=torch.bfloat16, device=device)
    bias = numbers(8192, dtype=torch.bfloat16, device=device)
    grad = torch.zeros_like(x)
    grad[-3:] = numbers(3, 8192, dtype=torch.bfloat16, device=device)
    (y,), (dx, dbias) = run(bias_gelu, [x, bias], [grad])
    assert not y.isnan().any()
    assert not dx[:-3].any()
    (exact_y,), exact_grads = run(exact_bias_gelu, [x[-3:].double(), bias.double()], [grad[-3:].double()])
    for one, other in zip([y[-3:], dx[-3:], dbias], [exact_y, *exact_grads], strict=True):
        assert distance(one, other) < 4e-3
