"""Fuse the torch kernels between matrix products with torch.compile.

The plain formulas are compiled: the compiler's partitioner chooses what to save for the backward and what to
recompute, which the autograd functions of these kernels do by hand. Sums and norms are in fp32 for half types (fp64 for
fp64), as in those kernels; a fused result is rounded once. Matrix products, attention, collectives and sums into main
gradients stay outside: each is one kernel already, and they call back into the run during the backward, which a graph
cannot do."""

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from megalite.kernels import layer_ops
from megalite.kernels.attention import HALF_TYPES
from megalite.kernels.quantization import cast, cast_rows, largest

Kernel = Callable[..., Any]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF_TYPES else x


def _rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    exact, factor = _wide(x), _wide(weight) + float(zero_centered)
    return (exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps) * factor).to(x.dtype)


def _add_dropped(residual: Tensor, branch: Tensor, bias: Tensor | None, keep: Tensor | None, p: float) -> Tensor:
    if bias is not None:
        branch = branch + bias
    return residual + (branch if keep is None else branch * keep * (1.0 / (1.0 - p)))


def _add_norm(
    branch: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    p: float,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    x = _add_dropped(residual, branch, bias, keep, p)
    if norm_bias is None:
        return _rms_norm(x, weight, eps, zero_centered=zero_centered), x
    return layer_ops.layer_norm(x, weight, norm_bias, eps, zero_centered=zero_centered), x


def _gated(x: Tensor, *, kind: str, limit: float | None, offset: float) -> Tensor:
    gate, up = layer_ops.gate_and_up(x, limit, offset)
    return layer_ops.activate(gate, kind) * up


def _swiglu(x: Tensor) -> Tensor:
    return _gated(x, kind="silu", limit=None, offset=0.0)


def _geglu(x: Tensor, *, tanh: bool = False) -> Tensor:
    return _gated(x, kind="tanh" if tanh else "none", limit=None, offset=0.0)


FORMULAS: dict[Kernel, Kernel] = {
    **{
        kernel: kernel
        for kernel in (layer_ops.layer_norm, layer_ops.bias_gelu, layer_ops.apply_rope, largest, cast, cast_rows)
    },
    layer_ops.rms_norm: _rms_norm,
    layer_ops.add_norm: _add_norm,
    layer_ops.add_dropped: _add_dropped,
    layer_ops.swiglu: _swiglu,
    layer_ops.geglu: _geglu,
    layer_ops.gated: _gated,
}  # torch kernel -> the formula that is compiled in its place


def why_not_compile(device: torch.device) -> str | None:
    """Return why torch.compile cannot be used on the device, or None; it is tried on one addition."""
    try:
        torch.compile(lambda x: x + 1, fullgraph=True, dynamic=False)(torch.zeros(2, device=device))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


def compiled(kernel: Any) -> Any:
    """Return the compiled form of a torch kernel or of a `partial` of one; any other kernel unchanged.

    It is compiled at the first call with each shape, type and set of options."""
    if isinstance(kernel, partial):
        return partial(compiled(kernel.func), *kernel.args, **kernel.keywords)
    formula = FORMULAS.get(kernel) if isinstance(kernel, FunctionType) else None
    return kernel if formula is None else _compile(formula)


@cache
def _compile(formula: Kernel) -> Kernel:
    """Compile once per process; all modules share the result."""
    graph = torch.compile(formula, fullgraph=True, dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        # Plain views: the graph must not depend on a parameter's attributes or Python class.
        plain = (arg.view_as(arg) if isinstance(arg, torch.nn.Parameter) else arg for arg in args)
        return graph(*plain, **kwargs)

    return call
