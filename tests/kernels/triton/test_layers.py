"""Kernels between matrix products, by Triton and by torch, against their definitions and gradients in float64."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels import layer_ops
from megalite.kernels.triton import elementwise, norms
from megalite.kernels.triton.launch import sum_of_programs
from tests.kernels.triton.exact import DTYPES, LIMITS, Outputs, assert_near, compare, draw, norm, relative_error, run

pytestmark = pytest.mark.usefixtures("poisoned")
EPS = 1e-3  # large, to reveal an eps that is missing or outside the root
P = 0.25
HALF_TYPES = (torch.bfloat16, torch.float16)
Draw = Callable[[int], Tensor]


def exact_gelu(z: Tensor, tanh: bool) -> Tensor:
    if tanh:
        return z * 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3)))
    return z * 0.5 * torch.erfc(-z / math.sqrt(2.0))


def exact_gated(x: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
    f = x.shape[-1] // 2
    return activate(x[..., :f]) * x[..., f:]


def exact_sum(branch: Tensor, bias: Tensor | None, keep: Tensor | None, residual: Tensor, *rest: Any) -> Any:
    part = branch if bias is None else branch + bias
    if keep is not None:
        part = torch.where(keep, part / (1 - P), 0.0)
    weight, norm_bias, offset, factor = rest
    total = residual + factor * part
    return norm(total, weight, norm_bias, EPS, offset), total


def exact_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x_i, x_{i+d/2}) as complex numbers."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos.double(), sin.double())
    return torch.cat((turned.real, turned.imag), dim=-1)


@dataclass(frozen=True)
class Case:
    """A kernel, its definition, and its inputs: tensors of the activations' shape and vectors, by seed."""

    ours: Callable[..., Outputs]
    exact: Callable[..., Outputs]
    inputs: Callable[[Draw, Draw], list[Tensor | None]]
    saved: int = 0  # numbers per row saved for the backward, besides inputs and outputs
    shapes: tuple[tuple[int, ...], ...] = ((3, 2, 96), (5, 100), (1, 2100))


def norm_case(kernel: Any, *, bias: bool, zero_centered: bool = False) -> Case:
    offset = float(zero_centered)
    ours = partial(kernel, eps=EPS, zero_centered=zero_centered)
    if bias:
        exact = partial(norm, eps=EPS, offset=offset)
        return Case(ours, exact, lambda full, vector: [full(1), vector(2), vector(3)], saved=2)
    exact = partial(norm, bias=None, eps=EPS, offset=offset)
    return Case(ours, exact, lambda full, vector: [full(1), vector(2)], saved=1)


def sum_case(
    kernel: Any, *, bias: bool, keep: bool, norm_bias: bool, zero_centered: bool = False, scaled: bool = False
) -> Case:
    factor = 0.22 if scaled else 1.0

    def ours(branch: Tensor, bias: Tensor | None, keep: Tensor | None, *rest: Any) -> Any:
        return kernel(branch, bias, keep, P, *rest, EPS, zero_centered=zero_centered, factor=factor)

    def exact(*given: Any) -> Any:
        return exact_sum(*given, float(zero_centered), factor)

    def inputs(full: Draw, vector: Draw) -> list[Tensor | None]:
        mask = full(3).double() > -0.67 if keep else None
        return [full(1), vector(2) if bias else None, mask, full(4), vector(5), vector(6) if norm_bias else None]

    return Case(ours, exact, inputs, saved=1 + norm_bias, shapes=((5, 130), (1, 2049)))


def gelu_case(kernel: Any, *, tanh: bool, bias: bool = True) -> Case:
    def exact(x: Tensor, bias: Tensor | None) -> Tensor:
        return exact_gelu(x if bias is None else x + bias, tanh)

    return Case(partial(kernel, tanh=tanh), exact, lambda full, vector: [full(1), vector(2) if bias else None])


def gated_case(ours: Any, activate: Callable[[Tensor], Tensor]) -> Case:
    return Case(ours, partial(exact_gated, activate=activate), lambda full, vector: [full(1)])


def rope_case(own_positions: bool) -> Case:
    """Bind the tables to the function, because they get no gradient."""
    return Case(
        lambda x: elementwise.rope(x, *tables(x, own_positions)),
        lambda x: exact_rope(x, *tables(x, own_positions)),
        lambda full, vector: [full(1)],
        saved=0,
        shapes=((5, 2, 3, 64), (1, 1, 1, 38), (3, 2, 1, 200)),
    )


def tables(x: Tensor, own_positions: bool = False) -> tuple[Tensor, Tensor]:
    batch = x.shape[1] if own_positions else 1
    angles = 3.0 * draw(x.shape[0], batch, 1, x.shape[-1] // 2, device=x.device, seed=7)
    return angles.cos().float(), angles.sin().float()


ERF, TANH = partial(exact_gelu, tanh=False), partial(exact_gelu, tanh=True)
CASES = {
    "rmsnorm": norm_case(norms.rmsnorm, bias=False),
    "layernorm": norm_case(norms.layernorm, bias=True),
    "rmsnorm, zero-centered": norm_case(norms.rmsnorm, bias=False, zero_centered=True),
    "layernorm, zero-centered": norm_case(norms.layernorm, bias=True, zero_centered=True),
    "add_norm, layer": sum_case(norms.add_norm, bias=True, keep=True, norm_bias=True),
    "add_norm, rms": sum_case(norms.add_norm, bias=True, keep=True, norm_bias=False),
    "bias_gelu": gelu_case(elementwise.bias_gelu, tanh=False),
    "bias_gelu_tanh": gelu_case(elementwise.bias_gelu, tanh=True),
    "gelu": gelu_case(elementwise.bias_gelu, tanh=False, bias=False),
    "gelu_tanh": gelu_case(elementwise.bias_gelu, tanh=True, bias=False),
    "swiglu": gated_case(elementwise.swiglu, lambda z: z / (1.0 + torch.exp(-z))),
    "geglu": gated_case(elementwise.geglu, ERF),
    "geglu_tanh": gated_case(partial(elementwise.geglu, tanh=True), TANH),
    "rope": rope_case(own_positions=False),
    "rope, own positions": rope_case(own_positions=True),
}
TORCHS = {
    "torch rmsnorm": norm_case(layer_ops.rms_norm, bias=False),
    "torch layernorm": norm_case(layer_ops.layer_norm, bias=True),
    "torch rmsnorm, zero-centered": norm_case(layer_ops.rms_norm, bias=False, zero_centered=True),
    "torch layernorm, zero-centered": norm_case(layer_ops.layer_norm, bias=True, zero_centered=True),
    "torch bias_gelu_tanh": gelu_case(layer_ops.bias_gelu, tanh=True),
    "torch gelu": gelu_case(layer_ops.bias_gelu, tanh=False, bias=False),
    "torch swiglu": gated_case(layer_ops.swiglu, lambda z: z / (1.0 + torch.exp(-z))),
    "torch geglu": gated_case(layer_ops.geglu, ERF),
}
OURS = pytest.mark.parametrize("name", CASES)
FORMS = (
    "rmsnorm, zero-centered",
    "layernorm",
    "add_norm, layer",
    "add_norm, rms",
    "bias_gelu",
    "gelu",
    "swiglu",
    "rope",
)
EACH_FORM = pytest.mark.parametrize("name", FORMS)
"""The other kernels differ in arithmetic per element, not in the elements that they read and write."""
NORMS = [name for name in CASES if "norm" in name]
LARGE = (*((1027, n) for n in (128, 2048, 5120, 5504, 8192, 12288, 28672, 65536)),)


def draw_inputs(
    case: Case,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.float64,
    view: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[Tensor | None]:
    def full(seed: int) -> Tensor:
        return view(draw(*shape, dtype=dtype, device=device, seed=seed))

    return case.inputs(full, lambda seed: draw(full(0).shape[-1], dtype=dtype, device=device, seed=seed))


def outputs(made: Outputs) -> list[Tensor]:
    return list(made) if isinstance(made, tuple) else [made]


TYPED = [(name, dtype) for name in (*CASES, *TORCHS) for dtype in DTYPES[: 3 if name in (*FORMS, *TORCHS) else 2]]


@pytest.mark.parametrize("name, dtype", TYPED)
def test_values_and_gradients_equal_the_definition(name: str, dtype: torch.dtype, device: torch.device) -> None:
    case = (CASES | TORCHS)[name]
    if "torch bias_gelu" in name and dtype in HALF_TYPES:
        pytest.skip("torch rounds the sum with the bias")
    # torch's LayerNorm sums gradients of half-precision parameters in their type.
    limit = 4 * LIMITS[dtype] if "torch layernorm" in name and dtype in HALF_TYPES else None
    for shape in case.shapes[: 1 if dtype in HALF_TYPES else None]:  # types differ in rounding alone
        compare(case.ours, case.exact, draw_inputs(case, shape, device, dtype), limit)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@OURS
def test_sizes_of_real_models_equal_the_definition(name: str, dtype: torch.dtype, device: torch.device) -> None:
    heads = ((1024, 3, 16, 128), (1023, 2, 12, 64), (1024, 1, 8, 256))
    for shape in heads if "rope" in name else LARGE:
        compare(CASES[name].ours, CASES[name].exact, draw_inputs(CASES[name], shape, device, dtype))


@pytest.mark.parametrize("kernel", [norms.add_norm, layer_ops.add_norm], ids=["triton", "torch"])
def test_every_form_of_add_norm_equals_the_definition(kernel: Any, device: torch.device) -> None:
    for form in itertools.product((True, False), repeat=5):
        parts = dict(zip(("bias", "keep", "norm_bias", "zero_centered", "scaled"), form, strict=True))
        case = sum_case(kernel, **parts)
        compare(case.ours, case.exact, draw_inputs(case, (3, 2, 7), device))


@pytest.mark.parametrize("name", [*NORMS, "torch rmsnorm", "torch layernorm"])
def test_rows_longer_than_a_block_equal_the_definition(name: str, device: torch.device) -> None:
    """The forward has a separate kernel for these sizes; in float64 the backward has one for 2049 elements."""
    case, n = (CASES | TORCHS)[name], 8192 + 8
    slope = torch.linspace(0.0, 50.0, n, dtype=torch.float64, device=device)  # blocks have different means
    inputs = draw_inputs(case, (2, n), device, view=lambda x: x + slope)
    rounded = [v.float() if v is not None and v.is_floating_point() else v for v in inputs]
    wide = [v.double() if v is not None and v.is_floating_point() else v for v in rounded]
    for one, other in zip(outputs(case.ours(*rounded)), outputs(case.exact(*wide)), strict=True):
        assert_near(one, other)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[:, ::2, 1:, :40],
    "rows swapped": lambda x: x.transpose(0, 1),
    "no dense dimension": lambda x: x.transpose(1, 3)[..., :2],
    "expanded": lambda x: x[:1].expand(4, 6, 3, 50),
    "every other column": lambda x: x[:1, :1, :, ::2][..., :24],
}


@pytest.mark.parametrize("view", VIEWS)
@EACH_FORM
def test_any_strides_are_accepted(name: str, view: str, device: torch.device) -> None:
    case = CASES[name]
    compare(case.ours, case.exact, draw_inputs(case, (4, 6, 3, 50), device, view=VIEWS[view]))


@EACH_FORM
def test_expanded_gradients_are_accepted(name: str, device: torch.device) -> None:
    """The gradient of a sum has strides of 0."""
    case = CASES[name]
    inputs, one = draw_inputs(case, (4, 3, 2, 12), device), torch.ones((), device=device).double()
    found, expected = (
        run(lambda *args, f=f: sum(out.sum() for out in outputs(f(*args))), inputs, [one])[1]
        for f in (case.ours, case.exact)
    )
    # Also an absolute tolerance: exact gradients may be nearly 0.
    assert all(
        (ours - right).norm() <= 1e-12 * (1.0 + right.norm()) for ours, right in zip(found, expected, strict=True)
    )


@EACH_FORM
def test_empty_inputs_are_accepted(name: str, device: torch.device) -> None:
    case = CASES[name]
    inputs = draw_inputs(case, (4, 0, 2, 12), device)
    made = [torch.zeros_like(out) for out in outputs(case.exact(*inputs))]
    found, grads = run(case.ours, inputs, made)
    assert [out.shape for out in found] == [out.shape for out in made]
    floats = [value for value in inputs if value is not None and value.is_floating_point()]
    assert [grad.shape for grad in grads] == [value.shape for value in floats]
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("shape", [(11, 4, 3, 34), pytest.param((4099, 1, 4, 2048), marks=pytest.mark.gpu)], ids=str)
@EACH_FORM
def test_two_runs_are_bitwise_equal(name: str, shape: tuple[int, ...], device: torch.device) -> None:
    case = CASES[name]
    inputs = draw_inputs(case, shape, device, torch.float32)
    grads = [draw(*out.shape, device=device, seed=5).float() for out in outputs(case.ours(*inputs))]
    first, second = (run(case.ours, inputs, grads) for _ in range(2))
    for one, other in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", [*CASES, *TORCHS])
def test_backward_saves_few_numbers_per_row(name: str, device: torch.device) -> None:
    """Only inputs, outputs and one or two numbers per row are saved; rope saves only its tables."""
    case = (CASES | TORCHS)[name]
    inputs = draw_inputs(case, (4, 3, 2, 64), device, torch.bfloat16)
    for value in inputs:
        if value is not None and value.is_floating_point():
            value.requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        made = outputs(case.ours(*inputs))
    known = {value.data_ptr() for value in (*inputs, *made) if value is not None}
    if "rope" in name:
        assert not known & {value.data_ptr() for value in saved}
        assert sorted(value.shape[-1] for value in saved) == [32, 32]
    elif name not in ("torch bias_gelu_tanh", "torch layernorm, zero-centered"):
        # torch saves the sum with the bias, and an fp32 copy for a zero-centered LayerNorm.
        assert sum(value.numel() for value in saved if value.data_ptr() not in known) == case.saved * 4 * 3 * 2


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("name", [*NORMS, "rope"])
def test_large_values_do_not_overflow(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Squares beyond fp16, sums beyond bf16's precision, and a row of zeros."""
    case = CASES[name]
    scale = torch.tensor([1e4, 0.0], device=device).view(2, 1, 1, 1)
    inputs = draw_inputs(case, (2, 1, 2, 300), device, view=lambda x: x * scale)
    half = [v.to(dtype) if v is not None and v.is_floating_point() else v for v in inputs]
    made, right = (
        outputs(case.ours(*half)),
        outputs(case.exact(*(v if v is None or v.dtype == torch.bool else v.double() for v in half))),
    )
    for one, other in zip(made, right, strict=True):
        assert_near(one, other)


def test_variance_is_accurate_with_a_large_mean(device: torch.device) -> None:
    """The variance is the mean of squared differences; a difference of squares would lose all digits."""
    case = CASES["layernorm"]
    x, *parameters = draw_inputs(case, (3, 500), device, torch.float32)
    compare(case.ours, case.exact, [1e3 + x, *parameters], limit=1e-4)


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm", "torch rmsnorm", "torch layernorm"])
def test_bf16_inputs_accept_fp32_weights(name: str, device: torch.device) -> None:
    case, limit = (CASES | TORCHS)[name], 4 * LIMITS[torch.bfloat16] if name == "torch layernorm" else None
    x, *parameters = draw_inputs(case, (4, 128), device, torch.bfloat16)
    compare(case.ours, case.exact, [x, *(value.float() for value in parameters if value is not None)], limit)


@pytest.mark.parametrize("name", [name for name in CASES | TORCHS if "zero-centered" in name])
def test_small_zero_centered_weights_are_not_rounded_away(name: str, device: torch.device) -> None:
    """1 + 3/1024 rounds to 1 in bf16."""
    x, *parameters = draw_inputs((CASES | TORCHS)[name], (100, 64), device, torch.bfloat16)
    zeros = [torch.zeros_like(value) for value in parameters if value is not None]
    kernel = (CASES | TORCHS)[name].ours
    scaled, plain = (kernel(x, weight, *zeros[1:]) for weight in (zeros[0] + 3 / 1024, zeros[0]))
    ratio = scaled.double().abs().mean() / plain.double().abs().mean()
    assert ratio.item() == pytest.approx(1 + 3 / 1024, rel=3e-4)


@pytest.mark.parametrize("used", [0, 1])
def test_unused_output_of_add_norm_has_a_zero_gradient(used: int, device: torch.device) -> None:
    case = CASES["add_norm, layer"]
    inputs = draw_inputs(case, (5, 9), device)
    grads = [torch.zeros(5, 9, dtype=torch.float64, device=device) for _ in range(2)]
    grads[used] = draw(5, 9, device=device, seed=8)
    _, found = run(lambda *args: case.ours(*args)[used], inputs, [grads[used]])
    _, expected = run(case.exact, inputs, grads)
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)


def test_dropped_elements_add_nothing(device: torch.device) -> None:
    """A dropped element adds nothing to the residual, even if the branch is not finite, and gets no gradient."""
    case = CASES["add_norm, layer"]
    branch, bias, keep, residual, *rest = draw_inputs(case, (6, 40), device)
    branch = torch.where(keep, branch, float("inf"))
    (normed, total), (dbranch, *_) = run(case.ours, [branch, bias, keep, residual, *rest], [residual, residual])
    assert normed.isfinite().all()
    assert torch.equal(total[~keep], residual[~keep])
    assert torch.equal(dbranch == 0, ~keep)


@pytest.mark.parametrize("n", [256, 8192 + 8])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_add_norm_normalizes_the_stored_sum(n: int, kind: str, device: torch.device) -> None:
    """Otherwise the backward, which reads the stored sum, would not match the forward."""
    case = CASES[f"add_norm, {kind}"]
    inputs = draw_inputs(case, (2, n), device, torch.bfloat16)
    normed, total = case.ours(*inputs)
    parameters = [value for value in inputs[4:] if value is not None]
    assert torch.equal(normed, CASES[f"{kind}norm" if kind == "layer" else "rmsnorm"].ours(total, *parameters))


def test_fp32_residual_has_fp32_outputs(device: torch.device) -> None:
    case = sum_case(norms.add_norm, bias=True, keep=False, norm_bias=True)
    inputs = draw_inputs(case, (4, 128), device, torch.bfloat16)
    inputs[3] = draw(4, 128, dtype=torch.float32, device=device, seed=4)
    found = run(case.ours, inputs, [inputs[3], inputs[3]])
    wide = [value if value is None else value.double() for value in inputs]
    expected = run(case.exact, wide, [wide[3], wide[3]])
    assert {output.dtype for output in found[0]} == {torch.float32}
    for one, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert_near(one, other)


def test_bias_gradient_with_more_tiles_than_programs(device: torch.device) -> None:
    """32 rows are one tile, and the interpreter runs 14 programs."""
    case = CASES["bias_gelu"]
    compare(case.ours, case.exact, draw_inputs(case, (20 * 32 + 3, 32), device, torch.float32), limit=3e-6)


@pytest.mark.parametrize("programs", [1, 128, 300])
def test_partial_sums_are_added(programs: int, device: torch.device) -> None:
    partials = draw(3, programs, 37, dtype=torch.float32, device=device)
    sums = sum_of_programs(partials, torch.float16)
    assert sums.dtype == torch.float16
    assert_near(sums, partials.double().sum(1))


def test_error_function_of_half_types_is_accurate(device: torch.device) -> None:
    """Before rounding, Φ(z) has a relative error of 3e-6 in exact arithmetic, and GELU's slope an absolute one."""
    z = torch.linspace(-12, 12, 4001, dtype=torch.float32, device=device)[None].requires_grad_()
    y = elementwise._BiasGelu.apply(z, None, elementwise.HALF_ERF.value)
    y.sum().backward()
    wide = z.detach().double()
    below = torch.special.erfc(-wide / 2**0.5) / 2
    slope = below + wide * (-0.5 * wide.square()).exp() / (2 * math.pi) ** 0.5
    assert ((y.double() - wide * below).abs() <= 2e-5 * (wide * below).abs()).all()
    assert (z.grad.double() - slope).abs().max() <= 1e-5


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2?:RuntimeWarning")  # numpy's, where infinity is correct
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh"])
def test_activations_of_large_values_do_not_overflow(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Far from 0 the functions are 0 or z and their slopes 0 or 1, without intermediate overflow."""
    z = torch.tensor([-1e4, -300.0, -90.0, 0.0, 90.0, 300.0, 1e4], dtype=dtype, device=device)
    ones, relu = torch.ones_like(z), z.clamp(min=0.0)
    slope = torch.where(z == 0, 0.5, (z > 0).to(dtype))
    gated = "glu" in name
    (y,), (grad,) = run(CASES[name].ours, [torch.cat((z, ones))] if gated else [z, None], [ones])
    assert torch.equal(y, relu)
    # Half of 0.99999994 is 0.5 after rounding, but the interpreter truncates.
    torch.testing.assert_close(grad[:7], slope, rtol=0.0, atol=2e-3 if dtype == torch.bfloat16 else 1e-6)
    assert not gated or torch.equal(grad[7:], relu)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's about infinity
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_of_infinity_is_infinity(name: str, device: torch.device) -> None:
    z = torch.tensor([[math.inf, math.nan, 1.0]], dtype=torch.bfloat16, device=device)
    y = CASES[name].ours(z, None)[0].tolist()
    assert y[0] == math.inf and math.isnan(y[1]) and y[2] == pytest.approx(0.84, rel=0.01)


@pytest.mark.gpu
@OURS
def test_more_than_2_to_the_31_elements(name: str, device: torch.device) -> None:
    """The gradient is 0 except in the last rows, which alone determine the sums over rows."""
    case, rows = CASES[name], 2**31 // 4096 + 5
    shape = (rows, 2, 16, 128) if "rope" in name else (rows, 4096)

    def full(seed: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    inputs = case.inputs(full, lambda seed: draw(4096, dtype=torch.bfloat16, device=device, seed=seed))
    if "rope" in name:  # the last rows alone would have the first rows' angles
        cos, sin = tables(draw(64, 1, 1, 128, device=device))
        cos, sin = (table.repeat(rows // 64 + 1, 1, 1, 1)[:rows] for table in (cos, sin))
        ours, exact = partial(elementwise.rope, cos=cos, sin=sin), partial(exact_rope, cos=cos[-3:], sin=sin[-3:])
    else:
        ours, exact = case.ours, case.exact
    grads = [torch.zeros_like(out) for out in outputs(ours(*inputs))]
    for grad in grads:
        grad[-3:] = torch.randn_like(grad[-3:])
    made, found = run(ours, inputs, grads)
    few = [v[-3:] if v is not None and v.dim() > 1 else v for v in inputs]
    wide = [v.double() if v is not None and v.is_floating_point() else v for v in few]
    right, expected = run(exact, wide, [grad[-3:].double() for grad in grads])
    assert not any(out.isnan().any() for out in made)
    for one, other in zip([*made, *found], [*right, *expected], strict=True):
        assert relative_error(one[-3:] if one.dim() > 1 else one, other) < 4e-3
    assert not found[0][:-3].any()
