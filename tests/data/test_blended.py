import numpy as np
import pytest

from megalite.config.errors import ConfigError
from megalite.data.blended import MAX_PERIOD, BlendedDataset, apportion


class Numbered:
    """Sample k is [name, k]."""

    def __init__(self, name: int) -> None:
        self.name = name

    def sample(self, k: int) -> np.ndarray:
        return np.array([self.name, k])


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
def test_common_denominators_are_found(weights: list[float], quotas: list[int]) -> None:
    assert apportion(weights) == quotas


@pytest.mark.parametrize(
    "weights", [[3**0.5, 2.0, 0.7], [1.0, 1e-5], [0.31830988618, 0.2718281828, 1, 7, 1e-4]]
)
def test_other_weights_are_close(weights: list[float]) -> None:
    quotas = apportion(weights)
    shares = np.array(weights) / sum(weights)
    assert sum(quotas) <= MAX_PERIOD
    assert np.abs(np.array(quotas) / sum(quotas) - shares).max() < 1 / MAX_PERIOD


def test_very_many_datasets_are_close() -> None:
    weights = (np.arange(300) % 7 + 0.01 * np.sqrt(np.arange(300)) + 0.1).tolist()
    quotas = apportion(weights)
    assert sum(quotas) <= MAX_PERIOD and min(quotas) >= 1
    assert np.abs(np.array(quotas) / sum(quotas) - np.array(weights) / sum(weights)).max() <= 1 / MAX_PERIOD


@pytest.mark.parametrize(
    "weights", [[0.3, 0.7], [1, 2, 5], [50, *[1] * 50], [997, 500, 499, 3, 1], [1] * 9, [333, 333, 333, 1]]
)
def test_counts_are_never_off_by_one(weights: list[float]) -> None:
    mixed = blend(weights)
    period = sum(mixed.quotas)
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


def test_sample_is_a_pure_function_far_out() -> None:
    mixed = blend([0.3, 0.7])
    assert mixed.locate(10**10) == blend([0.3, 0.7]).locate(10**10)
    assert mixed.locate(10**10)[1] == {0: 3, 1: 7}[mixed.locate(10**10)[0]] * 10**9
    with pytest.raises(IndexError, match="sample -1"):
        mixed.sample(-1)


def test_equal_weights_take_turns() -> None:
    assert [blend([1, 1, 1]).locate(k)[0] for k in range(6)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 0], "above 0"),
        ([1, -1], "above 0"),
        ([float("nan"), 1], "above 0"),
        ([1, 1e-7], "below the smallest share"),
    ],
)
def test_bad_weights(weights: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        blend(weights)
