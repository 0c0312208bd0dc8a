#!/usr/bin/env python3
"""GFLOP/s of a linear layer's three products by each kernel that a CPU has for them.

    OMP_NUM_THREADS=1 python benchmarks/cpu_products.py [--rounds N] [--shapes TOKENSxINPUTSxOUTPUTS ...] [--json FILE]

The kernels take turns in each round; medians over the rounds. As in training freed memory is kept, so that no product pays
for the system's pages. Prints a table.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megalite.kernels.implementations import IMPLEMENTATIONS, Use
from megalite.kernels.registry import backends_of, why_not
from megalite.training.cpu_memory import keep_freed_memory

SHAPES = [
    "1024x256x1024",
    "1024x1024x256",
    "1024x256x8192",
    "1024x512x2048",
    "1024x1024x4096",
    "4096x768x3072",
]
PRODUCTS = ("output", "input gradient", "weight gradient")


def kernels_of(operation: str, size: int) -> dict[str, Any]:
    """Backend -> function, of those that can serve fp32 here."""
    use = Use("cpu", torch.float32, size)
    return {
        backend: IMPLEMENTATIONS[operation][backend].load()
        for backend in backends_of(operation)
        if why_not(operation, backend, use) is None
    }


def calls(tokens: int, inputs: int, outputs: int) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(product, backend, what computes it)."""
    x, grad_y = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
    weight, main_grad = torch.randn(outputs, inputs), torch.zeros(outputs, inputs)
    for backend, matmul in kernels_of("matmul", inputs).items():
        yield "output", backend, lambda matmul=matmul: matmul(x, weight.t())
        yield "input gradient", backend, lambda matmul=matmul: matmul(grad_y, weight)
    for backend, accumulate in kernels_of("weight_grad", inputs).items():
        yield "weight gradient", backend, lambda accumulate=accumulate: accumulate(main_grad, grad_y, x)


def measure(tokens: int, inputs: int, outputs: int, *, rounds: int) -> dict[str, dict[str, float]]:
    """Product -> backend -> median FLOP/s."""
    runs = list(calls(tokens, inputs, outputs))
    seconds: dict[tuple[str, str], list[float]] = {run[:2]: [] for run in runs}
    for number in range(rounds + 2):  # the first two warm up
        for product, backend, call in runs:
            start = time.perf_counter()
            call()
            if number >= 2:
                seconds[product, backend].append(time.perf_counter() - start)
    found: dict[str, dict[str, float]] = {product: {} for product in PRODUCTS}
    for (product, backend), taken in seconds.items():
        found[product][backend] = 2 * tokens * inputs * outputs / statistics.median(taken)
    return found


def table(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    """In Markdown, GFLOP/s."""
    names = [
        (product, backend) for product in PRODUCTS for backend in sorted(next(iter(rows.values()))[product])
    ]
    lines = [
        "| tokens x inputs x outputs | "
        + " | ".join(f"{product}: {backend}" for product, backend in names)
        + " |"
    ]
    lines.append("|" + "---|" * (1 + len(names)))
    for shape, rates in rows.items():
        cells = [f"{rates[product][backend] / 1e9:.0f}" for product, backend in names]
        lines.append(f"| {shape.replace('x', ' x ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    keep_freed_memory()
    rows = {}
    for shape in arguments.shapes:
        rows[shape] = measure(*map(int, shape.split("x")), rounds=arguments.rounds)
    print(table(rows))
    if arguments.json is not None:
        about = {
            "command": f"python benchmarks/cpu_products.py --rounds {arguments.rounds}",
            "machine": platform.processor() or platform.machine(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        arguments.json.write_text(
            json.dumps({**about, "flops_per_second": rows}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
