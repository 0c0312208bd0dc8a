from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config.errors import ConfigError
from megalite.data.dataset import GPTDataset, permutation
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from tests.data.token_files import distinct_documents, write_by_layout

FIRST = [29, 111, 72, 107, 53, 23, 17, 1, 99, 45, 9, 91, 37, 83]
LENGTHS = [5, 1, 17, 3, 40, 2, 2, 9, 30, 8]


@pytest.fixture
def indexed(tmp_path: Path) -> IndexedDataset:
    write_by_layout(tmp_path / "d", distinct_documents(LENGTHS))
    return IndexedDataset(tmp_path / "d")


def make(indexed: IndexedDataset, *, seq_length: int = 8, seed: int = 1, documents: range = range(10)) -> GPTDataset:
    return GPTDataset(indexed, documents=documents, seq_length=seq_length, seed=seed, name="train")


def test_epoch_reads_every_token_once(indexed: IndexedDataset) -> None:
    dataset = make(indexed)
    assert (dataset.num_tokens, dataset.samples_per_epoch) == (117, 14)
    for epoch in range(3):
        samples = [dataset.sample(14 * epoch + i) for i in range(14)]
        labels = np.concatenate([sample[1:] for sample in samples])
        inputs = np.concatenate([sample[:-1] for sample in samples])
        assert len(set(labels.tolist())) == len(set(inputs.tolist())) == 14 * 8
        # All but the epoch's first token and its rest (117 - 1 - 112 tokens) are labels.
        assert len(set(range(117)) - set(labels.tolist())) == 5


def test_sample_is_a_pure_function(indexed: IndexedDataset) -> None:
    order = [3, 40, 0, 99, 3, 17, 28, 41, 2, 1000, 0]
    dataset = make(indexed)
    seen = {k: dataset.sample(k).tolist() for k in order}
    for k in order:
        assert make(indexed).sample(k).tolist() == seen[k] == dataset.sample(k).tolist()
    assert dataset.sample(0).dtype == np.int64 and dataset.sample(0).shape == (9,)


def test_each_epoch_has_another_order(indexed: IndexedDataset) -> None:
    """With one document, only the order of its segments distinguishes epochs."""
    dataset = make(indexed, documents=range(4, 5), seq_length=3)
    count = dataset.samples_per_epoch
    firsts = [[int(dataset.sample(count * epoch + i)[0]) for i in range(count)] for epoch in range(3)]
    assert count == 13 and len({tuple(epoch) for epoch in firsts}) == 3
    assert len({tuple(sorted(epoch)) for epoch in firsts}) == 1


def test_split_reads_only_its_documents(indexed: IndexedDataset) -> None:
    dataset = make(indexed, documents=range(2, 5), seq_length=3)
    tokens = {int(token) for k in range(dataset.samples_per_epoch) for token in dataset.sample(k)}
    first, last = sum(LENGTHS[:2]), sum(LENGTHS[:5])
    assert tokens <= set(range(first, last)) and len(tokens) >= dataset.num_tokens - 3


def test_order_is_unchanged(indexed: IndexedDataset) -> None:
    """Resumed runs depend on it: the first tokens of the first epoch's samples."""
    assert [int(make(indexed).sample(k)[0]) for k in range(14)] == FIRST


def test_samples_equal_segments_of_the_stream(tmp_path: Path) -> None:
    """Each sample compared with the stream itself; documents without tokens are skipped."""
    write_by_layout(tmp_path / "d", distinct_documents([4, 4, 8, 1, 1, 1, 1, 12, 4]))
    indexed = IndexedDataset(tmp_path / "d")
    dataset = make(indexed, seq_length=4, documents=range(1, 9))
    epoch = dataset._epoch(0)
    assert (epoch.documents.dtype, epoch.ends.dtype) == (np.int32, np.int64)
    stream = np.concatenate([indexed[int(document)] for document in epoch.documents])
    assert np.array_equal(epoch.ends, np.cumsum([len(indexed[int(d)]) for d in epoch.documents]))
    for k in range(dataset.samples_per_epoch):
        start = 4 * epoch.samples(k)
        assert np.array_equal(dataset.sample(k), stream[start : start + 5])


def test_two_epochs_are_cached(indexed: IndexedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def counted(count: int, *, seed: int, index: int, stream: int, dtype: np.dtype) -> np.ndarray:
        built.append(index)
        return permutation(count, seed=seed, index=index, stream=stream, dtype=dtype)

    monkeypatch.setattr("megalite.data.dataset.permutation", counted)
    dataset = make(indexed)
    for k in (0, 13, 14, 13, 14, 28, 14, 27, 29):
        dataset.sample(k)
    assert built == [0, 1, 2]


def test_short_split_is_an_error(indexed: IndexedDataset) -> None:
    with pytest.raises(ConfigError, match=r"train split holds 6 tokens in 2 documents, fewer than the 9 .* at most 5"):
        make(indexed, documents=range(2))
    assert make(indexed, documents=range(2), seq_length=5).samples_per_epoch == 1
    with pytest.raises(ConfigError, match="holds 0 tokens in 0 documents"):
        make(indexed, documents=range(3, 3))


def test_token_outside_the_vocabulary_is_named(indexed: IndexedDataset, tmp_path: Path) -> None:
    dataset = GPTDataset(indexed, documents=range(10), seq_length=8, seed=1, name="train", vocab_size=110)
    with pytest.raises(ConfigError, match=r"d\.bin: document 9 holds token id 11\d, outside vocab_size 110"):
        for k in range(14):
            dataset.sample(k)
    write_by_layout(tmp_path / "n", [[1, 2, 3, 4, -7, 5, 6, 7, 8, 9]], code=4)
    negative = IndexedDataset(tmp_path / "n")
    dataset = GPTDataset(negative, documents=range(1), seq_length=9, seed=1, name="train", vocab_size=10)
    with pytest.raises(ConfigError, match="document 0 holds token id -7, outside vocab_size 10"):
        dataset.sample(0)


def test_cached_index_gives_the_same_samples(indexed: IndexedDataset, tmp_path: Path) -> None:
    def cached() -> GPTDataset:
        cache = IndexCache(tmp_path / "cache", False, pytest.fail, small_bytes=0)
        return GPTDataset(indexed, documents=range(10), seq_length=8, seed=1, name="train", cache=cache)

    plain = make(indexed)
    cached().prepare(13, 29)  # reaches into the third epoch
    assert len(list((tmp_path / "cache").iterdir())) == 3
    dataset = cached()
    for k in range(45):
        assert np.array_equal(dataset.sample(k), plain.sample(k))
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_key_of_an_index(tmp_path: Path) -> None:
    write_by_layout(tmp_path / "a", distinct_documents(LENGTHS))
    write_by_layout(tmp_path / "b", distinct_documents([*LENGTHS[:-1], 9]))
    write_by_layout(tmp_path / "c", [[token] * length for token, length in enumerate(LENGTHS)])
    a, b, c = (IndexedDataset(tmp_path / name) for name in "abc")

    def key(indexed: IndexedDataset, epoch: int = 0, **settings: Any) -> str:
        return make(indexed, **settings)._recipe(epoch).key

    assert key(a) == key(c) == key(a, seq_length=4)  # other tokens, or other splits, in the same order
    keys = [key(a), key(b), key(a, epoch=1), key(a, seed=2), key(a, documents=range(9))]
    keys += [key(a, documents=range(1, 10))]
    assert len(set(keys)) == len(keys)


def test_later_epochs_are_built_in_the_background(
    indexed: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the process that prepared the first ones, up to the end of the run."""

    def cached() -> GPTDataset:
        cache = IndexCache(tmp_path / "cache", False, pytest.fail, small_bytes=0)
        return GPTDataset(indexed, documents=range(10), seq_length=8, seed=1, name="train", cache=cache)

    def entries() -> int:
        return len([path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")])

    leader, plain = cached(), make(indexed)
    samples = leader.samples_per_epoch
    assert len(leader.prepare(0, 4 * samples, epochs=2)) == 2 and entries() == 2
    asked: list[int] = []
    monkeypatch.setattr(IndexCache, "need_room", lambda _, recipes: asked.append(len(recipes)))
    cached().prepare(0, 4 * samples, epochs=2)
    assert asked == [4], "room for all epochs"
    for epoch, there in enumerate([2, 3, 4, 4]):
        assert np.array_equal(leader.sample(epoch * samples), plain.sample(epoch * samples))
        if leader.background is not None:
            leader.background.join()
        assert entries() == there
    follower = cached()
    follower.sample(0)
    assert follower.background is None


def test_failed_background_build_is_raised_at_its_epoch(indexed: IndexedDataset, tmp_path: Path) -> None:
    cache = IndexCache(tmp_path / "cache", True, pytest.fail, small_bytes=0)
    dataset = GPTDataset(indexed, documents=range(10), seq_length=8, seed=1, name="train", cache=cache)
    dataset.prepare(0, 3 * dataset.samples_per_epoch, epochs=2)
    dataset.sample(0)
    (tmp_path / "cache").rename(tmp_path / "away")
    (tmp_path / "cache").write_text("in the way")
    dataset._prepare_in_background(2)
    assert dataset.background is not None
    dataset.background.join()
    with pytest.raises(ConfigError, match="cannot store the index"):
        dataset.sample(2 * dataset.samples_per_epoch)
