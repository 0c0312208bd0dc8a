"""Megatron-LM's order. The digests were made by megatron-core 0.16.1 (numpy 2.4), with its own dataset builder."""

import json
from pathlib import Path

import numpy as np
import pytest

from megalite.config.errors import ConfigError
from megalite.data import megatron_dataset as megatron_blend
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.megatron_dataset import MegatronBlend, MegatronDataset, MegatronPlan, blend_sizes, fill_greedy
from tests.data.megatron_cases import Case, our_digests
from tests.data.token_files import distinct_documents, write_by_layout

CASES = json.loads((Path(__file__).parent / "megatron_digests.json").read_text())
LENGTHS = [5, 1, 17, 3, 40, 2, 2, 9, 30, 8]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_arrays_equal_megatron(case: Case, tmp_path: Path) -> None:
    assert our_digests(case, tmp_path) == case["digests"]


def make(folder: Path, num_samples: int | None, *, cache: IndexCache | None = None) -> MegatronDataset:
    if not (folder / "d.idx").exists():
        write_by_layout(folder / "d", distinct_documents(LENGTHS))
    return MegatronDataset(
        IndexedDataset(folder / "d"),
        documents=range(10),
        num_samples=num_samples,
        seq_length=8,
        seed=1234,
        name="train",
        cache=cache,
    )


def test_sample_index_built_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(tmp_path, 100).arrays
    for block in (1, 3, 7):
        monkeypatch.setattr("megalite.data.megatron_dataset._BLOCK", block)
        for name, array in make(tmp_path, 100).arrays.items():
            assert np.array_equal(array, whole[name]), (block, name)


def test_samples_are_segments_of_the_shuffled_documents(tmp_path: Path) -> None:
    dataset = make(tmp_path, 40)
    assert dataset.plan.epochs == 3 and len(dataset) == (3 * 117 - 1) // 8
    arrays = dataset.arrays
    stream = np.concatenate([dataset.indexed[int(i)] for i in arrays["document_index"]])
    for k in range(len(dataset)):
        start = 8 * int(arrays["shuffle_index"][k])
        assert np.array_equal(dataset.sample(k), stream[start : start + 9])


@pytest.mark.parametrize(
    ("num_samples", "plan"),
    [
        (None, MegatronPlan(1, 14, None)),
        (14, MegatronPlan(1, 14, None)),
        (15, MegatronPlan(2, 29, 14)),  # 1 of 14 samples is of the last epoch: shuffled separately
        (24, MegatronPlan(2, 29, 14)),  # 10 < int(0.8 * 14) = 11
        (25, MegatronPlan(2, 29, None)),
        (29, MegatronPlan(2, 29, None)),
    ],
)
def test_epochs_and_the_80_percent_rule(num_samples: int | None, plan: MegatronPlan) -> None:
    assert MegatronPlan.of(num_tokens=117, num_samples=num_samples, seq_length=8) == plan


def test_sample_beyond_the_last_is_refused(tmp_path: Path) -> None:
    dataset = make(tmp_path, 14)
    dataset.prepare(0, 14)
    with pytest.raises(ConfigError, match="has 14 samples, but the run needs sample 14"):
        dataset.sample(14)
    with pytest.raises(ConfigError, match="the run needs sample 14"):
        dataset.prepare(0, 15)
    with pytest.raises(IndexError):
        dataset.sample(-1)


def test_split_without_tokens_and_bad_seeds_are_errors(tmp_path: Path) -> None:
    indexed = make(tmp_path, 1).indexed
    settings = {"num_samples": 5, "seq_length": 8, "name": "train"}
    with pytest.raises(ConfigError, match="train split holds 0 tokens in 0 documents"):
        MegatronDataset(indexed, documents=range(3, 3), seed=1, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="seed 4294967296 is outside the range"):
        MegatronDataset(indexed, documents=range(3), seed=1 << 32, **settings)  # type: ignore[arg-type]


def test_blend_follows_its_index(tmp_path: Path) -> None:
    size, wanted = blend_sizes([0.3, 0.7], 40)
    assert (size, wanted) == (40, [13, 29])  # ceil(12 * 1.005), ceil(28 * 1.005)
    parts = [make(tmp_path, count) for count in wanted]
    blend = MegatronBlend(parts, [0.3, 0.7], size=size, name="train")
    blend.prepare(0, size)
    index = blend.arrays["dataset_index"]
    assert (index.dtype, np.bincount(index).tolist()) == (np.int16, [12, 28])
    seen = [0, 0]
    for k in range(size):
        assert np.array_equal(blend.sample(k), parts[index[k]].sample(seen[index[k]]))
        seen[index[k]] += 1
    with pytest.raises(ConfigError, match="the run needs sample 40"):
        blend.prepare(0, 41)
    with pytest.raises(ConfigError, match="the run needs sample 40"):
        blend.sample(40)
    short = MegatronBlend([make(tmp_path, None), parts[1]], [0.9, 0.1], size=size, name="train")
    with pytest.raises(ConfigError, match="has 14 samples, but the run needs sample 35"):
        short.prepare(0, size)


def test_large_indices_are_cached(tmp_path: Path) -> None:
    def cache() -> IndexCache:
        return IndexCache(tmp_path / "cache", False, pytest.fail, small_bytes=0)

    def blend(kept: IndexCache | None) -> MegatronBlend:
        parts = [make(tmp_path, count, cache=kept) for count in (13, 29)]
        return MegatronBlend(parts, [0.3, 0.7], size=40, name="train", cache=kept)

    blend(cache()).prepare(0, 40)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    # Both parts, of 14 and 29 samples, and the choice.
    assert len(list((tmp_path / "cache").iterdir())) == 3
    plain, kept = blend(None), blend(cache())
    assert all(np.array_equal(plain.sample(k), kept.sample(k)) for k in range(40))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == before


def greedy(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The rule itself, step by step."""
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
        ([0.5, 0.5], 1),
        ([0.3, 0.7], 40000),
        ([3, 1, 1e-3, 7, 2, 1e-6], 30000),
        (RANDOM.random_sample(60) ** 4, 8000),
        (RANDOM.randint(1, 6, 24), 5000),
    ],
)
def test_greedy_choice_is_exact(weights: list[float], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several waves, with segments so short that many guesses are wrong.
    monkeypatch.setattr(megatron_blend, "_LANES", 64)
    monkeypatch.setattr(megatron_blend, "_STEPS", 100)
    shares = np.array(weights, dtype=np.float64)
    shares /= shares.sum()
    index, ordinal = np.empty(size, np.int16), np.empty(size, np.int64)
    fill_greedy({"dataset_index": index, "dataset_sample_index": ordinal}, shares)
    expected_index, expected_ordinal = greedy(shares, size)
    assert np.array_equal(index, expected_index) and np.array_equal(ordinal, expected_ordinal)
