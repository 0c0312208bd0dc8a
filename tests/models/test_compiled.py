"""Compiled kernels against the eager kernels that they replace: traced graphs, and generated code of one kernel."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

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
from megalite.kernels.quantization import E4M3, cast_rows
from megalite.models import compute
from megalite.models.compute import compiled, why_not_compile

ROWS, WIDTH = (6, 2), 32

# The tracer reads .grad of its inputs, which gives a warning; only tests treat warnings as errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def kernel_calls(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    x, residual = (draw(seed, *ROWS, WIDTH).to(dtype).requires_grad_() for seed in (1, 2))
    weight, bias, branch_bias = (torch.nn.Parameter(draw(seed, WIDTH).to(dtype)) for seed in (3, 4, 5))
    keep = draw(6, *ROWS, WIDTH) > -1.0
    heads = draw(7, *ROWS, 4, 8).to(dtype).requires_grad_()
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = (draw(seed, ROWS[0], 1, 1, 4).to(table_dtype) for seed in (8, 9))
    eps = 1e-5
    return {
        "rmsnorm": (rms_norm, (x, weight, eps)),
        "rmsnorm, zero-centered": (partial(rms_norm, zero_centered=True), (x, weight, eps)),
        "layernorm": (layer_norm, (x, weight, bias, eps)),
        "add_norm, dropout and bias": (add_norm, (x, branch_bias, keep, 0.2, residual, weight, bias, eps)),
        "add_norm, RMSNorm": (partial(add_norm, factor=0.3), (x, None, None, 0.0, residual, weight, None, eps)),
        "residual sum": (add_dropped, (residual, x, branch_bias, keep, 0.2, 0.3)),
        "gelu": (partial(bias_gelu, tanh=True), (x, branch_bias)),
        "swiglu": (swiglu, (x,)),
        "geglu": (partial(geglu, tanh=True), (x,)),
        "clamped": (partial(gated, kind="quick", limit=0.8, offset=1.0), (x,)),
        "rope": (apply_rope, (heads, cos, sin)),
    }


def results(kernel: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    """Return outputs and the gradient of each differentiable argument."""
    outputs = kernel(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    grads = [draw(20 + index, *out.shape).to(out.dtype) for index, out in enumerate(outputs)]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaves, grads)]


@pytest.fixture
def without_code_generation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace whole graphs, forward and backward, and run them with torch's operators, without code generation."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compute._compile.cache_clear()
    torch.compiler.reset()  # graphs of other tests count towards the recompile limit
    yield
    compute._compile.cache_clear()
    torch.compiler.reset()


@pytest.mark.usefixtures("without_code_generation")
def test_traced_graphs_equal_the_eager_kernels() -> None:
    for dtype, bound in ((torch.float64, 1e-12), (torch.bfloat16, 1e-2)):
        for name, (kernel, args) in kernel_calls(dtype).items():
            if dtype == torch.bfloat16 and name not in ("add_norm, dropout and bias", "rope"):
                continue
            ours = results(compiled(kernel), args)
            for one, other in zip(ours, results(kernel, args), strict=True):
                assert one.dtype == other.dtype, name
                error = (one.double() - other.double()).norm() / other.double().norm()
                assert error <= bound, (name, dtype, float(error))


def test_generated_code_equals_the_eager_kernel() -> None:
    """The only test that generates code, in fp32."""
    kernel, args = kernel_calls(torch.float32)["rmsnorm"]
    assert why_not_compile(torch.device("cpu")) is None
    for one, other in zip(results(compiled(kernel), args), results(kernel, args), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("without_code_generation")
def test_fp8_scales_are_bitwise_equal() -> None:
    x = draw(1, 16, 16).bfloat16()
    for ours, expected in zip(compiled(cast_rows)(x, E4M3), cast_rows(x, E4M3), strict=True):
        assert torch.equal(ours.float(), expected.float())


def test_only_known_kernels_are_compiled() -> None:
    def other(x: Tensor) -> Tensor:
        return x

    assert compiled(other) is other
    assert compiled(rms_norm) is compiled(rms_norm) is not rms_norm
    inside = compiled(partial(bias_gelu, tanh=True))
    assert inside.func is compiled(bias_gelu) and inside.keywords == {"tanh": True}
    assert compiled([]) == []


def test_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Callable[..., Any]:
        def call(*_: Any) -> None:
            raise RuntimeError("No working C++ compiler found\nin a long text")

        return call

    monkeypatch.setattr(torch, "compile", missing)
    assert why_not_compile(torch.device("cpu")) == "RuntimeError: No working C++ compiler found"
