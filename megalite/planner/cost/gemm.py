"""Seconds of matrix products: a roofline whose compute side counts whole tiles and whole waves of them."""

import numpy as np

from megalite.planner.cost.workload import Number
from megalite.planner.hardware.cluster import Cluster

TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
"""Rows and columns of the output that one multiprocessor works on, and the share of the best rate it reaches with them:
smaller tiles read more for each product, and fill the last wave better. Typical of vendors' libraries; assumed."""
RAMP = 128
"""Steps along k that a tile takes to fill its pipeline and to write itself out."""

CORNER = 1.5
"""q: how sharp the roofline's corner is. Infinite if what is read and written hid behind the products in full."""


def gemm_seconds(
    m: Number, n: Number, k: Number, *, batch: Number = 1.0, element: float, peak: float, cluster: Cluster
) -> Number:
    """`batch` products [m, k] x [k, n] in one operation.

    About max(compute, memory), with memory = (mk + kn + mn)·element / bandwidth and, for the best of `TILES`,
    compute = waves · multiprocessors · tile area · 2(k + RAMP) / (peak · efficiency); waves are those of
    batch · ceil(m/rows) · ceil(n/columns) tiles on so many multiprocessors. On one multiprocessor (a CPU core) nothing
    is cut: 2mnk / (peak · efficiency).

    Args:
        element: bytes of one number.
        peak: FLOP/s at the precision (`Cluster.peak`).
    """
    rate = peak * cluster.efficiency.gemm
    count = cluster.accelerator.multiprocessors
    bandwidth = cluster.accelerator.memory_bandwidth * cluster.efficiency.memory
    memory = batch * (m * k + k * n + m * n) * element / bandwidth
    if count == 1:
        return _together(batch * 2.0 * m * n * k / rate, memory)
    compute = np.inf
    for rows, columns, share in TILES:
        waves = np.ceil(batch * np.ceil(m / rows) * np.ceil(n / columns) / count)
        seconds = waves * (count * rows * columns * 2.0 / share) * (k + RAMP) / rate
        compute = np.minimum(compute, seconds)
    return _together(compute, memory)


def _together(compute: Number, memory: Number) -> Number:
    """(compute^q + memory^q)^(1/q)."""
    most, least = np.maximum(compute, memory), np.minimum(compute, memory)
    return most * (1.0 + (least / most) ** CORNER) ** (1.0 / CORNER)
