"""Splits, random draws and mock data."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megalite.config.data import parse_split
from megalite.config.errors import ConfigError
from megalite.data.blended import BlendedDataset
from megalite.data.dataset import (
    GPTDataset,
    KeyedPermutation,
    MockDataset,
    SampleSource,
    permutation,
    raw_draws,
    split_documents,
)
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.packed_dataset import PackedDataset
from tests.data.token_files import write_by_layout


def test_splits_equal_megatron() -> None:
    assert split_documents("969,30,1", 1000) == (range(969), range(969, 999), range(999, 1000))
    # round(0.5 · 5) = 2 and round(0.75 · 5) = 4: halves are rounded to even, as Python does.
    assert split_documents("2,1,1", 5) == (range(2), range(2, 4), range(4, 5))
    assert split_documents("100,0,0", 7) == (range(7), range(7, 7), range(7, 7))


@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "0.9,0.05,0.05", "98,2", "98/2/0", "1"])
def test_splits_cover_all_documents(split: str) -> None:
    for documents in (0, 1, 7, 12345):
        assert [i for part in split_documents(split, documents) for i in part] == list(range(documents))


def test_shares_of_a_split() -> None:
    assert parse_split("98,2") == parse_split("'98,2'") == (0.98, 0.02, 0.0)
    assert parse_split(" 3, 1 ,0") == (0.75, 0.25, 0.0)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("969;30;1", "'969;30;1' is not a list of numbers; give up to three"),
        ("", "'' is not a list of numbers"),
        ("1,,1", "is not a list of numbers"),
        ("1,1,1,1", "has 4 numbers"),
        ("1,-1,1", "at least 0"),
        ("0,0,0", "not all of them 0"),
        ("nan,1,1", "at least 0"),
        ("inf,1,1", "at least 0"),
    ],
)
def test_bad_splits_are_errors(split: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_split(split)


RAW = [18287291678970418514, 5893058923237921551]
ORDER = [8, 9, 7, 3, 0, 1, 4, 2, 5, 6]
KEYED = [1, 6, 5, 8, 9, 4, 7, 2, 0, 3]
FAR = [430644627677, 787540763941, 355274753708]


def keyed(count: int, *, seed: int = 1, index: int = 0) -> list[int]:
    order = KeyedPermutation(count, seed=seed, index=index, stream=1)
    return [order(x) for x in range(count)]


def test_order_is_unchanged() -> None:
    """The numbers must not change with numpy, as resumed runs depend on them."""
    assert raw_draws(2, seed=1234, index=5, stream=1).tolist() == RAW
    assert permutation(10, seed=1234, index=0).tolist() == ORDER
    assert keyed(10, seed=1234) == KEYED
    far = KeyedPermutation(10**12, seed=1234, index=7, stream=1)
    assert [far(0), far(1), far(10**12 - 1)] == FAR


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000, (1 << 20) + 3])
def test_permutation_is_a_bijection(count: int) -> None:
    order = permutation(count, seed=3, index=0, dtype=np.int32)
    assert order.dtype == np.int32
    assert np.array_equal(np.sort(order), np.arange(count))


def test_every_keyed_permutation_is_a_bijection() -> None:
    for count in range(1, 301):
        assert sorted(keyed(count, seed=count % 3)) == list(range(count)), count


def chi_square(counts: np.ndarray) -> float:
    """Chi-square statistic for equal expectations, in standard deviations from its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


def test_positions_are_uniform_over_seeds() -> None:
    """Positions of each of 12 numbers over 4,000 seeds."""
    counts = np.zeros((12, 12))
    for seed in range(4000):
        for x, y in enumerate(keyed(12, seed=seed)):
            counts[x, y] += 1
    # Rows and columns have equal sums: 11·11 numbers are free.
    free = 11 * 11
    expected = 4000 / 12
    assert abs(((counts - expected) ** 2 / expected).sum() - free) / (2 * free) ** 0.5 < 4.5


@pytest.mark.parametrize("count", [997, 4096, 30011])
def test_one_permutation_is_statistically_random(count: int) -> None:
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


def test_samples_are_pure_functions_within_the_vocabulary() -> None:
    settings = {"vocab_size": 101, "seq_length": 64, "seed": 3}
    samples = [MockDataset(**settings).sample(k) for k in range(50)]
    assert all(sample.shape == (65,) and sample.dtype == np.int64 for sample in samples)
    assert min(s.min() for s in samples) >= 0 and max(s.max() for s in samples) < 101
    assert all(np.array_equal(MockDataset(**settings).sample(k), samples[k]) for k in (49, 0, 7))
    others = [MockDataset(**settings | other).sample(0) for other in ({"seed": 4}, {"split": 1})]
    assert len({sample.tobytes() for sample in [*samples, *others]}) == 52


def test_mock_tokens_are_mostly_predictable() -> None:
    dataset = MockDataset(vocab_size=1000, seq_length=2000, seed=1)
    sample = dataset.sample(5)
    share = np.mean((sample[1:] - sample[:-1]) % 1000 == 17)
    assert 0.84 < share < 0.91


def test_negative_samples_are_refused(tmp_path: Path) -> None:
    write_by_layout(tmp_path / "d", [[1] * 20] * 3)
    settings = {"documents": range(3), "seq_length": 4, "seed": 1, "name": "train"}
    indexed = IndexedDataset(tmp_path / "d")
    datasets: list[SampleSource] = [kind(indexed, **settings) for kind in (GPTDataset, PackedDataset)]  # type: ignore[arg-type]
    datasets.append(BlendedDataset(datasets, [1, 2]))
    for dataset in [*datasets, MockDataset(vocab_size=10, seq_length=4, seed=1)]:
        with pytest.raises(IndexError, match="sample -1"):
            dataset.sample(-1)
