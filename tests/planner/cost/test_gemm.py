"""The roofline of matrix products against numbers worked out by hand."""

import pytest

from megalite.planner.cost.rates import CORNER, RAMP, gemm_seconds
from megalite.planner.hardware import Cluster
from tests.planner.cost.machines import ENDLESS, cluster_with

PEAK = 1e12


def _seconds(cluster: Cluster, m: float, n: float, k: float, batch: float = 1.0) -> float:
    return float(gemm_seconds(m, n, k, batch=batch, element=2.0, peak=PEAK, cluster=cluster))


def test_the_best_tile_and_whole_waves() -> None:
    cluster = cluster_with(multiprocessors=2, gemm=0.5, memory_bandwidth=ENDLESS)
    # One tile of 256 x 128 would leave one of two multiprocessors idle; two of 128 x 128 fill both, at 95 %.
    one_wave = 2 * 128 * 128 * 2 * (1000 + RAMP) / (0.5 * PEAK) / 0.95
    assert _seconds(cluster, 256, 128, 1000) == pytest.approx(one_wave)
    # Four tiles of 256 x 128 are two full waves of the fastest kind.
    two_waves = 2 * 2 * 256 * 128 * 2 * (1000 + RAMP) / (0.5 * PEAK)
    assert _seconds(cluster, 512, 256, 1000) == pytest.approx(two_waves)
    assert _seconds(cluster, 256, 128, 1000, batch=4) == pytest.approx(two_waves)


def test_a_row_too_many_costs_a_wave_or_smaller_tiles() -> None:
    cluster = cluster_with(multiprocessors=108, memory_bandwidth=ENDLESS)
    full, more = _seconds(cluster, 108 * 256, 128, 4096), _seconds(cluster, 108 * 256 + 1, 128, 4096)
    assert more > 1.04 * full


def test_bytes_decide_where_products_are_few() -> None:
    cluster = cluster_with(multiprocessors=1, gemm=1.0, memory=0.5, memory_bandwidth=100.0)
    size = (2 * 3 + 3 * 5 + 2 * 5) * 2.0
    assert _seconds(cluster, 2, 5, 3) == pytest.approx(size / 50.0)


def test_the_corner_is_rounded() -> None:
    m = n = k = 600.0
    compute = 2 * m * n * k / PEAK
    cluster = cluster_with(multiprocessors=1, gemm=1.0, memory=1.0, memory_bandwidth=6 * m * n / compute)
    assert _seconds(cluster, m, n, k) == pytest.approx(compute * 2 ** (1 / CORNER))
