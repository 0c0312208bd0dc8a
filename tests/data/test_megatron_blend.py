import numpy as np
import pytest

from megalite.data import megatron_blend
from megalite.data.megatron_blend import fill_greedy


def greedy(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The rule itself, a step at a time."""
    index, ordinal = np.zeros(size, np.int16), np.zeros(size, np.int64)
    counts = [0] * len(weights)
    for k in range(size):
        errors = [weight * max(float(k), 1.0) - float(count) for weight, count in zip(weights, counts)]
        best = errors.index(max(errors))
        index[k], ordinal[k] = best, counts[best]
        counts[best] += 1
    return index, ordinal


RANDOM = np.random.RandomState(0)


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        ([1.0], 5),
        ([1.0], 3000),
        ([0.5, 0.5], 1),
        ([0.3, 0.7], 2),
        ([0.3, 0.7], 40000),
        ([1, 1, 1, 1, 1, 1, 1], 9999),
        ([3, 1, 1e-3, 7, 2, 1e-6], 30000),
        ([1, 1e-5], 30000),
        (RANDOM.random_sample(10), 30000),
        (RANDOM.random_sample(60) ** 4, 8000),
        (RANDOM.randint(1, 6, 24), 5000),
    ],
)
def test_the_greedy_choice_to_the_bit(
    weights: list[float], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several waves, and stretches so short that many guesses are wrong.
    monkeypatch.setattr(megatron_blend, "_LANES", 64)
    monkeypatch.setattr(megatron_blend, "_STEPS", 100)
    shares = np.array(weights, dtype=np.float64)
    shares /= shares.sum()
    index, ordinal = np.empty(size, np.int16), np.empty(size, np.int64)
    fill_greedy(index, ordinal, shares)
    expected_index, expected_ordinal = greedy(shares, size)
    assert np.array_equal(index, expected_index) and np.array_equal(ordinal, expected_ordinal)
