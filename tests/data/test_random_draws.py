from itertools import pairwise

import numpy as np
import pytest

from megalite.data.random_draws import KeyedPermutation, permutation, raw_draws

RAW = [18287291678970418514, 5893058923237921551]
ORDER = [8, 9, 7, 3, 0, 1, 4, 2, 5, 6]
KEYED = [1, 6, 5, 8, 9, 4, 7, 2, 0, 3]
FAR = [430644627677, 787540763941, 355274753708]


def keyed(count: int, *, seed: int = 1, index: int = 0) -> list[int]:
    order = KeyedPermutation(count, seed=seed, index=index, stream=1)
    return [order(x) for x in range(count)]


def test_the_order_is_what_it_was_when_this_was_written() -> None:
    """The numbers must not change with numpy: a resumed run depends on them."""
    assert raw_draws(2, seed=1234, index=5, stream=1).tolist() == RAW
    assert permutation(10, seed=1234, index=0).tolist() == ORDER
    assert keyed(10, seed=1234) == KEYED
    far = KeyedPermutation(10**12, seed=1234, index=7, stream=1)
    assert [far(0), far(1), far(10**12 - 1)] == FAR


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000, (1 << 20) + 3])
def test_permutation_is_one(count: int) -> None:
    order = permutation(count, seed=3, index=0, dtype=np.int32)
    assert order.dtype == np.int32
    assert np.array_equal(np.sort(order), np.arange(count))


def test_every_keyed_permutation_is_one() -> None:
    for count in range(1, 301):
        for seed in range(3):
            assert sorted(keyed(count, seed=seed)) == list(range(count)), (count, seed)


def test_far_elements_of_a_large_one_are_distinct_and_in_range() -> None:
    order = KeyedPermutation(10**15 + 7, seed=1, index=0)
    seen = {order(x) for x in [*range(500), *range(10**15 - 500, 10**15)]}
    assert len(seen) == 1000 and min(seen) >= 0 and max(seen) < 10**15 + 7


def chi_square(counts: np.ndarray) -> float:
    """Of equal expectations, in standard deviations from its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


def test_positions_are_uniform_over_seeds() -> None:
    """Where each of 12 numbers lands, over 4,000 seeds."""
    counts = np.zeros((12, 12))
    for seed in range(4000):
        for x, y in enumerate(keyed(12, seed=seed)):
            counts[x, y] += 1
    # The rows and columns have equal sums: 11·11 numbers are free.
    free = 11 * 11
    expected = 4000 / 12
    assert abs(((counts - expected) ** 2 / expected).sum() - free) / (2 * free) ** 0.5 < 4.5


@pytest.mark.parametrize("count", [997, 4096, 30011])
def test_one_permutation_looks_random(count: int) -> None:
    order = np.array(keyed(count, seed=5))
    bins = 16
    both = np.zeros((bins, bins))
    np.add.at(both, (np.arange(count) * bins // count, order * bins // count), 1)
    assert abs(chi_square(both.ravel())) < 4.5
    steps = (order[1:] - order[:-1]) % count
    assert abs(chi_square(np.bincount(steps * bins // count, minlength=bins))) < 4.5
    pairs = np.zeros((bins, bins))
    np.add.at(pairs, (order[:-1] * bins // count, order[1:] * bins // count), 1)
    assert abs(chi_square(pairs.ravel())) < 4.5
    assert sum(b == a + 1 for a, b in pairwise(order.tolist())) < 10


def test_epochs_seeds_and_streams_differ() -> None:
    orders = {tuple(keyed(100, seed=seed, index=index)) for seed in range(3) for index in range(3)}
    assert len(orders) == 9
    same = np.array(keyed(1000, index=0)) == np.array(keyed(1000, index=1))
    assert same.sum() < 10
