"""The operations of megalite's registry for the GPU benchmark: inputs, passes, formulas in fp64, bytes.

All kernels of an operation have the same signature, so each operation is described once. This module has the operations
with a backward by autograd, flat.py the others. Plain functions give the exact results in fp64; compiled they are a rival."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.clock import Work
from megalite.config.model import LINEAR_CHUNK
from megalite.kernels.layer_ops import add_norm, apply_rope, bias_gelu, dropout_mask, geglu, layer_norm, rms_norm, swiglu
from megalite.kernels.linear_attention import Scan, delta_scan
from megalite.kernels.quantization import E4M3, Rounded, cast, cast_rows, largest
from megalite.models.compute import FORMULAS

Tensors = dict[str, Any]  # name -> tensor, or None for an omitted input
EPS = 1e-5
FEATURES, BATCH = 2048, 8  # of rope's queries: features of all heads, and sequences
SCANNED, CHUNKS = ("written", "read", "keys", "decays", "state"), 64  # of linear attention


@dataclass(frozen=True)
class Shape:
    """Shape of the inputs. `size`, as in the registry: the last dimension, a flat tensor's elements, columns of logits."""

    rows: int
    size: int


@dataclass(frozen=True)
class Pass:
    """Work that is timed separately."""

    name: str
    work: Work
    prepare: Work | None = None


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation.

    Args:
        make: random inputs and gradients of the outputs; no zeros, because devices process them faster.
        passes: forward and backward of a kernel, or its other parts.
        outputs: all results of a kernel with gradients, by name; inputs do not change.
        rows: inputs and outputs with independent rows in dimension 0; other outputs are sums over the rows.
        bytes: minimum bytes that each pass moves, for a shape and bytes per element: inputs are read and outputs written
            once.
        flops: of matrix products.
        plain: a kernel of plain torch: exact in fp64, and a rival when compiled.
        fused: fusion can help, so that the plain kernel is compiled."""

    make: Callable[[Shape, torch.dtype, torch.device], Tensors]
    passes: Callable[[Any, Tensors], list[Pass]]
    outputs: Callable[[Any, Tensors], Tensors]
    rows: frozenset[str]
    bytes: Callable[[Shape, int], tuple[int, ...]]
    plain: Any
    flops: Callable[[Shape], int] | None = None
    fused: bool = True
    dtype: torch.dtype = torch.bfloat16


def draw(*shape: int, dtype: torch.dtype, device: torch.device, shift: float = 0.0) -> torch.Tensor:
    """Return normal numbers with mean `shift`."""
    return torch.randn(shape, dtype=dtype, device=device) + shift


def widen(x: torch.Tensor) -> torch.Tensor:
    """Convert half types to fp32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def differentiable(
    call: Callable[[Any, Tensors], Any], *, plain: Any, wrt: tuple[str, ...], rows: tuple[str, ...], **rest: Any
) -> Operation:
    """Return an operation with a backward by autograd.

    Args:
        call: runs a kernel on the inputs and returns one or several outputs; their gradients are the inputs `dy0`, `dy1`.
        wrt: inputs that get gradients."""

    def run(kernel: Any, tensors: Tensors) -> tuple[tuple[torch.Tensor, ...], Tensors, list[torch.Tensor]]:
        """Return (outputs, leaves by name, gradients of the outputs)."""
        present = [name for name in wrt if tensors[name] is not None]
        leaves = {name: tensors[name].detach().requires_grad_() for name in present}
        found = call(kernel, {**tensors, **leaves})
        found = found if isinstance(found, tuple) else (found,)
        return found, leaves, [tensors[f"dy{index}"] for index in range(len(found))]

    def outputs(kernel: Any, tensors: Tensors) -> Tensors:
        found, leaves, grads = run(kernel, tensors)
        back = torch.autograd.grad(found, list(leaves.values()), grads)
        named = {f"y{index}": value.detach() for index, value in enumerate(found)}
        return named | {f"d{name}": grad for name, grad in zip(leaves, back, strict=True)}

    def passes(kernel: Any, tensors: Tensors) -> list[Pass]:
        found, leaves, grads = run(kernel, tensors)
        inputs = list(leaves.values())
        return [
            Pass("forward", lambda: call(kernel, {**tensors, **leaves})),
            Pass("backward", lambda: torch.autograd.grad(found, inputs, grads, retain_graph=True)),
        ]

    by_row = {*rows, *(f"d{name}" for name in wrt if name in rows), "y0", "y1", "dy0", "dy1"}
    return Operation(passes=passes, outputs=outputs, rows=frozenset(by_row), plain=plain, **rest)


def _inputs(*names: str, keep: float = 0.0) -> Callable[[Shape, torch.dtype, torch.device], Tensors]:
    """Return inputs: x, branch, residual and gradients [rows, size]; weight and biases [size]."""
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


def _gated_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    x, dy = (draw(shape.rows, n * shape.size, dtype=dtype, device=device) for n in (2, 1))
    return {"x": x, "dy0": dy}


def _rope_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Return inputs for rows = positions x BATCH and heads of `size`."""
    s, heads = max(shape.rows // BATCH, 1), FEATURES // shape.size
    angles = torch.rand(s, 1, 1, shape.size // 2, device=device) * 6.28
    x, dy = (draw(s, BATCH, heads, shape.size, dtype=dtype, device=device) for _ in range(2))
    return {"x": x, "cos": angles.cos(), "sin": angles.sin(), "dy0": dy}


def _scan_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Return inputs for rows = heads, with keys and values of `size`."""
    n, d = shape.rows, shape.size
    sizes = [*[(n, CHUNKS, LINEAR_CHUNK, d)] * 3, (n, CHUNKS), (n, d, d), (n, CHUNKS, LINEAR_CHUNK, d), (n, CHUNKS, d, d)]
    names = zip((*SCANNED, "dy0", "dy1"), sizes, strict=True)
    return {name: draw(*of, dtype=dtype, device=device) / 8 for name, of in names}


def _moves(forward: float, backward: float) -> Callable[[Shape, int], tuple[int, ...]]:
    """Return the bytes of this many passes over [rows, size]."""
    return lambda s, e: (int(forward * s.rows * s.size * e), int(backward * s.rows * s.size * e))


def _add_norm(dropout: float) -> Operation:
    names = ("branch", "bias", "residual", "weight", "norm_bias")

    def call(kernel: Any, t: Tensors) -> Any:
        first = (t["branch"], t["bias"], t.get("keep"), dropout, t["residual"])
        return kernel(*first, t["weight"], t["norm_bias"], EPS)

    mask = int(dropout > 0)
    return differentiable(
        call,
        plain=FORMULAS[add_norm],
        wrt=names,
        rows=("branch", "residual", "keep"),
        make=_inputs(*names, "dy0", "dy1", keep=1.0 - dropout if dropout else 0.0),
        # With a mask the branch's gradient differs from the residual's.
        bytes=lambda s, e: (s.rows * s.size * (4 * e + mask), s.rows * s.size * ((4 + mask) * e + mask)),
    )


def _of_x(plain: Any, *names: str, scale: tuple[float, ...] = ()) -> Operation:
    """Return an operation on x and vectors of one row's size, called as kernel(x, *names, *scale)."""
    return differentiable(
        lambda kernel, t: kernel(t["x"], *(t[name] for name in names), *scale),
        plain=plain,
        wrt=("x", *names),
        rows=("x",),
        make=_inputs("x", *names, "dy0"),
        bytes=_moves(2, 3),
    )


def _mask(kernel: Any, tensors: Tensors) -> torch.Tensor:
    keep = torch.empty_like(tensors["like"])
    kernel(keep.view(1, 1, *keep.shape), tensors["rows"], key=1 << 62, samples=(1,), first_head=0, p=0.1)
    return keep


def _restored(rounded: Rounded) -> torch.Tensor:
    return rounded.data.float() * rounded.undo


def _narrow(x: torch.Tensor) -> torch.Tensor:
    """Rounding to fp8 has no fp64 form, so the exact result is that of the same rounding."""
    return x.float() if x.dtype == torch.float64 else x


def _gated(plain: Any) -> Operation:
    return differentiable(
        lambda kernel, t: kernel(t["x"]), plain=plain, wrt=("x",), rows=("x",), make=_gated_inputs, bytes=_moves(3, 5)
    )


DIFFERENTIABLE: Mapping[str, Operation] = {
    "rmsnorm": _of_x(FORMULAS[rms_norm], "weight", scale=(EPS,)),
    "layernorm": _of_x(FORMULAS[layer_norm], "weight", "bias", scale=(EPS,)),
    "add_norm": _add_norm(0.0),
    "add_norm, dropout": _add_norm(0.1),
    "bias_gelu": _of_x(FORMULAS[bias_gelu], "bias"),
    "swiglu": _gated(FORMULAS[swiglu]),
    "geglu": _gated(FORMULAS[geglu]),
    "delta_scan": differentiable(
        lambda kernel, t: Scan.apply(kernel, *(t[name] for name in SCANNED))[:2],
        plain=delta_scan,
        wrt=SCANNED,
        rows=SCANNED,
        make=_scan_inputs,
        bytes=lambda s, e: tuple(s.rows * CHUNKS * s.size * (n * LINEAR_CHUNK + m * s.size) * e for n, m in ((4, 1), (7, 2))),
        fused=False,
        dtype=torch.float32,
    ),
    "dropout_mask": Operation(
        make=lambda shape, dtype, device: {
            "rows": torch.arange(shape.rows, device=device),
            "like": torch.empty(shape.rows, shape.size, dtype=torch.bool, device=device),
        },
        passes=lambda kernel, t: [Pass("forward", lambda: _mask(kernel, t))],
        outputs=lambda kernel, t: {"y0": _mask(kernel, t).float()},
        rows=frozenset(("rows", "like", "y0")),
        bytes=lambda s, e: (s.rows * s.size,),
        plain=dropout_mask,
        fused=False,
    ),
    "fp8": Operation(
        make=_inputs("x"),
        passes=lambda kernel, t: [Pass("forward", lambda: kernel[2](t["x"], E4M3))],
        outputs=lambda kernel, t: {"y0": _restored(kernel[2](_narrow(t["x"]), E4M3))},
        rows=frozenset(("x", "y0")),
        bytes=lambda s, e: (s.rows * s.size * (e + 1) + 4 * s.rows,),
        plain=(largest, cast, cast_rows),
        fused=False,
    ),
    "rope": differentiable(
        lambda kernel, t: kernel(t["x"], t["cos"], t["sin"]),
        plain=FORMULAS[apply_rope],
        wrt=("x",),
        rows=("x", "cos", "sin"),
        make=_rope_inputs,
        bytes=lambda s, e: (2 * s.rows * FEATURES * e,) * 2,
    ),
}
