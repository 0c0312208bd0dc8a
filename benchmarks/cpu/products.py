"""GFLOP/s of a linear layer's three products by each kernel that supports them on a CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu.products [--rounds N] [--shapes TOKENSxINPUTSxOUTPUTS ...] [--json FILE]

The kernels run in turn in each round; medians over the rounds. Freed memory is kept, as in training, so that no product
includes page faults."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import common
from megalite.kernels.registry import IMPLEMENTATIONS, KernelUse, backends_of, why_not
from megalite.training.memory import keep_freed_memory


def kernels_of(operation: str, dtype: torch.dtype, size: int) -> dict[str, Any]:
    """Backend -> function, for those available here."""
    use = KernelUse("cpu", dtype, size)
    return {
        backend: IMPLEMENTATIONS[operation][backend].load()
        for backend in backends_of(operation)
        if why_not(operation, backend, use) is None
    }


def gemm_rate(n: int = 1024, dtype: torch.dtype = torch.float32, *, seconds: float, threads: int = 1) -> float:
    """FLOP/s of n³ products of random numbers by torch's fastest library: the kernels of `matmul` run in turn for `seconds`
    in total."""
    torch.set_num_threads(threads)
    kernels = kernels_of("matmul", dtype, n)
    a, b = (torch.randn(n, n, dtype=dtype) for _ in range(2))
    for kernel in kernels.values():
        kernel(a, b)
    rates: dict[str, list[float]] = {backend: [] for backend in kernels}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for backend, kernel in kernels.items():
            start = time.perf_counter()
            kernel(a, b)
            rates[backend].append(2 * n**3 / (time.perf_counter() - start))
    return max(statistics.median(found) for found in rates.values() if found)


SHAPES = "1024x256x1024 1024x1024x256 1024x256x8192 1024x512x2048 1024x1024x4096 4096x768x3072"


def calls(tokens: int, inputs: int, outputs: int) -> dict[str, Callable[[], object]]:
    """`product: backend` -> function that computes it."""
    x, grad_y = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
    weight, main_grad = torch.randn(outputs, inputs), torch.zeros(outputs, inputs)
    found: dict[str, Callable[[], object]] = {}
    products = kernels_of("matmul", torch.float32, inputs)
    for backend, matmul in sorted(products.items()):
        found[f"output: {backend}"] = lambda matmul=matmul: matmul(x, weight.t())
    for backend, matmul in sorted(products.items()):
        found[f"input gradient: {backend}"] = lambda matmul=matmul: matmul(grad_y, weight)
    for backend, add in sorted(kernels_of("weight_grad", torch.float32, inputs).items()):
        found[f"weight gradient: {backend}"] = lambda add=add: add(main_grad, grad_y, x)
    return found


def measure(shape: str, *, rounds: int) -> dict[str, float]:
    """`product: backend` -> median FLOP/s."""
    tokens, inputs, outputs = map(int, shape.split("x"))
    seconds = common.take_turns(calls(tokens, inputs, outputs), rounds=rounds, warm_up=2)
    return {name: 2 * tokens * inputs * outputs / statistics.median(taken) for name, taken in seconds.items()}


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shapes", nargs="+", default=SHAPES.split())
    arguments = parser.parse_args(words)
    keep_freed_memory()
    rows = {shape: measure(shape, rounds=arguments.rounds) for shape in arguments.shapes}
    table = [["tokens x inputs x outputs", *next(iter(rows.values()))]]
    for shape, rates in rows.items():
        table.append([shape.replace("x", " x "), *(f"{rate / 1e9:.0f}" for rate in rates.values())])
    print(common.markdown(table))
    common.write_json(arguments.json, "cpu.products", words, {"flops_per_second": rows})


if __name__ == "__main__":
    main()
