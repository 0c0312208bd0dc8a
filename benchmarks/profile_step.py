#!/usr/bin/env python3
"""Where the time of one training step goes, per rank, in any layout.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/profile_step.py --tp 2

Takes the flags of pretrain_gpt.py over the model of train_step.py. Operations are timed by torch's profiler in one
step after a warm-up; waiting is wall time during which the main thread did not run (messages, peers, other processes);
Python is what is left of the main thread's own time.
"""

import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile

from megalite.config.flags import parse_arguments
from megalite.config.validate import validate
from megalite.data.loader import BatchLoader
from megalite.data.mock_dataset import MockDataset
from megalite.optimizers.schedules import Progress, Schedules
from megalite.planner.pipeline import layout_of
from megalite.topology.topology import Launch, Topology, start_distributed, stop_distributed
from megalite.training.cpu_memory import keep_freed_memory
from megalite.training.replica import build_replica
from megalite.training.step import Stepper

MODEL = [
    "--mock-data",
    "--train-iters",
    "100",
    "--lr",
    "1e-4",
    "--num-layers",
    "4",
    "--hidden-size",
    "256",
    "--num-attention-heads",
    "8",
    "--vocab-size",
    "8192",
    "--seq-length",
    "256",
    "--micro-batch-size",
    "4",
    "--global-batch-size",
    "16",
]
WARM_UP = 4

CATEGORIES = {
    "GEMM": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise"),
    "attention": ("aten::_scaled_dot_product",),
    "log-softmax, loss": (
        "aten::_log_softmax",
        "aten::exp",
        "aten::amax",
        "aten::sub_",
        "aten::scatter_add",
        "aten::gather",
    ),
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


def main() -> None:
    """Profile one step and print a row a category, a column a rank."""
    launch, device = Launch.from_environment(), torch.device("cpu")
    torch.set_num_threads(1)
    config = validate(parse_arguments([*MODEL, *sys.argv[1:]]).config, launch.world_size)
    keep_freed_memory()
    start_distributed(launch, device, backend="auto", timeout_minutes=5.0)
    p, t = config.parallel, config.training
    assert p.dp is not None
    assert t.global_batch_size is not None
    assert config.model.vocab_size is not None
    topology = Topology.create(layout_of(config), rank=launch.rank, device=device)
    replica = build_replica(config, topology)
    stepper = Stepper(replica, Schedules(config))
    loader = BatchLoader(
        MockDataset(vocab_size=config.model.vocab_size, seq_length=t.seq_length, seed=t.seed),
        seq_length=t.seq_length,
        eod_token=None,
        eod_mask_loss=False,
        dp_rank=topology.dp.rank,
        dp_size=p.dp,
        micro_batch_size=t.micro_batch_size,
    )
    batch = loader.load(0, t.global_batch_size) if replica.reads_data else []

    def step(index: int) -> None:
        stepper.step(batch, before=Progress(index, 0), batch_size=t.global_batch_size or 0)

    for index in range(WARM_UP):
        step(index)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        wall, cpu = time.perf_counter(), time.thread_time()
        step(WARM_UP)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    rows = dict.fromkeys([*CATEGORIES, "other operations"], 0.0)
    for event in profiler.key_averages():
        row = category(event.key)
        if row in rows:
            rows[row] += event.self_cpu_time_total / 1e6
    rows["Python"] = max(cpu - sum(rows.values()), 0.0)
    rows["waiting"] = max(wall - cpu, 0.0)
    everyone = topology.world.gather_json({"wall": wall, **rows}, device)
    if launch.rank == 0:
        print(
            f"{' '.join(sys.argv[1:]) or '1 rank':<24}"
            + "".join(f"{f'rank {r}':>9}" for r in range(len(everyone)))
        )
        for row in rows:
            print(f"{row:<24}" + "".join(f"{100 * rank[row] / rank['wall']:>8.1f}%" for rank in everyone))
        print(f"{'step, ms':<24}" + "".join(f"{1e3 * rank['wall']:>9.0f}" for rank in everyone))
    stop_distributed()


if __name__ == "__main__":
    main()
