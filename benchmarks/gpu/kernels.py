"""Part 2: each operation by each backend: time, share of the copy rate, error against fp64, equal bits in two runs.

A task is a case at a shape; `kernel_tasks` lists the tasks, `rows` runs one."""

import importlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.flat import CASES, operation_of
from benchmarks.gpu.legs import Row, Task, reason_of
from benchmarks.gpu.operations import Operation, Shape, Tensors
from megalite.config.compute import BACKENDS, OPERATIONS
from megalite.kernels.registry import IMPLEMENTATIONS, KernelUse, Rule, read_preferences, shipped_preferences, why_not

T = 16384
SHAPES: Mapping[str, tuple[Shape, ...]] = {
    # The first of each is from GPT 1.3B; at 1024 columns launches matter.
    "norms": (Shape(T, 2048), Shape(T, 4096), Shape(T, 8192), Shape(4096, 1024)),
    "mlp": (Shape(T, 8192), Shape(T, 16384), Shape(T, 32768), Shape(4096, 4096)),
    "rope": (Shape(T, 128), Shape(T, 64)),
    "cross_entropy": (Shape(T, 50304), Shape(T, 131072)),
    "softmax": (Shape(128, 2048),),
    "delta_scan": (Shape(32, 128),),
    "dropout_mask": (Shape(1024, 2048),),  # few, because torch draws on the host
    "weight_grad": (Shape(T, 2048), Shape(T, 4096), Shape(T, 8192)),
    "flat": (Shape(1, 1 << 28), Shape(1, 1 << 24), Shape(1, 1 << 20)),
}
SMALL: Mapping[str, tuple[Shape, ...]] = {  # for a dry run: Triton's interpreter takes milliseconds per program
    **dict.fromkeys(("norms", "mlp", "cross_entropy", "dropout_mask", "weight_grad"), (Shape(6, 40),)),
    **dict.fromkeys(("softmax", "delta_scan"), (Shape(2, 20),)),
    "rope": (Shape(8, 512),),
    "flat": (Shape(1, 1500),),
}
KINDS = {  # operation -> key of the shapes, if it is not the operation
    **dict.fromkeys(("rmsnorm", "layernorm", "add_norm", "fp8"), "norms"),
    **dict.fromkeys(("bias_gelu", "swiglu", "geglu"), "mlp"),
    **dict.fromkeys(("adam", "lamb", "l2norm"), "flat"),
    "matmul": "weight_grad",
}
COMPILED = "compile"
CHUNK = 1 << 26  # elements of an input that are compared in fp64 at a time
PRECISE, WORSE = 0.125, 2.0
"""Largest acceptable error: this share of the type's precision, and this multiple of torch's error."""


def kernel_tasks(*, device: str, dry: bool) -> list[dict[str, Any]]:
    """Return all cases at their first shapes, then at their second and so on, so that each is measured in a short time."""
    shapes = {case: _shapes(case, dry) for case in CASES}
    found = []
    for depth in range(max(map(len, shapes.values()))):
        for case, of in shapes.items():
            if depth < len(of) and not (depth > 0 and "," in case):
                task = {"part": "kernels", "case": case, **vars(of[depth]), "device": device, "dry": dry}
                found.append({**task, "compiled": depth == 0 and not dry})
    return found


def without_case() -> list[Row]:
    """Return a row for each operation of the registry that has no case here."""
    known = {operation_of(case) for case in CASES}
    row = {"part": "kernels", "failed": "this benchmark has no case for it"}
    return [{**row, "operation": name} for name in OPERATIONS if name not in known]


def rows(task: Task) -> Iterator[Row]:
    """Yield a row per backend and pass; for a backend without numbers one with the reason."""
    clock = Clock(torch.device(task["device"]), repeats=1 if task["dry"] else 50)
    with clock.own_stream():
        yield from _rows(task, clock)


def _rows(task: Task, clock: Clock) -> Iterator[Row]:
    case, device = CASES[task["case"]], torch.device(task["device"])
    # A compiled backward must not reuse the memory of its inputs, because it is timed repeatedly on the same graph.
    setattr(importlib.import_module("torch._functorch.config"), "donated_buffer", False)  # noqa: B010  (typed so)
    torch.manual_seed(sum(ord(letter) << (at % 16) for at, letter in enumerate(task["case"])) + task["size"])
    shape = Shape(task["rows"], task["size"])
    tensors = case.make(shape, case.dtype, device)
    common = {"part": "kernels", "case": task["case"], "operation": operation_of(task["case"]), **vars(shape)}
    common["dtype"] = str(case.dtype).removeprefix("torch.")
    common["preferred"] = preferred(common["operation"], case.dtype, shape.size, device)
    for backend, kernel in _kernels(task, case, shape).items():
        if isinstance(kernel, str):
            yield {**common, "backend": backend, "failed": kernel}
            continue
        try:
            yield from _measure(case, shape, tensors, backend, kernel, clock, common)
        except Exception as error:
            yield {**common, "backend": backend, "failed": reason_of(error)}
            if device.type == "cuda":
                torch.cuda.synchronize()  # raises if the device is lost, and ends this process
                torch.cuda.empty_cache()


def preferred(operation: str, dtype: torch.dtype, size: int, device: torch.device) -> str:
    """Return the backend that a run uses today."""
    use = KernelUse(device.type, dtype, size)
    order, _ = shipped_preferences().order(operation, use, device)
    has = IMPLEMENTATIONS[operation]
    return next((name for name in order if name in has and why_not(operation, name, use) is None), "torch")


def _measure(
    case: Operation, shape: Shape, tensors: Tensors, backend: str, kernel: Any, clock: Clock, common: Row
) -> Iterator[Row]:
    found, again = case.outputs(kernel, tensors), case.outputs(kernel, tensors)
    same = all(torch.equal(found[name], again[name]) for name in found)
    del again
    off = errors(case, tensors, found)
    del found
    accuracy = {"error": off.relative, "error_steps": off.steps, "max_error": off.largest}
    accuracy |= {"worst_output": off.worst, "bitwise": same}
    least = case.bytes(shape, torch.finfo(case.dtype).bits // 8)
    for step, moved in zip(case.passes(kernel, tensors), least, strict=True):
        timing = clock.time(step.work, step.prepare)
        rate = moved / min(timing.ms, timing.graph_ms or timing.ms) / 1e6
        flops = {"tflops": case.flops(shape) / timing.ms / 1e9} if case.flops is not None else {}
        of_pass = {"backend": backend, "pass": step.name, **timing.row(), "bytes": moved, "gb_s": rate, **flops}
        yield {**common, **of_pass, **accuracy, "copy_ms": clock.copy_ms(moved)}


class Errors(NamedTuple):
    """Errors of a kernel's outputs against fp64."""

    relative: float  # of the worst output ‖Δ‖ / ‖exact‖
    steps: float  # that in units of the output type's precision; by this the worst is found
    largest: float  # of all outputs max|Δ| / max|exact|
    worst: str


def errors(case: Operation, tensors: Tensors, found: Tensors) -> Errors:
    """Return a kernel's errors.

    Rows are compared in parts, so that the largest shapes fit in memory; sums over rows are added in fp64."""
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
        part = {name: _wide(value[start : start + step] if name in case.rows else value) for name, value in tensors.items()}
        for name, exact in case.outputs(case.plain, part).items():
            if name in case.rows:
                compare(name, found[name][start : start + step], exact)
            else:
                sums[name] = sums[name] + exact if name in sums else exact
    for name, exact in sums.items():
        compare(name, found[name], exact)
    assert totals.keys() == found.keys(), (totals.keys(), found.keys())
    relative = {name: math.sqrt(parts[0] / max(parts[1], 1e-300)) for name, parts in totals.items()}

    def in_steps(name: str) -> float:
        # The error of a half type must not hide one in an fp32 output; no output is promised to be better than fp32.
        steps = relative[name] / max(torch.finfo(dtype).eps for dtype in (found[name].dtype, torch.float32))
        return math.inf if math.isnan(steps) else steps

    worst = max(relative, key=in_steps)
    largest = max(parts[2] / max(parts[3], 1e-300) for parts in totals.values())
    return Errors(relative[worst], in_steps(worst), largest, worst)


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def acceptable(row: Row, of_torch: Row | None) -> str | None:
    """Return why a backend must not be preferred, independent of its speed, or None."""
    if "failed" in row:
        return str(row["failed"])
    if not row["bitwise"]:
        return "two runs differ"
    allowed = PRECISE
    if of_torch is not None and "error_steps" in of_torch:
        allowed += WORSE * of_torch["error_steps"]
    steps = row["error_steps"]
    if not steps <= allowed:
        return f"its error is {steps:.2g} times the type's precision, and {allowed:.2g} is allowed"
    return None


def _kernels(task: Task, case: Operation, shape: Shape) -> dict[str, Any]:
    """Return backend -> its kernel, or the reason for its absence as text."""
    operation = operation_of(task["case"])
    use = KernelUse(task["device"], case.dtype, shape.size)
    found: dict[str, Any] = {}
    for backend in reversed(BACKENDS):  # torch first, because others are compared with it
        implementation = IMPLEMENTATIONS[operation].get(backend)
        if implementation is None:
            continue
        interpreted = task["dry"] and backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        reason = implementation.why_not(use) if interpreted else why_not(operation, backend, use)
        try:
            found[backend] = implementation.load() if reason is None else reason
        except Exception as error:
            found[backend] = f"cannot be imported: {reason_of(error)}"
    if case.fused:
        found[COMPILED] = _compiled(case.plain) if task["compiled"] else "not compiled at this size"
    return found


def _compiled(plain: Any) -> Any:
    """Return plain torch, compiled: a rival outside megalite."""
    if isinstance(plain, tuple):
        return tuple(map(_compiled, plain))
    return torch.compile(plain, dynamic=False, fullgraph=True)


def _shapes(case: str, dry: bool) -> tuple[Shape, ...]:
    operation = operation_of(case)
    return (SMALL if dry else SHAPES)[KINDS.get(operation, operation)]


CLEAR = 0.02  # a backend must be faster than torch by this share to precede it
LARGE = 1 << 25
"""From this many bytes the device's time decides, because the host launches ahead; below, the device waits for the host."""
HALF_TYPES = ["bfloat16", "float16"]


def rules(rows: Sequence[Row], *, device: str, measured_on: str) -> list[dict[str, Any]]:
    """Return a rule per operation and range of sizes.

    A backend's time at a size is the sum of its passes: replayed in a graph if every backend has that time and moves at
    least `LARGE` bytes per pass, else launched from Python. Backends that failed, are not repeatable or too inexact are
    not in the order. Neighbouring sizes with the same order share a rule; the smallest size's rule also applies below it."""
    found: list[dict[str, Any]] = []
    for operation in dict.fromkeys(row["operation"] for row in rows if "operation" in row):
        # The table of preferences does not distinguish variants, the cases with a comma in their name.
        own = [row for row in rows if row.get("case") == operation and "backend" in row]
        last: list[str] | None = None
        for number, size in enumerate(sorted({row["size"] for row in own})):
            at = [row for row in own if row["size"] == size]
            order, words = _order(at)
            if order is None or order == last:
                continue
            dtype = at[0]["dtype"]
            rule: dict[str, Any] = {"operation": operation, "device": device}
            if dtype != "float32":
                rule["dtypes"] = HALF_TYPES
            if number:
                rule["from_size"] = size
            found.append({**rule, "order": order, "because": f"measured on {measured_on}: {words}"})
            last = order
    return found


def _order(rows: list[Row]) -> tuple[list[str] | None, str]:
    """Return (backends, best first; the figures in words) at one size."""
    of_torch = [row for row in rows if row["backend"] == "torch"]
    times: dict[str, float] = {}
    refused: dict[str, str] = {}
    timed = [row for row in rows if "ms" in row]
    of_device = all("graph_ms" in row and row["bytes"] >= LARGE for row in timed)
    for backend in BACKENDS:
        own = [row for row in rows if row["backend"] == backend]
        reasons = [reason for row in own if (reason := acceptable(row, of_torch[0] if of_torch else None))]
        if reasons and any("ms" in row for row in own):
            refused[backend] = reasons[0]
        elif own and not reasons:
            times[backend] = sum(row["graph_ms" if of_device else "ms"] for row in own)
    if "torch" not in times:
        return None, ""
    # If torch is nearly as fast, it is first: it needs no compiler and is the most used.
    order = sorted(times, key=lambda backend: times[backend] * (1.0 - CLEAR if backend == "torch" else 1.0))
    words = ", ".join(f"{backend} {times[backend]:.3f} ms" for backend in order)
    words += "".join(f"; {backend} refused: {reason}" for backend, reason in refused.items())
    shape = f"{rows[0]['rows']} x {rows[0]['size']}" if rows[0]["rows"] > 1 else f"{rows[0]['size']} elements"
    return order, f"{shape}: {words}"


def write(path: Path, measured: list[dict[str, Any]]) -> None:
    """Write the measured rules, and the shipped ones that they do not replace, and check that the file can be read."""
    replaced = {(rule["operation"], rule["device"]) for rule in measured}
    kept = [_as_row(rule) for rule in shipped_preferences().rules if (rule.operation, rule.device) not in replaced]
    text = "# Order of backends by operation, device, type and size of the last dimension. Without a matching rule: torch.\n"
    text += "# Written by benchmarks/gpu/run.py; `because`: the measurement or assumption behind a rule.\n"
    for row in [*measured, *kept]:
        text += yaml.safe_dump([row], sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)
    read_preferences(text, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def capability(machine: Row) -> str:
    return str(machine.get("capability", "cuda" if torch.cuda.is_available() else "cpu"))


def _as_row(rule: Rule) -> dict[str, Any]:
    row: dict[str, Any] = {"operation": rule.operation, "device": rule.device}
    if rule.dtypes:
        row["dtypes"] = sorted(rule.dtypes)
    if rule.from_size:
        row["from_size"] = rule.from_size
    return {**row, "order": list(rule.order), "because": rule.because}
