"""Where the time of one training step goes, per rank, in any layout.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.steps.breakdown --tp 2

Takes the flags of pretrain_gpt.py over the model of benchmarks.steps.run. Operations are timed by torch's profiler in one
step after a warm-up; waiting is wall time during which the main thread did not run (messages, peers, other processes);
Python is what is left of the main thread's own time.
"""

import sys
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.steps.replica import Run
from benchmarks.steps.run import CPU_MODEL, flags_of
from megalite.config.flags import parse_arguments
from megalite.config.validate import validate
from megalite.topology.topology import Launch, start_distributed, stop_distributed
from megalite.training.memory import keep_freed_memory

WARM_UP = 4
LOSS = ("aten::_log_softmax", "aten::exp", "aten::amax", "aten::sub_", "aten::scatter_add", "aten::gather")
CATEGORIES = {
    "GEMM": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise"),
    "attention": ("aten::_scaled_dot_product",),
    "log-softmax, loss": LOSS,
    "norms, activations": ("aten::native_layer_norm", "aten::gelu", "aten::silu", "aten::_fused_rms_norm"),
    "optimizer, norm, clip": ("aten::_fused_adamw", "aten::linalg_vector_norm", "aten::mul_"),
    "gradient buffers": ("aten::fill_", "aten::zero_", "aten::add_", "aten::embedding_dense_backward"),
    "communication calls": ("c10d::", "gloo:"),
}


def category(name: str) -> str:
    """The row that an operation counts in."""
    for row, prefixes in CATEGORIES.items():
        if name.startswith(prefixes):
            return row
    return "other operations" if name.startswith("aten::") else "Python"


def profiled(step: Callable[[], object]) -> tuple[float, float, dict[str, tuple[float, int]]]:
    """Of one step: wall and main thread's milliseconds, and operation -> (milliseconds, calls)."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        wall, cpu = time.perf_counter(), time.thread_time()
        step()
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    operations = {event.key: (event.self_cpu_time_total / 1e3, event.count) for event in profiler.key_averages()}
    return 1e3 * wall, 1e3 * cpu, operations


def by_category(run: Run) -> dict[str, float]:
    """Milliseconds of one step: the whole under `wall`, then a row for each category."""
    batches = run.read(run.batch_size)
    for _ in range(WARM_UP):
        run.train(batches, run.batch_size)
    wall, cpu, operations = profiled(lambda: run.train(batches, run.batch_size))
    rows = dict.fromkeys([*CATEGORIES, "other operations"], 0.0)
    for name, (milliseconds, _) in operations.items():
        if category(name) in rows:
            rows[category(name)] += milliseconds
    rows["Python"] = max(cpu - sum(rows.values()), 0.0)
    return {"wall": wall, **rows, "waiting": max(wall - cpu, 0.0)}


def main() -> None:
    launch, device = Launch.from_environment(), torch.device("cpu")
    torch.set_num_threads(1)
    flags = [*flags_of(100, CPU_MODEL), *sys.argv[1:]]
    config = validate(parse_arguments(flags).config, launch.world_size)
    keep_freed_memory()
    start_distributed(launch, device, backend="auto", timeout_minutes=5.0)
    run = Run(config, rank=launch.rank, device=device)
    everyone = run.topology.world.gather_json(by_category(run), device)
    if launch.rank == 0:
        names = "".join(f"{f'rank {rank}':>9}" for rank in range(len(everyone)))
        print(f"{' '.join(sys.argv[1:]) or '1 rank':<24}{names}")
        for row in list(everyone[0])[1:]:
            print(f"{row:<24}" + "".join(f"{100 * rank[row] / rank['wall']:>8.1f}%" for rank in everyone))
        print(f"{'step, ms':<24}" + "".join(f"{rank['wall']:>9.0f}" for rank in everyone))
    run.close()
    stop_distributed()


if __name__ == "__main__":
    main()
