"""Part 5: where a step's time goes, by torch's profiler: rows that add up to the step, with their largest pieces."""

import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module, util

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.legs import Row

SHARE = 0.03  # pieces with a larger share of the step are listed

KERNELS = {  # row -> parts of its device kernels' names; the first matching row counts
    "communication": "nccl",
    "attention": "flash fmha sdpa attention",
    "GEMM": "gemm nvjet cutlass xmma splitkreduce cublas scaled_mm",
    "optimizer": "fusedadam fused_adam multi_tensor lpnorm norm_ops normops vector_norm normtwo",
    "cross-entropy": "softmax nll_loss scatter_gather gather_kernel scatter_add",
    "norms and activations": "layer_norm layernorm rms_norm rmsnorm gelu silu swiglu gammabeta",
    "embedding": "embedding indexselect index_select",
    "copies": "memcpy memset copy_kernel catarray fillfunctor",
}
OPERATIONS = {  # the same for torch's operations on a CPU
    "communication": "c10d:: gloo:",
    "attention": "scaled_dot_product flash_attention",
    "GEMM": "aten::mm aten::addmm aten::bmm aten::linear aten::matmul mkldnn",
    "optimizer": "adam vector_norm foreach",
    "cross-entropy": "log_softmax aten::exp gather scatter",
    "norms and activations": "layer_norm rms_norm gelu silu aten::rsqrt",
    "embedding": "embedding",
    "copies": "copy_ aten::cat aten::fill_ aten::zero_ _to_copy clone contiguous",
}
OURS = {  # modules of megalite.kernels.triton -> row
    "optimizer_ops": "optimizer",
    "cross_entropy": "cross-entropy",
    "delta_scan": "attention",
    "norms norm_backward launch elementwise": "norms and activations",
    "fp8": "copies",
}
OTHER = "other"
OPERATION = ("aten::", "c10d::", "gloo", "mkldnn::")
ROWS = ("GEMM", "attention", "norms and activations", "cross-entropy", "optimizer", "communication")
ROWS += ("embedding", "copies", OTHER, "Python", "idle")


def profile_rows(step: Callable[[], object], device: torch.device, *, warm_up: int) -> Iterator[Row]:
    """Yield a row per category: ms and share of one step, and its pieces above `SHARE`.

    On CUDA a category is the time of its kernels, and idle the time in which none ran: the device waits for Python,
    which therefore has no row. On CPU, Python is the thread's time outside operations, and idle the time in which
    it did not run."""
    for _ in range(warm_up):
        step()
    wall, pieces, busy = (_on_device if device.type == "cuda" else _on_cpu)(step, device)
    if device.type == "cuda":
        table = shares(pieces, wall, category_of_kernel(triton_kernels()))
        table["idle"] = (max(wall - busy, 0.0), {})
    else:
        table = shares(pieces, wall, category_of_operation)
        # Operations have wall times: if other programs interrupt them, their sum exceeds the thread's time.
        worked = sum(pieces.values())
        table["Python"] = (max(busy - worked, 0.0), {})
        table["idle"] = (max(wall - max(busy, worked), 0.0), {})
    for row in ROWS:
        ms, named = table.get(row, (0.0, {}))
        largest = {name[:120]: took for name, took in sorted(named.items(), key=lambda item: -item[1])}
        yield {"profile": row, "ms": ms, "share": ms / wall, "step_ms": wall, "pieces": largest}


def shares(pieces: dict[str, float], wall: float, category: Callable[[str], str]) -> dict[str, tuple[float, dict[str, float]]]:
    """Return category -> (ms, its pieces with more than `SHARE` of the step).

    Args:
        pieces: name -> ms.
        wall: of the step, ms."""
    table: dict[str, tuple[float, dict[str, float]]] = {}
    for name, ms in pieces.items():
        row = category(name)
        total, named = table.get(row, (0.0, {}))
        if ms > SHARE * wall:
            named = {**named, name: ms}
        table[row] = (total + ms, named)
    return table


def _row_of(name: str, table: Mapping[str, str]) -> str:
    text = name.lower()
    return next((row for row, parts in table.items() if any(part in text for part in parts.split())), OTHER)


def category_of_operation(name: str) -> str:
    """Return the row of one of torch's operations."""
    return _row_of(name, OPERATIONS)


def category_of_kernel(ours: dict[str, str]) -> Callable[[str], str]:
    """Return the function from a device kernel's name to its row; `ours`: Triton kernels by exact name."""
    return lambda name: ours[name] if name in ours else _row_of(name, KERNELS)


def triton_kernels() -> dict[str, str]:
    """Return name -> row for megalite's Triton kernels. Of two with the same name the first counts."""
    if util.find_spec("triton") is None:
        return {}
    found: dict[str, str] = {}
    for module, row in ((name, row) for names, row in OURS.items() for name in names.split()):
        members = vars(import_module(f"megalite.kernels.triton.{module}"))
        for name, value in members.items():
            if hasattr(value, "fn") and hasattr(value, "run"):
                found.setdefault(name, row)
    return found


def _on_device(step: Callable[[], object], device: torch.device) -> tuple[float, dict[str, float], float]:
    """Return a step's ms without the profiler, which slows Python down; kernel -> ms; ms in which any kernel ran."""
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    wall = 1e3 * (time.perf_counter() - start)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize(device)
    pieces: dict[str, float] = {}
    stretches = []
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            stretches.append((event.time_range.start, event.time_range.end))
            pieces[event.name] = pieces.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e3
    return wall, pieces, covered(stretches) / 1e3


def profiled(step: Callable[[], object]) -> tuple[float, float, dict[str, tuple[float, int]]]:
    """Return a step's wall and main-thread milliseconds, and operation -> (milliseconds, calls)."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        wall, cpu = time.perf_counter(), time.thread_time()
        step()
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    operations = {event.key: (event.self_cpu_time_total / 1e3, event.count) for event in profiler.key_averages()}
    return 1e3 * wall, 1e3 * cpu, operations


def _on_cpu(step: Callable[[], object], device: torch.device) -> tuple[float, dict[str, float], float]:
    """Return a step's ms; operation -> ms without its callees; ms in which this thread ran."""
    wall, spent, operations = profiled(step)
    return wall, {name: took for name, (took, _) in operations.items() if name.startswith(OPERATION)}, spent


def covered(stretches: list[tuple[float, float]]) -> float:
    total, reached = 0.0, -float("inf")
    for start, end in sorted(stretches):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
