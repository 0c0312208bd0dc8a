"""The rate of square matrix products on this machine's CPU: the limit that steps are compared with."""

import statistics
import time

import torch

from megalite.kernels.implementations import IMPLEMENTATIONS, Use
from megalite.kernels.registry import backends_of, why_not


def gemm_rates(n: int, dtype: torch.dtype, *, seconds: float) -> dict[str, float]:
    """Backend -> FLOP/s of n³ products of random numbers: medians of each kernel of `matmul` that can serve here.

    They take turns for `seconds` in all, on as many threads as torch has.
    """
    use = Use("cpu", dtype, n)
    kernels = {
        backend: IMPLEMENTATIONS["matmul"][backend].load()
        for backend in backends_of("matmul")
        if why_not("matmul", backend, use) is None
    }
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
    return {backend: statistics.median(found) for backend, found in rates.items() if found}
