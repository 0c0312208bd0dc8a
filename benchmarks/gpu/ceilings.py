"""Part 1: the device, and its limits: copying, matrix products, attention by each of torch's backends."""

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks import common
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.legs import Row, Task, reason_of

ATTENTION = (8, 16, 2048, 128)  # batch, heads, sequence, head size
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
RAN = {"cudnn": ("cudnn",), "flash": ("flash",), "efficient": ("fmha_cutlass", "efficient")}
"""Parts of the names of a backend's device kernels, or of its operations."""


def ceiling_tasks(*, device: str, dry: bool) -> list[dict[str, Any]]:
    shared = {"part": "ceilings", "device": device, "dry": dry}
    return [{**shared, "what": what} for what in ("copy", "gemm", "attention")]


def rows(task: Task) -> Iterator[Row]:
    if task["part"] == "machine":
        yield {"part": "machine", "when": task["when"], **describe(torch.device(task["device"]))}
        return
    device = torch.device(task["device"])
    torch.manual_seed(1)
    clock = Clock(device, repeats=2 if task["dry"] else 50, graphs=False)
    part = {"copy": _copy, "gemm": _gemm, "attention": _attention}[task["what"]]
    for row in part(task["dry"], device, clock):
        yield {"part": "ceilings", "what": task["what"], **row}


def _copy(dry: bool, device: torch.device, clock: Clock) -> Iterator[Row]:
    size = 1 << 16 if dry else 4 << 30
    source = torch.empty(size // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    ms = clock.time(lambda: target.copy_(source)).ms
    yield {"shape": f"{size} bytes", "ms": ms, "gb_s": 2 * size / ms / 1e6}


def products(dry: bool) -> dict[str, tuple[int, int, int]]:
    """Return name -> (m, k, n) of [m, k] x [k, n]: a square one, then those of GPT 1.3B with 16384 tokens."""
    if dry:
        return {"square": (32, 32, 32), "mlp up": (16, 8, 32)}
    t, h, f, v = 16384, 2048, 8192, 50304
    layer = {"qkv": (t, h, 3 * h), "attention out": (t, h, h), "mlp up": (t, h, f), "mlp down": (t, f, h)}
    return {"square": (8192, 8192, 8192), **layer, "head": (t, h, v)}


def _gemm(dry: bool, device: torch.device, clock: Clock) -> Iterator[Row]:
    """Time x·Wᵀ of a linear layer, its gradients dy·W and dyᵀ·x, and the square product in FP8, scaled per tensor."""
    for name, (m, k, n) in products(dry).items():
        shapes = ((m, k), (n, k), (m, n))
        x, w, dy = (torch.randn(shape, device=device).to(torch.bfloat16) for shape in shapes)
        yield _product(f"{name}, forward", "bfloat16", (m, k, n), clock, partial(torch.mm, x, w.t()))
        if name == "square":
            # Right after a load, before the clocks drop.
            yield {"part": "machine", "when": "under load", "clocks": clocks()}
            continue
        yield _product(f"{name}, input gradient", "bfloat16", (m, k, n), clock, partial(torch.mm, dy, w))
        yield _product(f"{name}, weight gradient", "bfloat16", (m, k, n), clock, partial(torch.mm, dy.t(), x))
    m, k, n = products(dry)["square"]
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        reason = "FP8 products need compute capability 8.9 and up"
        yield {"shape": "square, forward", "dtype": "float8_e4m3fn", "failed": reason}
        return
    a, b = (torch.randn(shape, device=device).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
    scales = dict.fromkeys(("scale_a", "scale_b"), torch.ones((), device=device))
    eight = partial(torch._scaled_mm, a, b.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=True)
    yield _product("square, forward", "float8_e4m3fn", (m, k, n), clock, eight)


def _product(name: str, dtype: str, shape: tuple[int, int, int], clock: Clock, work: Callable[[], object]) -> Row:
    m, k, n = shape
    ms = clock.time(work).ms
    sizes = {"shape": name, "mkn": f"{m} x {k} x {n}", "dtype": dtype}
    return {**sizes, "ms": ms, "tflops": 2 * m * k * n / ms / 1e9}


def _attention(dry: bool, device: torch.device, clock: Clock) -> Iterator[Row]:
    """Time each backend, and torch's choice of them."""
    b, a, s, d = (1, 2, 16, 8) if dry else ATTENTION
    q, k, v, dy = (torch.randn(b, a, s, d, device=device).to(torch.bfloat16) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    flops = 4 * b * a * s * s * d / 2  # of the forward, causal: half of the scores

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    pinned = {name: [backend] for name, backend in BACKENDS.items()}
    for name, backends in {"torch's choice": list(BACKENDS.values()), **pinned}.items():
        title: Row = {"shape": f"{b} x {a} x {s} x {d}, causal", "backend": name}
        try:
            with sdpa_kernel(backends):
                ran, ahead, out = _ran(attend, device), clock.time(attend).ms, attend()
                back = partial(torch.autograd.grad, out, (q, k, v), dy, retain_graph=True)
                behind = clock.time(back).ms
        except RuntimeError as error:  # also: out of memory
            yield {**title, "failed": reason_of(error)}
            continue
        forward = {"ran": ran, "ms": ahead, "tflops": flops / ahead / 1e9}
        yield {**title, **forward, "backward_ms": behind, "backward_tflops": 2.5 * flops / behind / 1e9}


def _ran(attend: Callable[[], object], device: torch.device) -> str:
    """Return the backend that ran, by the names of its kernels or operations."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    attend()
    with profile(activities=kinds) as profiler:
        attend()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return backend_named(event.key for event in profiler.key_averages())


def backend_named(names: Iterable[str]) -> str:
    """Return `cudnn`, `flash` or `efficient`, else `math`."""
    text = " ".join(names).lower()
    return next((backend for backend, parts in RAN.items() if any(part in text for part in parts)), "math")


CLOCKS = "clocks.sm clocks.mem clocks.max.sm clocks.max.mem power.draw power.limit temperature.gpu"


def describe(device: torch.device) -> dict[str, Any]:
    """Return the machine for the JSON. `clocks` are current ones: call it at the beginning and at the end."""
    found: dict[str, Any] = {
        "device": f"{common.processor()}, {os.cpu_count()} cores",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: common.version(name) for name in ("triton", "transformers", "numpy")},
        "apex": importlib.util.find_spec("apex") is not None,
    }
    if device.type != "cuda":
        return found
    properties = torch.cuda.get_device_properties(device)
    found |= {"device": properties.name, "capability": f"sm_{properties.major}{properties.minor}", "clocks": clocks()}
    found |= {"driver": query("driver_version").get("driver_version"), "cuda": torch.version.cuda}
    found |= {"cudnn": torch.backends.cudnn.version(), "multiprocessors": properties.multi_processor_count}
    memory, cache = round(properties.total_memory / 2**30, 1), properties.L2_cache_size / 2**20
    return {**found, "memory_gib": memory, "l2_mib": cache}


def clocks() -> dict[str, str]:
    """Return current clocks, power and temperature in nvidia-smi's units; nothing without it."""
    # Older drivers have the second name; an unknown name would make the whole query fail.
    reasons = query("clocks_event_reasons.active") or query("clocks_throttle_reasons.active")
    return query(*CLOCKS.split()) | reasons


def query(*names: str) -> dict[str, str]:
    """Return nvidia-smi's fields of the first GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(names, values)) if done.returncode == 0 and len(values) == len(names) else {}


def short(machine: dict[str, Any]) -> str:
    """Return for example `NVIDIA H100 80GB HBM3, driver 580.1, torch 2.11.0, triton 3.6.0`."""
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    return f"{machine['device']}{driver}, torch {machine['torch']}, triton {machine['packages']['triton']}"
