#!/usr/bin/env python3
"""Tokens/s and TFLOP/s of one training step in several layouts, beside this machine's own GEMM rate.

    python benchmarks/train_step.py [--output benchmarks/results/FILE.json]

On CPU: a GPT of 4 layers, hidden 256, 8 heads, sequence 256, vocabulary 8192 in fp32, micro-batch 4, global batch 16
with AdamW and clipping, on 1 rank and on dp2, tp2, pp2 (1f1b), pp2·vpp2 (interleaved) and cp2 (ring and all-to-all),
one thread a rank; the same with experts of as many FLOPs a token, on 1 rank, dp2 and ep2; and a plain PyTorch training loop of the same model on one rank and under DDP on two. Layouts take turns, round after round,
so that a busy neighbour slows all of them; medians over rounds are reported, each as a ratio to the GEMM rate
measured in the same rounds (one thread a rank).

On CUDA: GPT 1.3B (the gpt3-1.3b preset), bf16, sequence 2048, on all GPUs as data parallel ranks with the distributed
optimizer: tokens/s and MFU.
"""

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gemm import gemm_rates

ROOT = Path(__file__).resolve().parents[1]
CPU_MODEL = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "vocab_size": 8192,
    "seq_length": 256,
    "micro_batch_size": 4,
    "global_batch_size": 16,
}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 512, "moe_aux_loss_coeff": 0.01}
"""As many FLOPs a token as the dense model: two of eight experts of half its MLP's width."""
CPU_LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2 (1f1b)": {"pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "cp2 (ring)": {"cp": 2},
    "cp2 (all-to-all)": {"cp": 2, "cp_comm_type": "a2a"},
    "8 experts, 1 rank": EXPERTS,
    "8 experts, dp2": {**EXPERTS, "dp": 2},
    "8 experts, dp2 ep2": {**EXPERTS, "dp": 2, "ep": 2},
}


def gemm_rate(seconds: float = 1.0) -> float:
    """TFLOP/s of fp32 GEMMs of 1024^3 on one thread, random data, by the quickest library that torch has."""
    torch.set_num_threads(1)
    return max(gemm_rates(1024, torch.float32, seconds=seconds).values()) / 1e12


def settings(steps: int, model: dict[str, Any], layout: dict[str, Any]) -> list[str]:
    """Flags of a run on made-up tokens."""
    flags = ["--mock-data", "--train-iters", str(steps), "--lr", "1e-4", "--log-interval", "1000"]
    for name, value in {**model, **layout}.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags


def run_megalite(flags: list[str], ranks: int, skip: int) -> list[dict[str, Any]]:
    """The per-step records of one run, without the first `skip` steps."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable]
        if ranks > 1:
            launch += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command = [*launch, "pretrain_gpt.py", *flags, "--run-dir", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"][skip:]


def run_plain(ranks: int, steps: int, skip: int) -> list[dict[str, Any]]:
    """The same step written in plain PyTorch (benchmarks/plain_gpt.py), under DDP for two ranks."""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command = [*launch, "benchmarks/plain_gpt.py", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")][skip:]


def bench_cpu(rounds: int, steps: int, layouts: list[str]) -> dict[str, Any]:
    """The layouts in turn, and the plain peers."""
    skip = 2
    tokens: dict[str, list[float]] = {}
    tflops: dict[str, list[float]] = {}
    gemm = []
    for number in range(rounds):
        gemm.append(gemm_rate())
        for name in layouts:
            layout = CPU_LAYOUTS[name]
            ranks = math.prod(layout.get(axis, 1) for axis in ("tp", "cp", "dp", "pp"))
            records = run_megalite(settings(steps + skip, CPU_MODEL, layout), ranks, skip)
            tokens.setdefault(name, []).append(statistics.median(r["tokens_per_second"] for r in records))
            tflops.setdefault(name, []).append(statistics.median(r["tflops_per_rank"] for r in records))
        for name, ranks in (("plain PyTorch, 1 rank", 1), ("plain PyTorch, DDP 2", 2)):
            records = run_plain(ranks, steps + skip, skip)
            tokens.setdefault(name, []).append(statistics.median(r["tokens_per_second"] for r in records))
        print(f"round {number + 1}/{rounds} done", file=sys.stderr)
    rate = statistics.median(gemm)
    rows = []
    for name, values in tokens.items():
        row: dict[str, Any] = {"layout": name, "tokens_per_second": round(statistics.median(values))}
        if name in tflops:
            row["tflops_per_rank"] = round(statistics.median(tflops[name]), 4)
            row["of_gemm_rate"] = round(row["tflops_per_rank"] / rate, 3)
        row["rounds"] = [round(value) for value in values]
        rows.append(row)
    return {"model": CPU_MODEL, "precision": "fp32", "gemm_tflops_one_thread": round(rate, 4), "rows": rows}


def bench_cuda(steps: int) -> dict[str, Any]:
    """GPT 1.3B, bf16."""
    gpus, skip = torch.cuda.device_count(), 5
    flags = ["--preset", "gpt3-1.3b", "--bf16", "--mock-data", "--train-iters", str(steps + skip)]
    flags += ["--micro-batch-size", "4", "--global-batch-size", str(16 * gpus), "--log-interval", "1000"]
    flags += ["--dp-strategy", "distributed-optimizer"] if gpus > 1 else []
    records = run_megalite(flags, gpus, skip)
    median = {
        name: statistics.median(record[name] for record in records)
        for name in ("ms_per_step", "tokens_per_second", "tokens_per_second_per_rank", "tflops_per_rank")
    }
    mfu = records[-1]["mfu"]
    return {"model": "gpt3-1.3b", "precision": "bf16", "gpus": gpus, "mfu_palm": mfu, **median}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="times that every layout is run (5)")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of one run (8)")
    parser.add_argument("--output", type=Path, help="write the results here as JSON")
    parser.add_argument(
        "--layouts", nargs="+", choices=CPU_LAYOUTS, default=list(CPU_LAYOUTS), help="on CPU: these alone"
    )
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    result = (
        bench_cuda(arguments.steps)
        if cuda
        else bench_cpu(arguments.rounds, arguments.steps, arguments.layouts)
    )
    result = {
        "command": shlex.join(["python", "benchmarks/train_step.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        **result,
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    rows = result.pop("rows", [])
    print(json.dumps(result, indent=2))
    for row in rows:
        share = (
            f"{row['tflops_per_rank']:.4f} TFLOP/s a rank, {row['of_gemm_rate']:.0%} of GEMM"
            if "of_gemm_rate" in row
            else ""
        )
        print(f"{row['layout']:<22} {row['tokens_per_second']:>6} tokens/s  {share}")


if __name__ == "__main__":
    main()
