"""Samples of whole documents: every token is predicted once per epoch, and documents that fit are not split."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.errors import ConfigError
from megalite.data.dataset import Packing
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.packed_dataset import PackedDataset, best_fit
from tests.data.token_files import distinct_documents, write_by_layout

LENGTHS = [5, 1, 17, 3, 40, 2, 2, 9, 30, 8, 0, 10, 1, 18]
PAD = 999


@pytest.fixture
def indexed(tmp_path: Path) -> IndexedDataset:
    write_by_layout(tmp_path / "d", distinct_documents([length for length in LENGTHS if length]))
    return IndexedDataset(tmp_path / "d")


def make(
    indexed: IndexedDataset, *, seq_length: int = 9, seed: int = 1, documents: range | None = None
) -> PackedDataset:
    return PackedDataset(
        indexed,
        documents=range(len(indexed)) if documents is None else documents,
        seq_length=seq_length,
        seed=seed,
        name="train",
        pad_token=PAD,
    )


def pieces(dataset: PackedDataset, k: int) -> list[list[int]]:
    """Pieces of documents in a sample, by its packing."""
    sample, packing = dataset.sample(k).tolist(), dataset.packing(k)
    ends = [*packing.starts[1:], packing.used + 1]
    assert sample[packing.used + 1 :] == [PAD] * (dataset.seq_length - packing.used)
    return [sample[start:end] for start, end in zip(packing.starts, ends, strict=True)]


@pytest.mark.parametrize("seq_length", [1, 2, 7, 8, 9, 16, 17, 39, 64])
def test_epoch_predicts_every_token_except_first_ones_once(indexed: IndexedDataset, seq_length: int) -> None:
    dataset = make(indexed, seq_length=seq_length)
    starts = set(np.cumsum([0, *LENGTHS]).tolist())
    for epoch in range(2):
        first = epoch * dataset.samples_per_epoch
        predicted: Counter[int] = Counter()
        for k in range(first, first + dataset.samples_per_epoch):
            assert dataset.sample(k).shape == (seq_length + 1,)
            for piece in pieces(dataset, k):
                assert len(piece) >= 2
                assert piece == list(range(piece[0], piece[0] + len(piece)))
                predicted.update(piece[1:])
        assert predicted == Counter(set(range(sum(LENGTHS))) - starts)


def test_documents_that_fit_are_not_split(indexed: IndexedDataset) -> None:
    dataset = make(indexed, seq_length=9)
    starts = np.cumsum([0, *LENGTHS])
    whole = {int(start): length for start, length in zip(starts, LENGTHS, strict=False) if 2 <= length <= 10}
    found = {}
    for k in range(dataset.samples_per_epoch):
        held = pieces(dataset, k)
        for piece in held:
            document = int(np.searchsorted(starts, piece[0], side="right")) - 1
            offset, length = piece[0] - int(starts[document]), LENGTHS[document]
            assert offset % 9 == 0
            assert len(piece) == min(10, length - offset)
            if len(piece) == 10:
                assert len(held) == 1 and dataset.packing(k) == Packing((0,), 9)
            if offset == 0 and len(piece) == length:
                found[piece[0]] = length
    assert found == whole


def test_number_of_samples_equals_best_fit(indexed: IndexedDataset) -> None:
    """Full pieces: 1 of 17, 4 of 40, 3 of 30, 1 of 10 and 1 of 18 tokens; the others have 53 in 6 bins of 10."""
    dataset = make(indexed, seq_length=9)
    assert dataset.samples_per_epoch == 10 + 6
    assert dataset.num_tokens == sum(LENGTHS)
    assert dataset.num_predictions == sum(length - 1 for length in LENGTHS if length > 1)
    assert dataset.idle_share == pytest.approx(1 - dataset.num_predictions / (16 * 9))


def test_sample_is_a_pure_function_of_seed_and_number(indexed: IndexedDataset) -> None:
    order = [3, 60, 0, 99, 3, 17, 28, 41, 2, 1000, 0]
    asked = make(indexed)
    for k in order:
        fresh = make(indexed)
        assert np.array_equal(asked.sample(k), fresh.sample(k))
        assert asked.packing(k) == make(indexed).packing(k)
    epoch = asked.samples_per_epoch

    def samples(dataset: PackedDataset, number: int) -> list[list[int]]:
        return [dataset.sample(k).tolist() for k in range(number * epoch, (number + 1) * epoch)]

    first = samples(asked, 0)
    assert first != samples(asked, 1)
    assert first != samples(make(indexed, seed=2), 0)
    assert first == samples(make(indexed), 0)


def test_documents_of_one_length_are_reassigned_in_each_epoch(tmp_path: Path) -> None:
    write_by_layout(tmp_path / "d", distinct_documents([3, 5] * 40))
    dataset = make(IndexedDataset(tmp_path / "d"), seq_length=7)
    assert dataset.samples_per_epoch == 40 and dataset.idle_share == pytest.approx(1 - 6 / 7)

    def pairs(epoch: int) -> set[frozenset[int]]:
        found = set()
        for k in range(40 * epoch, 40 * epoch + 40):
            held = pieces(dataset, k)
            assert sorted(map(len, held)) == [3, 5]
            found.add(frozenset(piece[0] for piece in held))
        return found

    assert len(pairs(0) & pairs(1)) < 10


def test_split_has_only_its_documents(indexed: IndexedDataset) -> None:
    dataset = make(indexed, documents=range(2, 5))
    assert dataset.num_tokens == 17 + 3 + 40
    seen = {token for k in range(dataset.samples_per_epoch) for p in pieces(dataset, k) for token in p}
    assert seen == set(range(6, 66))


def test_split_without_predictions_is_an_error(indexed: IndexedDataset) -> None:
    with pytest.raises(ConfigError, match="the train split holds 1 tokens in 1 documents, but no document has the two"):
        make(indexed, documents=range(1, 2))
    with pytest.raises(ConfigError, match="the train split holds 0 tokens in 0 documents"):
        make(indexed, documents=range(3, 3))


def test_token_id_outside_the_vocabulary_is_an_error(indexed: IndexedDataset) -> None:
    dataset = PackedDataset(indexed, documents=range(1), seq_length=9, seed=1, name="train", vocab_size=4, pad_token=0)
    with pytest.raises(ConfigError, match=r"d\.bin: document 0 holds token id 4, outside vocab_size 4"):
        dataset.sample(0)


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Contents of bins after best-fit decreasing, by definition."""
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
def test_loads_equal_best_fit_decreasing(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 40))
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=120))
    packed = best_fit(np.bincount(lengths or [0], minlength=capacity + 1) * bool(lengths), capacity)
    bins = packed.of_items()
    assert len(bins) == len(lengths)
    loads = np.bincount(bins, weights=sorted(lengths), minlength=packed.count) if lengths else np.zeros(0)
    assert sorted(loads.tolist()) == sorted(one_by_one(lengths, capacity))
    assert packed.items().tolist() == np.bincount(bins, minlength=packed.count).tolist()


@pytest.mark.parametrize("capacity", [1025, 8193])
def test_work_depends_on_lengths_not_documents(capacity: int) -> None:
    """The work depends on the number of different lengths: a million more documents do not change it."""
    lengths = np.random.default_rng(1).geometric(1 / 400, size=20_000) % (capacity - 1) + 2
    counts = np.bincount(lengths, minlength=capacity + 1)
    few, many = best_fit(counts, capacity), best_fit(50 * counts, capacity)
    assert len(many.first) < 6 * len(np.unique(lengths))
    assert len(few.first) < 6 * len(np.unique(lengths))
    assert many.count * capacity < 1.001 * 50 * lengths.sum()


def test_examples_train_on_responses_and_are_truncated(tmp_path: Path) -> None:
    examples = distinct_documents([5, 1, 17, 3, 40, 10, 11])
    write_by_layout(tmp_path / "e", examples)
    write_by_layout(tmp_path / "m", [[token % 3 % 2 for token in example] for example in examples])
    indexed, mask = IndexedDataset(tmp_path / "e"), IndexedDataset(tmp_path / "m")
    common = {"seq_length": 10, "seed": 1, "name": "train", "pad_token": PAD}
    dataset = PackedDataset(indexed, documents=range(len(indexed)), responses=mask, **common)  # type: ignore[arg-type]
    seen: Counter[int] = Counter()
    for k in range(dataset.samples_per_epoch):
        sample, packing = dataset.sample(k), dataset.packing(k)
        assert packing.counts is not None and packing.counts.shape == (10,)
        for piece in pieces(dataset, k):
            assert piece[0] in {example[0] for example in examples}, "no example is without its beginning"
            seen.update(piece[1:])
        last = {*(start - 1 for start in packing.starts[1:]), *range(packing.used, 10)}
        for place in set(range(10)) - last:
            assert packing.counts[place] == (sample[place + 1] % 3 % 2)
        assert not packing.counts[packing.used :].any()
    assert seen == Counter(token for example in examples for token in example[1:11])
    assert "3 are longer" not in dataset.summary and "2 are longer than seq_length 10" in dataset.summary
