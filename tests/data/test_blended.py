import math
from fractions import Fraction

import numpy as np
import pytest

from megalite.config.errors import ConfigError
from megalite.data.blended import BLOCK, MAX_PERIOD, BlendedDataset, exact_shares
from megalite.data.dataset import Packing
from megalite.data.index_cache import Kept


class Numbered:
    """Sample k is [name, k]."""

    def __init__(self, name: int) -> None:
        self.name = name

    def sample(self, k: int) -> np.ndarray:
        return np.array([self.name, k])

    def packing(self, k: int) -> Packing | None:
        return Packing(starts=(0, k + 1), used=self.name)


class Prepared(Numbered):
    """Records its calls of `prepare`."""

    asked: tuple[int, int] | None = None

    def prepare(self, first: int, stop: int, *, epochs: int | None = None) -> list[Kept | None]:
        self.asked = (first, stop)
        return [None] * (epochs or 0)


def blend(weights: list[float]) -> BlendedDataset:
    return BlendedDataset([Numbered(i) for i in range(len(weights))], weights)


@pytest.mark.parametrize(
    ("weights", "quotas"),
    [
        ([0.3, 0.7], [3, 7]),
        ([1, 2, 5], [1, 2, 5]),
        ([1 / 3, 1 / 3, 1 / 3], [1, 1, 1]),
        ([0.1] * 10, [1] * 10),
        ([5.0], [1]),
        ([0.123, 0.877], [123, 877]),
    ],
)
def test_weights_with_a_common_denominator(weights: list[float], quotas: list[int]) -> None:
    shares = exact_shares(weights)
    assert shares == [Fraction(quota, sum(quotas)) for quota in quotas]
    assert blend(weights).period == sum(quotas)


UNLIKE = [3**0.5, 2.0, 0.7, 1e-5]


def test_weights_without_a_small_denominator_converge() -> None:
    mixed = blend(UNLIKE)
    assert mixed.period > MAX_PERIOD
    counts, worst = [0] * 4, 0.0
    for k in range(3 * BLOCK):
        dataset, index = mixed.locate(k)
        assert index == counts[dataset]  # in order, without gaps, also across blocks
        counts[dataset] += 1
        if k % 101 == 0:
            assert mixed.counts(k + 1) == counts
            off = [abs(count - share * (k + 1)) for count, share in zip(counts, mixed.shares, strict=True)]
            worst = max(worst, float(max(off)))
    assert worst < 2
    for k in (10**9, 10**12, 10**15 + 12345):
        counts = mixed.counts(k)
        assert sum(counts) == k
        assert max(abs(c - share * k) for c, share in zip(counts, mixed.shares, strict=True)) < 4


def test_start_of_each_block_is_found() -> None:
    """With many datasets rounding lets blocks begin well before multiples of their size."""
    mixed = blend([math.sqrt(i + 2) for i in range(100)])
    for number in (1, 7):
        start = sum(mixed._counts_before(number))
        assert number * BLOCK - 100 < start < number * BLOCK
        for k in (start - 1, start, number * BLOCK - 1, number * BLOCK):
            fresh = blend([math.sqrt(i + 2) for i in range(100)])
            dataset, index = fresh.locate(k)
            assert mixed.counts(k)[dataset] == index == mixed.locate(k)[1]
            assert sum(mixed.counts(k)) == k


def test_parts_prepare_their_samples() -> None:
    parts = [Prepared(0), Numbered(1), Prepared(2)]
    mixed = BlendedDataset(parts, [0.5, 0.2, 0.3])
    assert mixed.prepare(100, 205, epochs=3) == [None] * 6
    read: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for k in range(100, 205):
        dataset, index = mixed.locate(k)
        read[dataset].append(index)
    for number in (0, 2):
        part = parts[number]
        assert isinstance(part, Prepared)
        assert part.asked == (read[number][0], read[number][-1] + 1)


@pytest.mark.parametrize(
    "weights", [[0.3, 0.7], [1, 2, 5], [0.2, 0.2], [50, *[1] * 50], [997, 500, 499, 3, 1], [1] * 9, [333, 333, 333, 1]]
)
def test_counts_differ_by_less_than_one(weights: list[float]) -> None:
    mixed = blend(weights)
    period = mixed.period
    steps = np.arange(1, 2 * period + 1)
    chosen = np.array([mixed.locate(k)[0] for k in range(2 * period)])
    for i, weight in enumerate(weights):
        ideal = steps * (weight / sum(weights))
        off = np.cumsum(chosen == i) - ideal
        assert np.abs(off).max() < 1
        assert abs(off[period - 1]) < 1e-6 and abs(off[-1]) < 1e-6


def test_each_dataset_is_read_in_order_without_gaps() -> None:
    mixed = blend([0.3, 0.5, 0.2])
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for k in range(1000):
        name, number = mixed.sample(k).tolist()
        seen[name].append(number)
    assert {name: len(numbers) for name, numbers in seen.items()} == {0: 300, 1: 500, 2: 200}
    assert all(numbers == list(range(len(numbers))) for numbers in seen.values())


def test_late_samples_are_pure_functions() -> None:
    mixed = blend([0.3, 0.7])
    assert mixed.locate(10**10) == blend([0.3, 0.7]).locate(10**10)
    assert mixed.locate(10**10)[1] == {0: 3, 1: 7}[mixed.locate(10**10)[0]] * 10**9
    with pytest.raises(IndexError, match="sample -1"):
        mixed.sample(-1)


@pytest.mark.parametrize("weights", [[1, 0], [1, -1], [float("nan"), 1], [1, float("inf")], [1, 1e-400]], ids=str)
def test_bad_weights_are_errors(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        blend(weights)
