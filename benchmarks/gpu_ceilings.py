"""Part 1: what the device gives at best: copying, matrix products, attention by each backend that torch has."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_clock import Clock
from gpu_legs import Row, Task
from gpu_machine import clocks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

ATTENTION = (8, 16, 2048, 128)
"""Batch, heads, sequence, head size."""
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
RAN = (
    ("cudnn", ("cudnn",)),
    ("flash", ("flash",)),
    ("efficient", ("fmha_cutlass", "efficient")),
)
"""What the names of a backend's device kernels, or of its operations, contain."""


def ceiling_tasks(*, device: str, dry: bool) -> list[dict[str, Any]]:
    """The three, with FP8 products beside."""
    common = {"part": "ceilings", "device": device, "dry": dry}
    return [{**common, "what": what} for what in ("copy", "gemm", "attention")]


def rows(task: Task) -> Iterator[Row]:
    """A row a measurement."""
    device = torch.device(task["device"])
    torch.manual_seed(1)
    clock = Clock(device, repeats=2 if task["dry"] else 50, graphs=False)
    yield from {"copy": _copy, "gemm": _gemm, "attention": _attention}[task["what"]](task, device, clock)


def _copy(task: Task, device: torch.device, clock: Clock) -> Iterator[Row]:
    size = 1 << 16 if task["dry"] else 4 << 30
    source = torch.empty(size // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    timing = clock.time(lambda: target.copy_(source))
    yield {
        "part": "ceilings",
        "what": "copy",
        "shape": f"{size} bytes",
        "ms": timing.ms,
        "gb_s": 2 * size / timing.ms / 1e6,
    }


def products(dry: bool) -> dict[str, tuple[int, int, int]]:
    """Name -> (m, k, n) of [m, k] x [k, n]: the square one, then those of GPT 1.3B with 16384 tokens."""
    if dry:
        return {"square": (32, 32, 32), "mlp up": (16, 8, 32)}
    t, h, f, v = 16384, 2048, 8192, 50304
    return {
        "square": (8192, 8192, 8192),
        "qkv": (t, h, 3 * h),
        "attention out": (t, h, h),
        "mlp up": (t, h, f),
        "mlp down": (t, f, h),
        "head": (t, h, v),
    }


def _gemm(task: Task, device: torch.device, clock: Clock) -> Iterator[Row]:
    """x·Wᵀ as a linear layer has it; its gradients dy·W and dyᵀ·x; and the square one in FP8, tensorwise."""
    for name, (m, k, n) in products(task["dry"]).items():
        x, w, dy = (
            torch.randn(shape, device=device).to(torch.bfloat16) for shape in ((m, k), (n, k), (m, n))
        )
        works: dict[str, Callable[[], object]] = {
            "forward": partial(torch.mm, x, w.t()),
            "input gradient": partial(torch.mm, dy, w),
            "weight gradient": partial(torch.mm, dy.t(), x),
        }
        for kind, work in works.items():
            if kind == "forward" or name != "square":
                yield _product(f"{name}, {kind}", "bfloat16", (m, k, n), clock.time(work).ms)
        if name == "square":
            # Straight after a load, before the clocks fall back.
            yield {"part": "machine", "when": "under load", "clocks": clocks()}
    m, k, n = products(task["dry"])["square"]
    common = {"part": "ceilings", "what": "gemm", "shape": "square, forward", "dtype": "float8_e4m3fn"}
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        yield {**common, "failed": "FP8 products need compute capability 8.9 and up"}
        return
    a, b = (torch.randn(shape, device=device).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
    one = torch.ones((), device=device)
    product = clock.time(
        lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    )
    yield _product("square, forward", "float8_e4m3fn", (m, k, n), product.ms)


def _product(name: str, dtype: str, shape: tuple[int, int, int], ms: float) -> Row:
    m, k, n = shape
    return {
        "part": "ceilings",
        "what": "gemm",
        "shape": name,
        "mkn": f"{m} x {k} x {n}",
        "dtype": dtype,
        "ms": ms,
        "tflops": 2 * m * k * n / ms / 1e9,
    }


def _attention(task: Task, device: torch.device, clock: Clock) -> Iterator[Row]:
    """Each backend pinned, and torch's own choice with which it was."""
    b, a, s, d = (1, 2, 16, 8) if task["dry"] else ATTENTION
    q, k, v, dy = (torch.randn(b, a, s, d, device=device).to(torch.bfloat16) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    forward = 4 * b * a * s * s * d / 2  # causal: half of the scores
    pinned = {name: [backend] for name, backend in BACKENDS.items()}
    for name, backends in {"torch's choice": list(BACKENDS.values()), **pinned}.items():
        common: Row = {
            "part": "ceilings",
            "what": "attention",
            "shape": f"{b} x {a} x {s} x {d}, causal",
            "backend": name,
        }
        try:
            with sdpa_kernel(backends):

                def attend() -> torch.Tensor:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

                ran = _ran(attend, device)
                ahead = clock.time(attend).ms
                out = attend()

                def back(out: torch.Tensor = out) -> object:
                    return torch.autograd.grad(out, (q, k, v), dy, retain_graph=True)

                behind = clock.time(back).ms
        except RuntimeError as error:  # also: out of memory
            lines = str(error).strip().splitlines()
            yield {**common, "failed": lines[0] if lines else type(error).__name__}
            continue
        yield {
            **common,
            "ran": ran,
            "ms": ahead,
            "tflops": forward / ahead / 1e9,
            "backward_ms": behind,
            "backward_tflops": 2.5 * forward / behind / 1e9,
        }


def _ran(attend: Callable[[], object], device: torch.device) -> str:
    """Which backend the names of what ran speak of."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    attend()
    with profile(activities=kinds) as profiler:
        attend()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return backend_named(event.key for event in profiler.key_averages())


def backend_named(names: Any) -> str:
    """`cudnn`, `flash`, `efficient`, else `math`."""
    text = " ".join(names).lower()
    return next((backend for backend, parts in RAN if any(part in text for part in parts)), "math")
