"""Windows, repeats and medians on a simulated clock."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from megalite.profiling.timing import FEWEST, MOST, Timer, fit_times, timing_of
from megalite.topology.group import Group


class Clock:
    """A clock that advances only during operations."""

    def __init__(self) -> None:
        self.now, self.runs = 0.0, 0

    def __call__(self) -> float:
        return self.now

    def takes(self, *seconds: float) -> Callable[[], None]:
        """Return an operation with these durations, in turn."""
        turns = itertools.cycle(seconds)

        def run() -> None:
            self.runs += 1
            self.now += next(turns)

        return run


def timer(clock: Clock, *, crowded: bool = False) -> Timer:
    return Timer(torch.device("cpu"), Group.solo("world"), crowded=crowded, clock=clock)


def test_median_and_spread() -> None:
    timing = timing_of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (timing.seconds, timing.samples) == (3.0, 5)
    assert timing.spread == pytest.approx((4.0 - 2.0) / 3.0)


@pytest.mark.parametrize("way", ["each", "together"])
def test_number_of_samples_in_a_window(way: str) -> None:
    clock = Clock()
    timing = getattr(timer(clock), way)(clock.takes(0.01), seconds=1.0)
    assert timing.seconds == pytest.approx(0.01)
    assert 99 <= timing.samples <= 101
    clock = Clock()
    timing = getattr(timer(clock), way)(clock.takes(5.0), seconds=1.0)
    assert (timing.seconds, timing.samples) == (5.0, FEWEST)
    assert clock.now == 5.0 * (FEWEST + 2)


def test_short_operations_are_repeated_within_a_sample() -> None:
    clock = Clock()
    timing = timer(clock).each(clock.takes(1e-6), seconds=1.0)
    assert timing.seconds == pytest.approx(1e-6)
    assert timing.samples == MOST
    # 0.5 ms per sample.
    assert clock.now >= MOST * 4e-4


def test_samples_on_shared_cores_are_longer_than_a_time_slice() -> None:
    """Short samples of one rank that runs 3 ms of every 12 ms look fast; the mean over many time slices is right."""
    turn = [1e-3] * 3 + [1e-3 + 9e-3]
    clock = Clock()
    assert timer(clock).each(clock.takes(*turn), seconds=2.0).seconds == pytest.approx(1e-3)
    clock = Clock()
    assert timer(clock, crowded=True).each(clock.takes(*turn), seconds=2.0).seconds > 2e-3


def test_one_fast_run_does_not_decide_the_repeats() -> None:
    """A first run that looks a thousand times too short does not make samples a thousand times too long."""
    clock = Clock()
    slow = clock.takes(1e-3)

    def run() -> None:
        if clock.runs == 1:
            clock.runs += 1
            clock.now += 1e-6
        else:
            slow()

    timer(clock).each(run, seconds=0.0)
    assert clock.now < 0.1


@pytest.mark.parametrize("crowded", [False, True])
def test_product_before_each_run_on_shared_cores_is_subtracted(crowded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    products = []

    def product(*_: torch.Tensor, out: torch.Tensor) -> None:
        products.append(clock.now)
        clock.now += 0.001

    monkeypatch.setattr(torch, "mm", product)
    timing = timer(clock, crowded=crowded).between_computations(clock.takes(0.004), seconds=1.0)
    assert timing.seconds == pytest.approx(0.004)
    assert (len(products) > 10 * clock.runs) if crowded else not products


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
    """Times deviate only at the large end: with absolute errors the fitted latency would be negative."""
    seconds = [1e-5 + 1e-9 * size * (1.2 if size > 1e7 else 1.0) for size in SIZES]
    assert fit_times([ONES, SIZES], seconds)[0][0] == pytest.approx(1e-5, rel=0.1)


def test_fit_of_three_constants() -> None:
    steps = [2.0, 6.0, 1.0] * 3
    moved = [size if index % 3 < 2 else 0.0 for index, size in enumerate(SIZES)]
    sent = [size if index % 3 == 2 else 0.0 for index, size in enumerate(SIZES)]
    seconds = [1e-5 * a + 2e-9 * b + 5e-10 * c for a, b, c in zip(steps, moved, sent)]
    assert fit_times([steps, moved, sent], seconds)[0] == pytest.approx((1e-5, 2e-9, 5e-10), rel=1e-9)


def test_fitted_constants_are_not_negative() -> None:
    """Times that grow faster than the bytes suggest a negative latency, slower ones a negative slope."""
    alpha, beta = fit_times([ONES, SIZES], [1e-9 * size**1.1 for size in SIZES])[0]
    assert alpha == 0.0 < beta
    alpha, beta = fit_times([ONES, SIZES], [1e-3 / size**0.1 for size in SIZES])[0]
    assert beta == 0.0 < alpha
