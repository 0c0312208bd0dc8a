"""Compiled formulas against the kernels that they replace: formulas, graphs, and one of them through the compiler."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels import compiled as module
from megalite.kernels.compiled import compiled, why_not_compile
from megalite.kernels.fp8 import E4M3, cast_rows
from megalite.kernels.layer_ops import (
    add_dropped,
    add_norm,
    apply_rope,
    bias_gelu,
    gated,
    geglu,
    layer_norm,
    rms_norm,
    swiglu,
)

ROWS, WIDTH = (6, 2), 32

# The tracer looks at .grad of what it is given; outside of tests the warning is not an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def calls(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    x, residual = (drawn(seed, *ROWS, WIDTH).to(dtype).requires_grad_() for seed in (1, 2))
    weight, bias, late = (torch.nn.Parameter(drawn(seed, WIDTH).to(dtype)) for seed in (3, 4, 5))
    keep = drawn(6, *ROWS, WIDTH) > -1.0
    heads = drawn(7, *ROWS, 4, 8).to(dtype).requires_grad_()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = (drawn(seed, ROWS[0], 1, 1, 4).to(wide) for seed in (8, 9))
    eps = 1e-5
    return {
        "rmsnorm": (rms_norm, (x, weight, eps)),
        "rmsnorm, zero-centered": (partial(rms_norm, zero_centered=True), (x, weight, eps)),
        "layernorm": (layer_norm, (x, weight, bias, eps)),
        "add_norm, dropout and bias": (add_norm, (x, late, keep, 0.2, residual, weight, bias, eps)),
        "add_norm, RMSNorm": (add_norm, (x, None, None, 0.0, residual, weight, None, eps)),
        "residual sum": (add_dropped, (residual, x, late, keep, 0.2)),
        "gelu": (partial(bias_gelu, tanh=True), (x, late)),
        "swiglu": (swiglu, (x,)),
        "geglu": (partial(geglu, tanh=True), (x,)),
        "clamped": (partial(gated, kind="quick", limit=0.8, offset=1.0), (x,)),
        "rope": (apply_rope, (heads, cos, sin)),
    }


def numbers(kernel: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    """Return outputs and the gradient of each differentiable argument."""
    outputs = kernel(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    grads = [drawn(20 + index, *out.shape).to(out.dtype) for index, out in enumerate(outputs)]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaves, grads)]


@pytest.fixture
def traced_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whole graphs, forward and backward, run by torch's operators, without code generation."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    module._compile.cache_clear()
    torch.compiler.reset()  # what other tests compiled counts towards the limit of variants
    yield
    module._compile.cache_clear()
    torch.compiler.reset()


@pytest.mark.usefixtures("traced_alone")
def test_graphs_give_the_kernels_numbers() -> None:
    for dtype, bound in ((torch.float64, 1e-12), (torch.bfloat16, 1e-2)):
        for name, (kernel, args) in calls(dtype).items():
            if dtype == torch.bfloat16 and name not in ("add_norm, dropout and bias", "rope"):
                continue
            ours = numbers(compiled(kernel), args)
            for one, other in zip(ours, numbers(kernel, args), strict=True):
                assert one.dtype == other.dtype, name
                error = (one.double() - other.double()).norm() / other.double().norm()
                assert error <= bound, (name, dtype, float(error))


def test_the_compiler_gives_the_kernels_numbers() -> None:
    """Generated code in fp32; the only test that runs the compiler."""
    kernel, args = calls(torch.float32)["rmsnorm"]
    assert why_not_compile(torch.device("cpu")) is None
    for one, other in zip(numbers(compiled(kernel), args), numbers(kernel, args), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("traced_alone")
def test_scales_of_fp8_are_the_same_to_the_bit() -> None:
    x = drawn(1, 16, 16).bfloat16()
    for ours, expected in zip(compiled(cast_rows)(x, E4M3), cast_rows(x, E4M3), strict=True):
        assert torch.equal(ours.float(), expected.float())


def test_kernels_of_others_are_left_alone() -> None:
    def other(x: Tensor) -> Tensor:
        return x

    assert compiled(other) is other
    assert compiled(rms_norm) is compiled(rms_norm) is not rms_norm
    inside = compiled(partial(bias_gelu, tanh=True))
    assert inside.func is compiled(bias_gelu) and inside.keywords == {"tanh": True}
    assert compiled([]) == []


def test_no_compiler_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Callable[..., Any]:
        def call(*_: Any) -> None:
            raise RuntimeError("No working C++ compiler found\nin a long text")

        return call

    monkeypatch.setattr(torch, "compile", missing)
    assert why_not_compile(torch.device("cpu")) == "RuntimeError: No working C++ compiler found"
