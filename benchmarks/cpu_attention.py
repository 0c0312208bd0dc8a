#!/usr/bin/env python3
"""Milliseconds of causal attention in bf16 on a CPU: ours in blocks beside torch's fused kernel.

    OMP_NUM_THREADS=1 python benchmarks/cpu_attention.py [--rounds N] [--json FILE]

Both take turns in each round; medians over the rounds, and of the ratios within a round. As in training freed memory is kept.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megalite.kernels.attention import causal_attention
from megalite.kernels.blocked_attention import blocked_attention
from megalite.training.cpu_memory import keep_freed_memory

SHAPES = [(4, 8, 256, 32), (4, 16, 256, 64), (1, 12, 1024, 64), (1, 16, 2048, 64), (1, 16, 2048, 128)]
KERNELS = {"flash": causal_attention, "blocked": blocked_attention}


def calls(shape: tuple[int, int, int, int]) -> dict[tuple[str, str], Callable[[], object]]:
    """(kernel, what of it) -> what runs it on [batch, heads, sequence, head size]."""
    b, heads, seq, size = shape
    q, k, v, grad = (torch.randn(seq, b, heads, size).bfloat16().permute(1, 2, 0, 3) for _ in range(4))
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    runs: dict[tuple[str, str], Callable[[], object]] = {}
    for name, kernel in KERNELS.items():
        runs[name, "forward"] = lambda kernel=kernel: kernel(q, k, v)
        runs[name, "both"] = lambda kernel=kernel: torch.autograd.grad(kernel(*leaves), leaves, grad)
    return runs


def measure(shape: tuple[int, int, int, int], rounds: int) -> dict[str, Any]:
    """Milliseconds of each, and how many times as fast ours is."""
    runs = calls(shape)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for number in range(rounds + 1):  # the first one warms up
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            if number:
                seconds[key].append(time.perf_counter() - start)
    found: dict[str, Any] = {
        " x ".join(map(str, key)): 1e3 * statistics.median(taken) for key, taken in seconds.items()
    }
    for part in ("forward", "both"):
        pairs = zip(seconds["flash", part], seconds["blocked", part], strict=True)
        found[f"ratio, {part}"] = statistics.median(theirs / ours for theirs, ours in pairs)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    keep_freed_memory()
    rows = {" x ".join(map(str, shape)): measure(shape, arguments.rounds) for shape in SHAPES}
    print(
        "| batch x heads x sequence x head size | forward: flash | blocked | | forward and backward: flash | blocked | |"
    )
    print("|" + "---|" * 7)
    for shape, row in rows.items():
        cells = []
        for part in ("forward", "both"):
            cells += [f"{row[f'{name} x {part}']:.1f}" for name in KERNELS] + [f"{row[f'ratio, {part}']:.2f}"]
        print(f"| {shape} | " + " | ".join(cells) + " |")
    if arguments.json is not None:
        about = {
            "command": f"python benchmarks/cpu_attention.py --rounds {arguments.rounds}",
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        arguments.json.write_text(
            json.dumps({**about, "milliseconds": rows}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
