"""Milliseconds of causal attention in bf16 on a CPU: megalite's blocked kernel compared with torch's fused kernel.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu.attention [--rounds N] [--json FILE]

Both run in turn in each round; medians over the rounds, and of the ratios within a round. Freed memory is kept, as in training.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import common
from megalite.kernels.attention import causal_attention
from megalite.kernels.attention_backends import blocked_attention
from megalite.training.memory import keep_freed_memory

SHAPES = ["4x8x256x32", "4x16x256x64", "1x12x1024x64", "1x16x2048x64", "1x16x2048x128"]
KERNELS = {"flash": causal_attention, "blocked": blocked_attention}
PARTS = ("forward", "both")


def calls(b: int, heads: int, seq: int, size: int) -> dict[tuple[str, str], Callable[[], object]]:
    """(kernel, pass) -> function that runs it on [b, heads, seq, size]."""
    q, k, v, grad = (torch.randn(seq, b, heads, size).bfloat16().permute(1, 2, 0, 3) for _ in range(4))
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    runs: dict[tuple[str, str], Callable[[], object]] = {}
    for name, kernel in KERNELS.items():
        runs[name, "forward"] = lambda kernel=kernel: kernel(q, k, v)
        runs[name, "both"] = lambda kernel=kernel: torch.autograd.grad(kernel(*leaves), leaves, grad)
    return runs


def measure(shape: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of each, and the speedup of megalite's."""
    seconds = common.take_turns(calls(*map(int, shape.split("x"))), rounds=rounds)
    found = {" x ".join(key): 1e3 * statistics.median(taken) for key, taken in seconds.items()}
    ratios = {f"ratio, {part}": common.ratio(seconds["flash", part], seconds["blocked", part]) for part in PARTS}
    return {**found, **ratios}


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="batch x heads x sequence x head size")
    arguments = parser.parse_args(words)
    keep_freed_memory()
    rows = {shape.replace("x", " x "): measure(shape, arguments.rounds) for shape in arguments.shapes}
    table = [["batch x heads x sequence x head size", "forward: flash", "blocked", ""]]
    table[0] += ["forward and backward: flash", "blocked", ""]
    for shape, row in rows.items():
        table.append([shape])
        for part in PARTS:
            table[-1] += [f"{row[f'{name} x {part}']:.1f}" for name in KERNELS] + [f"{row[f'ratio, {part}']:.2f}"]
    print(common.markdown(table))
    common.write_json(arguments.json, "cpu.attention", words, {"milliseconds": rows})


if __name__ == "__main__":
    main()
