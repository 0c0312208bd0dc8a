"""Constants behind times that were made from known ones."""

import numpy as np
import pytest

from megalite.profiling.timing import fit_times

SIZES = [float(1 << power) for power in range(10, 27, 2)]
ONES = [1.0] * len(SIZES)
ALPHA, BETA = 2.5e-5, 3e-10


def test_latency_and_bandwidth_are_recovered() -> None:
    constants, error = fit_times([ONES, SIZES], [ALPHA + BETA * size for size in SIZES])
    assert constants == pytest.approx((ALPHA, BETA), rel=1e-9)
    assert error < 1e-9
    noise = 1 + 0.05 * np.random.default_rng(1).standard_normal(len(SIZES))
    constants, error = fit_times([ONES, SIZES], [(ALPHA + BETA * size) * n for size, n in zip(SIZES, noise)])
    assert constants == pytest.approx((ALPHA, BETA), rel=0.1)
    assert 0.0 < error < 0.1


def test_small_messages_count_as_much_as_large_ones() -> None:
    """Times off the line at the large end only: by absolute errors the latency would be lost, and be negative."""
    seconds = [1e-5 + 1e-9 * size * (1.2 if size > 1e7 else 1.0) for size in SIZES]
    assert fit_times([ONES, SIZES], seconds)[0][0] == pytest.approx(1e-5, rel=0.1)


def test_three_constants() -> None:
    steps = [2.0, 6.0, 1.0] * 3
    moved = [size if index % 3 < 2 else 0.0 for index, size in enumerate(SIZES)]
    sent = [size if index % 3 == 2 else 0.0 for index, size in enumerate(SIZES)]
    seconds = [1e-5 * a + 2e-9 * b + 5e-10 * c for a, b, c in zip(steps, moved, sent)]
    assert fit_times([steps, moved, sent], seconds)[0] == pytest.approx((1e-5, 2e-9, 5e-10), rel=1e-9)


def test_no_constant_is_negative() -> None:
    """Times that grow faster than the bytes ask for a negative latency, slower for a negative slope."""
    alpha, beta = fit_times([ONES, SIZES], [1e-9 * size**1.1 for size in SIZES])[0]
    assert alpha == 0.0 < beta
    alpha, beta = fit_times([ONES, SIZES], [1e-3 / size**0.1 for size in SIZES])[0]
    assert beta == 0.0 < alpha
