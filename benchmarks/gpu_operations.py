"""The operations of megalite's registry as the GPU benchmark sees them: inputs, passes, formulas in fp64, bytes.

All kernels of an operation have one signature, so each operation is described once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_clock import Work
from gpu_formulas import add_norm, bias_gelu, geglu, layer_norm, rms_norm, rope, swiglu

Tensors = dict[str, Any]
"""By name: tensors, and None where an input is left out."""
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Of the inputs."""

    rows: int
    size: int
    """What the registry is asked for: of the last dimension, of the flat tensor, columns of the logits."""

    def __str__(self) -> str:
        return f"{self.rows} x {self.size}" if self.rows > 1 else f"{self.size}"


@dataclass(frozen=True)
class Pass:
    """A piece that is timed alone."""

    name: str
    work: Work
    prepare: Work | None = None


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation."""

    make: Callable[[Shape, torch.dtype, torch.device], Tensors]
    """Random inputs, and the gradients of the outputs; never zeros, on which devices are faster."""
    passes: Callable[[Any, Tensors], list[Pass]]
    """Forward and backward of a kernel, apart where it has both."""
    outputs: Callable[[Any, Tensors], Tensors]
    """Everything that it computes, gradients too, by name; the inputs stay as they are."""
    formula: Callable[[Tensors], Tensors]
    """The same from inputs in fp64."""
    rows: frozenset[str]
    """Inputs and outputs whose dimension 0 runs over independent rows; other outputs are sums over the rows."""
    bytes: Callable[[Shape, int], tuple[int, ...]]
    """What each pass must move at least, for elements of that many bytes: each input read once, each output written."""
    flops: Callable[[Shape], int] | None = None
    """Of matrix products."""
    plain: Any = None
    """A kernel made of plain torch, as one writes it: it is compiled as a rival. None: there is nothing to fuse."""
    dtype: torch.dtype = torch.bfloat16


def draw(*shape: int, dtype: torch.dtype, device: torch.device, shift: float = 0.0) -> torch.Tensor:
    """Normal numbers about `shift`."""
    return torch.randn(shape, dtype=dtype, device=device) + shift


def differentiable(
    call: Callable[[Any, Tensors], Any],
    formula: Callable[[Tensors], Any],
    wrt: tuple[str, ...],
    rows: frozenset[str],
    **rest: Any,
) -> Operation:
    """An operation of which autograd makes the backward.

    Args:
        call: the kernel on the inputs; an output or a tuple of outputs, whose gradients are inputs `dy0`, `dy1`.
        formula: the same in plain torch.
        wrt: inputs that get gradients.
    """

    def run(
        function: Callable[[Tensors], Any], tensors: Tensors
    ) -> tuple[tuple[torch.Tensor, ...], list[Any]]:
        leaves = {
            name: value.detach().requires_grad_()
            for name, value in tensors.items()
            if name in wrt and value is not None
        }
        found = function({**tensors, **leaves})
        return (found if isinstance(found, tuple) else (found,)), [
            leaves[name] for name in wrt if name in leaves
        ]

    def named(function: Callable[[Tensors], Any], tensors: Tensors) -> Tensors:
        found, leaves = run(function, tensors)
        present = [name for name in wrt if tensors[name] is not None]
        grads = torch.autograd.grad(found, leaves, [tensors[f"dy{i}"] for i in range(len(found))])
        named = {f"y{index}": value.detach() for index, value in enumerate(found)}
        return named | {f"d{name}": grad for name, grad in zip(present, grads, strict=True)}

    def passes(kernel: Any, tensors: Tensors) -> list[Pass]:
        found, leaves = run(lambda t: call(kernel, t), tensors)
        grads = [tensors[f"dy{i}"] for i in range(len(found))]
        inputs = {**tensors, **dict(zip([n for n in wrt if tensors[n] is not None], leaves, strict=True))}
        return [
            Pass("forward", lambda: call(kernel, inputs)),
            Pass("backward", lambda: torch.autograd.grad(found, leaves, grads, retain_graph=True)),
        ]

    return Operation(
        passes=passes,
        outputs=lambda kernel, tensors: named(lambda t: call(kernel, t), tensors),
        formula=lambda tensors: named(formula, tensors),
        rows=rows | {f"d{name}" for name in wrt if name in rows} | {"y0", "y1", "dy0", "dy1"},
        **rest,
    )


FEATURES, BATCH = 2048, 8
"""Of rope's queries: all heads together, and the microbatch."""


def _norm_inputs(*names: str, keep: float = 0.0) -> Callable[[Shape, torch.dtype, torch.device], Tensors]:
    """[rows, size] for x, branch, residual and gradients; [size] for weight and biases."""
    matrices = {"x", "branch", "residual", "dy0", "dy1"}

    def make(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
        found: Tensors = {}
        for name in names:
            of = (shape.rows, shape.size) if name in matrices else (shape.size,)
            found[name] = draw(*of, dtype=dtype, device=device, shift=1.0 if name == "weight" else 0.0)
        if keep:
            found["keep"] = torch.rand(shape.rows, shape.size, device=device) < keep
        return found

    return make


def _of_x(plain: Callable[[torch.Tensor], torch.Tensor], t: Tensors) -> torch.Tensor:
    return plain(t["x"])


def _gated_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    return {
        "x": draw(shape.rows, 2 * shape.size, dtype=dtype, device=device),
        "dy0": draw(shape.rows, shape.size, dtype=dtype, device=device),
    }


def _rope_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """rows = positions x BATCH; size is the head's."""
    s, heads = max(shape.rows // BATCH, 1), FEATURES // shape.size
    angles = torch.rand(s, 1, 1, shape.size // 2, device=device) * 6.28
    x, dy = (draw(s, BATCH, heads, shape.size, dtype=dtype, device=device) for _ in range(2))
    return {"x": x, "cos": angles.cos(), "sin": angles.sin(), "dy0": dy}


def _table() -> Mapping[str, Operation]:
    def sums(dropout: float) -> Operation:
        def call(kernel: Any, t: Tensors) -> Any:
            return kernel(
                t["branch"],
                t["bias"],
                t.get("keep"),
                dropout,
                t["residual"],
                t["weight"],
                t["norm_bias"],
                EPS,
            )

        mask = int(dropout > 0)
        return differentiable(
            call,
            lambda t: call(add_norm, t),
            ("branch", "bias", "residual", "weight", "norm_bias"),
            frozenset({"branch", "residual", "keep"}),
            make=_norm_inputs(
                *("branch", "bias", "residual", "weight", "norm_bias", "dy0", "dy1"),
                keep=1.0 - dropout if dropout else 0.0,
            ),
            # With a mask the branch's gradient is another than the residual's.
            bytes=lambda s, e: (s.rows * s.size * (4 * e + mask), s.rows * s.size * ((4 + mask) * e + mask)),
            plain=add_norm,
        )

    return {
        "rmsnorm": differentiable(
            lambda kernel, t: kernel(t["x"], t["weight"], EPS),
            lambda t: rms_norm(t["x"], t["weight"], EPS),
            ("x", "weight"),
            frozenset({"x"}),
            make=_norm_inputs("x", "weight", "dy0"),
            bytes=lambda s, e: (2 * s.rows * s.size * e, 3 * s.rows * s.size * e),
            plain=rms_norm,
        ),
        "layernorm": differentiable(
            lambda kernel, t: kernel(t["x"], t["weight"], t["bias"], EPS),
            lambda t: layer_norm(t["x"], t["weight"], t["bias"], EPS),
            ("x", "weight", "bias"),
            frozenset({"x"}),
            make=_norm_inputs("x", "weight", "bias", "dy0"),
            bytes=lambda s, e: (2 * s.rows * s.size * e, 3 * s.rows * s.size * e),
            plain=layer_norm,
        ),
        "add_norm": sums(0.0),
        "add_norm, dropout": sums(0.1),
        "bias_gelu": differentiable(
            lambda kernel, t: kernel(t["x"], t["bias"]),
            lambda t: bias_gelu(t["x"], t["bias"]),
            ("x", "bias"),
            frozenset({"x"}),
            make=_norm_inputs("x", "bias", "dy0"),
            bytes=lambda s, e: (2 * s.rows * s.size * e, 3 * s.rows * s.size * e),
            plain=bias_gelu,
        ),
        **{
            name: differentiable(
                lambda kernel, t: kernel(t["x"]),
                partial(_of_x, plain),
                ("x",),
                frozenset({"x"}),
                make=_gated_inputs,
                bytes=lambda s, e: (3 * s.rows * s.size * e, 5 * s.rows * s.size * e),
                plain=plain,
            )
            for name, plain in (("swiglu", swiglu), ("geglu", geglu))
        },
        "rope": differentiable(
            lambda kernel, t: kernel(t["x"], t["cos"], t["sin"]),
            lambda t: rope(t["x"], t["cos"], t["sin"]),
            ("x",),
            frozenset({"x", "cos", "sin"}),
            make=_rope_inputs,
            bytes=lambda s, e: (2 * s.rows * FEATURES * e,) * 2,
            plain=rope,
        ),
    }


DIFFERENTIABLE = _table()
