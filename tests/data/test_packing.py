"""The histogram packs exactly as best-fit decreasing does item by item."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.packing import best_fit


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """What bins hold after best-fit decreasing, by its definition."""
    held: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [i for i, load in enumerate(held) if load + length <= capacity]
        if fits:
            held[max(fits, key=lambda i: held[i])] += length
        else:
            held.append(length)
    return held


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_loads_are_those_of_best_fit_decreasing(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 40))
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=120))
    packed = best_fit(np.bincount(lengths or [0], minlength=capacity + 1) * bool(lengths), capacity)
    bins = packed.of_items()
    assert len(bins) == len(lengths)
    loads = np.bincount(bins, weights=sorted(lengths), minlength=packed.count) if lengths else np.zeros(0)
    assert sorted(loads.tolist()) == sorted(one_by_one(lengths, capacity))
    assert packed.items().tolist() == np.bincount(bins, minlength=packed.count).tolist()


def test_a_known_packing() -> None:
    counts = np.bincount([6, 5, 4, 4, 3, 2, 2, 2], minlength=11)
    packed = best_fit(counts, 10)
    assert packed.count == 3
    loads = np.bincount(packed.of_items(), weights=[2, 2, 2, 3, 4, 4, 5, 6])
    assert sorted(loads.tolist()) == [9, 9, 10]


@pytest.mark.parametrize("capacity", [1025, 8193])
def test_many_documents_are_few_groups(capacity: int) -> None:
    """The work follows the lengths that there are: a million documents more change nothing."""
    lengths = np.random.default_rng(1).geometric(1 / 400, size=20_000) % (capacity - 1) + 2
    counts = np.bincount(lengths, minlength=capacity + 1)
    few, many = best_fit(counts, capacity), best_fit(50 * counts, capacity)
    assert len(many.first) < 6 * len(np.unique(lengths))
    assert len(few.first) < 6 * len(np.unique(lengths))
    assert many.count * capacity < 1.001 * 50 * lengths.sum()
