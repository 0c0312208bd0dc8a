"""Tokens/s and TFLOP/s of one training step in several layouts, beside this machine's own GEMM rate.

    python -m benchmarks.steps.run [--rounds N] [--steps N] [--layouts NAME ...] [--json FILE]

A GPT of 4 layers, hidden 256, 8 heads, sequence 256, vocabulary 8192 in fp32, micro-batch 4, global batch 16
with AdamW and clipping, on 1 rank and on dp2, tp2, pp2 (1f1b), pp2·vpp2 (interleaved) and cp2 (ring and all-to-all),
one thread per rank; the same with experts of as many FLOPs per token, on 1 rank, dp2 and ep2; and a plain PyTorch training
loop of the same model on one rank and under DDP on two. Layouts take turns, round after round, so that a busy neighbour
slows all of them; medians over rounds are reported, each as a ratio to the GEMM rate measured in the same rounds (one
thread per rank).
"""

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.cpu.products import gemm_rate

SIZES = "num_layers=4 hidden_size=256 num_attention_heads=8 vocab_size=8192 seq_length=256"
CPU_MODEL = common.settings(f"{SIZES} micro_batch_size=4 global_batch_size=16")
EXPERTS = "num_experts=8 moe_router_topk=2 moe_ffn_hidden_size=512 moe_aux_loss_coeff=0.01"
"""As many FLOPs per token as the dense model: two of eight experts of half its MLP's width."""
CPU_LAYOUTS = {"1 rank": "", "dp2": "dp=2", "tp2": "tp=2", "pp2 (1f1b)": "pp=2", "pp2 vpp2": "pp=2 vpp=2"}
CPU_LAYOUTS |= {"cp2 (ring)": "cp=2", "cp2 (all-to-all)": "cp=2 cp_comm_type=a2a", "8 experts, 1 rank": EXPERTS}
CPU_LAYOUTS |= {"8 experts, dp2": f"{EXPERTS} dp=2", "8 experts, dp2 ep2": f"{EXPERTS} dp=2 ep=2"}
PLAIN = {"plain PyTorch, 1 rank": 1, "plain PyTorch, DDP 2": 2}
SKIP = 2  # steps that are not counted


def flags_of(steps: int, values: dict[str, Any]) -> list[str]:
    flags = ["--mock-data", "--train-iters", str(steps), "--lr", "1e-4", "--log-interval", "1000"]
    for name, value in values.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags


def run_megalite(flags: list[str], ranks: int) -> list[dict[str, Any]]:
    """The per-step records of one run, without the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        common.run_python("pretrain_gpt.py", *flags, "--run-dir", folder, ranks=ranks)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"][SKIP:]


def run_plain(ranks: int, steps: int) -> list[dict[str, Any]]:
    """The same step written in plain PyTorch, under DDP for two ranks."""
    printed = common.run_python("-m", "benchmarks.peers.plain_gpt", str(steps + SKIP), ranks=ranks)
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")][SKIP:]


def bench_cpu(rounds: int, steps: int, layouts: list[str]) -> dict[str, Any]:
    """The layouts in turn, and the plain peers."""
    tokens: dict[str, list[float]] = {name: [] for name in (*layouts, *PLAIN)}
    tflops: dict[str, list[float]] = {name: [] for name in layouts}
    gemm = []
    for number, turns in enumerate(common.shuffled(list(tokens), rounds)):
        gemm.append(gemm_rate(seconds=1.0) / 1e12)
        for name in turns:
            if name in PLAIN:
                records = run_plain(PLAIN[name], steps)
            else:
                layout = common.settings(CPU_LAYOUTS[name])
                ranks = math.prod(layout.get(axis, 1) for axis in ("tp", "cp", "dp", "pp"))
                records = run_megalite(flags_of(steps + SKIP, {**CPU_MODEL, **layout}), ranks)
                tflops[name].append(statistics.median(r["tflops_per_rank"] for r in records))
            tokens[name].append(statistics.median(r["tokens_per_second"] for r in records))
        print(f"round {number + 1}/{rounds} done", file=sys.stderr)
    rate = statistics.median(gemm)
    rows = []
    for name, values in tokens.items():
        row: dict[str, Any] = {"layout": name, "tokens_per_second": round(statistics.median(values))}
        if name in tflops:
            row["tflops_per_rank"] = round(statistics.median(tflops[name]), 4)
            row["of_gemm_rate"] = round(row["tflops_per_rank"] / rate, 3)
        rows.append({**row, "rounds": [round(value) for value in values]})
    return {"model": CPU_MODEL, "precision": "fp32", "gemm_tflops_one_thread": round(rate, 4), "rows": rows}


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="times that every layout is run (5)")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of one run (8)")
    parser.add_argument("--layouts", nargs="+", choices=CPU_LAYOUTS, default=list(CPU_LAYOUTS), metavar="NAME")
    arguments = parser.parse_args(words)
    result = bench_cpu(arguments.rounds, arguments.steps, arguments.layouts)
    common.write_json(arguments.json, "steps.run", words, result)
    rows = result.pop("rows", [])
    print(json.dumps(result, indent=2))
    for row in rows:
        share = ""
        if "of_gemm_rate" in row:
            share = f"{row['tflops_per_rank']:.4f} TFLOP/s per rank, {row['of_gemm_rate']:.0%} of GEMM"
        print(f"{row['layout']:<22} {row['tokens_per_second']:>6} tokens/s  {share}")


if __name__ == "__main__":
    main()
