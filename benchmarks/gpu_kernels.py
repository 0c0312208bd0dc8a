"""Part 2: each operation by each backend: time, share of the measured copy rate, error against fp64, the same twice.

A task is a case at a shape; `kernel_tasks` lists them, `rows` does one.
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from gpu_clock import Clock, Timing
from gpu_flat_operations import CASES, operation_of
from gpu_legs import Row, Task
from gpu_operations import Operation, Shape, Tensors
from gpu_rivals import allow_repeated_backwards, rivals

from megalite.config.compute import BACKENDS, OPERATIONS
from megalite.kernels.implementations import IMPLEMENTATIONS, Use
from megalite.kernels.preferences import shipped_preferences
from megalite.kernels.registry import why_not

T = 16384
SHAPES: Mapping[str, tuple[Shape, ...]] = {
    # The first of each is of GPT 1.3B; 1024 is a size at which launches count.
    "norms": (Shape(T, 2048), Shape(T, 4096), Shape(T, 8192), Shape(4096, 1024)),
    "mlp": (Shape(T, 8192), Shape(T, 16384), Shape(T, 32768), Shape(4096, 4096)),
    "rope": (Shape(T, 128), Shape(T, 64)),
    "cross_entropy": (Shape(T, 50304), Shape(T, 131072)),
    "softmax": (Shape(128, 2048),),
    "weight_grad": (Shape(T, 2048), Shape(T, 4096), Shape(T, 8192)),
    "flat": (Shape(1, 1 << 28), Shape(1, 1 << 24), Shape(1, 1 << 20)),
}
SMALL: Mapping[str, tuple[Shape, ...]] = {
    "norms": (Shape(6, 40),),
    "mlp": (Shape(6, 24),),
    "rope": (Shape(8, 512),),
    "cross_entropy": (Shape(6, 50),),
    "softmax": (Shape(2, 20),),
    "weight_grad": (Shape(6, 8),),
    "flat": (Shape(1, 1500),),
}
"""For a dry run: Triton's interpreter takes milliseconds a program."""
KINDS = {
    "rmsnorm": "norms",
    "layernorm": "norms",
    "add_norm": "norms",
    "bias_gelu": "mlp",
    "swiglu": "mlp",
    "geglu": "mlp",
    "matmul": "weight_grad",
    "adam": "flat",
    "lamb": "flat",
    "l2norm": "flat",
}
"""Operation -> which shapes; others have shapes of their own."""
CHUNK = 1 << 26
"""Elements of an input that are compared in fp64 at a time."""
PRECISE, WORSE = 0.125, 2.0
"""An error may be this share of the type's precision and so many times torch's own."""


def kernel_tasks(*, device: str, dry: bool) -> list[dict[str, Any]]:
    """All cases at the first shape of each, then at the second, and so on: when time runs out, all have had one."""
    shapes = {case: _shapes(case, dry) for case in CASES}
    deepest = max(len(of) for of in shapes.values())
    return [
        {
            "part": "kernels",
            "case": case,
            "rows": shapes[case][depth].rows,
            "size": shapes[case][depth].size,
            "device": device,
            "dry": dry,
            "compiled": depth == 0 and not dry,
        }
        for depth in range(deepest)
        for case in CASES
        if depth < len(shapes[case]) and not (depth > 0 and "," in case)
    ]


def without_case() -> list[Row]:
    """Operations of the registry that this benchmark does not know, as rows that say so."""
    known = {operation_of(case) for case in CASES}
    return [
        {"part": "kernels", "operation": name, "failed": "this benchmark has no case for it"}
        for name in OPERATIONS
        if name not in known
    ]


def rows(task: Task) -> Iterator[Row]:
    """A row a backend and pass; of a backend that gives no numbers one with the reason."""
    clock = Clock(torch.device(task["device"]), repeats=1 if task["dry"] else 50)
    with clock.own_stream():
        yield from _rows(task, clock)


def _rows(task: Task, clock: Clock) -> Iterator[Row]:
    case, device = CASES[task["case"]], torch.device(task["device"])
    allow_repeated_backwards()
    torch.manual_seed(hash_of(task["case"]) + task["size"])
    shape = Shape(task["rows"], task["size"])
    tensors = case.make(shape, case.dtype, device)
    common = {
        "part": "kernels",
        "case": task["case"],
        "operation": operation_of(task["case"]),
        "rows": shape.rows,
        "size": shape.size,
        "dtype": str(case.dtype).removeprefix("torch."),
        "preferred": preferred(operation_of(task["case"]), case.dtype, shape.size, device),
    }
    for backend, kernel in _kernels(task, case, shape).items():
        if isinstance(kernel, str):
            yield {**common, "backend": backend, "failed": kernel}
            continue
        try:
            yield from _measure(case, shape, tensors, backend, kernel, clock, common)
        except Exception as error:
            yield {**common, "backend": backend, "failed": _said(error)}
            if device.type == "cuda":
                torch.cuda.synchronize()  # raises if the device is lost: then this process is
                torch.cuda.empty_cache()


def preferred(operation: str, dtype: torch.dtype, size: int, device: torch.device) -> str:
    """The backend that a run takes today."""
    use = Use(device.type, dtype, size)
    order, _ = shipped_preferences().order(operation, use, device)
    has = IMPLEMENTATIONS[operation]
    return next((name for name in order if name in has and why_not(operation, name, use) is None), "torch")


def hash_of(name: str) -> int:
    """The same in every process."""
    return sum(ord(letter) << (index % 16) for index, letter in enumerate(name))


def _measure(
    case: Operation,
    shape: Shape,
    tensors: Tensors,
    backend: str,
    kernel: Any,
    clock: Clock,
    common: Row,
) -> Iterator[Row]:
    found = case.outputs(kernel, tensors)
    again = case.outputs(kernel, tensors)
    same = all(torch.equal(found[name], again[name]) for name in found)
    del again
    off = errors(case, tensors, found)
    del found
    wide = torch.finfo(case.dtype).bits // 8
    for index, step in enumerate(case.passes(kernel, tensors)):
        timing = clock.time(step.work, step.prepare)
        least = case.bytes(shape, wide)[index]
        yield {
            **common,
            "backend": backend,
            "pass": step.name,
            **_of_time(timing),
            "bytes": least,
            "gb_s": least / min(timing.ms, timing.graph_ms or timing.ms) / 1e6,
            **({"tflops": case.flops(shape) / timing.ms / 1e9} if case.flops is not None else {}),
            "error": off.relative,
            "error_steps": off.steps,
            "max_error": off.largest,
            "worst_output": off.worst,
            "bitwise": same,
        }


def _of_time(timing: Timing) -> Row:
    found: Row = {"ms": timing.ms, "p20": timing.p20, "p80": timing.p80, "repeats": timing.repeats}
    if timing.graph_ms is not None:
        return found | {"graph_ms": timing.graph_ms}
    return found | {"graph_reason": timing.graph_reason}


class Errors(NamedTuple):
    """Of a kernel's outputs against fp64."""

    relative: float
    """Of the worst output ‖Δ‖ / ‖exact‖."""
    steps: float
    """That in units of the output type's precision; by this the worst is found."""
    largest: float
    """Of all outputs max|Δ| / max|exact|."""
    worst: str


def errors(case: Operation, tensors: Tensors, found: Tensors) -> Errors:
    """How far a kernel is off.

    Rows are compared some at a time, so that the largest shapes fit; what is summed over rows is summed in fp64.
    """
    by_row = [value for name, value in tensors.items() if name in case.rows and value is not None]
    length = by_row[0].shape[0] if by_row else 1
    widest = max((value.numel() // length for value in by_row), default=1)
    step = max(CHUNK // widest, 1)
    sums: dict[str, torch.Tensor] = {}
    totals: dict[str, list[float]] = {}

    def compare(name: str, got: torch.Tensor, exact: torch.Tensor) -> None:
        parts = totals.setdefault(name, [0.0, 0.0, 0.0, 0.0])
        assert got.shape == exact.shape, (name, got.shape, exact.shape)
        parts[1] += exact.square().sum().item()
        parts[3] = max(parts[3], exact.abs().max().item())
        difference = exact - got
        parts[0] += difference.square().sum().item()
        parts[2] = max(parts[2], difference.abs().max().item())

    for start in range(0, length, step):
        part = {
            name: _wide(value[start : start + step] if name in case.rows else value)
            for name, value in tensors.items()
        }
        for name, exact in case.formula(part).items():
            if name in case.rows:
                compare(name, found[name][start : start + step], exact)
            else:
                sums[name] = sums[name] + exact if name in sums else exact
    for name, exact in sums.items():
        compare(name, found[name], exact)
    assert totals.keys() == found.keys(), (totals.keys(), found.keys())
    relative = {name: math.sqrt(parts[0] / max(parts[1], 1e-300)) for name, parts in totals.items()}

    def in_steps(name: str) -> float:
        # A half type's error must not hide one in an fp32 output beside it; nothing promises more than fp32.
        steps = relative[name] / torch.finfo(_narrower(found[name].dtype, torch.float32)).eps
        return math.inf if math.isnan(steps) else steps

    worst = max(relative, key=in_steps)
    return Errors(
        relative[worst],
        in_steps(worst),
        max(parts[2] / max(parts[3], 1e-300) for parts in totals.values()),
        worst,
    )


def _narrower(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def acceptable(row: Row, of_torch: Row | None) -> str | None:
    """Why a backend must not be preferred, whatever its speed, or None."""
    if "failed" in row:
        return str(row["failed"])
    if not row["bitwise"]:
        return "two runs differ"
    allowed = PRECISE
    if of_torch is not None and "error_steps" in of_torch:
        allowed += WORSE * of_torch["error_steps"]
    if not row["error_steps"] <= allowed:
        return (
            f"its error is {row['error_steps']:.2g} times the type's precision, and {allowed:.2g} is allowed"
        )
    return None


def _kernels(task: Task, case: Operation, shape: Shape) -> dict[str, Any]:
    """Backend -> its kernel, or the reason for which there is none, as text."""
    operation = operation_of(task["case"])
    use = Use(task["device"], case.dtype, shape.size)
    found: dict[str, Any] = {}
    for backend in reversed(BACKENDS):  # torch first: others are compared with it
        implementation = IMPLEMENTATIONS[operation].get(backend)
        if implementation is None:
            continue
        interpreted = task["dry"] and backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        reason = implementation.why_not(use) if interpreted else why_not(operation, backend, use)
        try:
            found[backend] = implementation.load() if reason is None else reason
        except Exception as error:
            found[backend] = f"cannot be imported: {_said(error)}"
    return found | rivals(task["case"], compiled=task["compiled"])


def _shapes(case: str, dry: bool) -> tuple[Shape, ...]:
    operation = operation_of(case)
    return (SMALL if dry else SHAPES)[KINDS.get(operation, operation)]


def _said(error: Exception) -> str:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
