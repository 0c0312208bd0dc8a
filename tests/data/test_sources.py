"""Datasets from settings, and the samples that a run reads."""

import dataclasses
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config.data import DataConfig
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.data.blended import BlendedDataset
from megalite.data.dataset import GPTDataset, MockDataset
from megalite.data.indexed_dataset import write_documents
from megalite.data.packed_dataset import PackedDataset
from megalite.data.sources import Datasets, WholeSplit, build_datasets, megatron_lengths, samples_to_read
from tests.data.token_files import write_by_layout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_by_layout(tmp_path / "web_text_document", [[1] * 20] * 50)
    write_by_layout(tmp_path / "books_text_document", [[2] * 20] * 150)
    return tmp_path


def build(
    data: DataConfig, *, vocab_size: int = 10, splits: tuple[str, ...] = ("train", "valid"), **more: Any
) -> Datasets:
    return build_datasets(data, seq_length=8, seed=1, vocab_size=vocab_size, splits=splits, **more)


@pytest.mark.parametrize("entries", [["2023", "2024"], ["0.3", "b", "2023", "2024"], ["2024", "2023"]])
def test_token_file_named_like_a_weight(entries: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("2023", "2024", "b"):
        write_by_layout(tmp_path / name, [[1] * 20] * 50)
    with pytest.raises(ConfigError, match=r"is a token file and also reads as a weight; write \./202[34], or 0\.5 "):
        build(DataConfig(data_path=entries))
    for plain in (["./2023", "./2024"], ["0.5", "2023", "0.5", "2024"]):
        assert isinstance(build(DataConfig(data_path=plain, split="1")).train, BlendedDataset)


def test_path_with_a_space_is_an_error(folder: Path) -> None:
    (folder / "my data").mkdir()
    write_by_layout(folder / "my data" / "a", [[1] * 20] * 50)
    whole = f"{folder}/my data/a"
    with pytest.raises(ConfigError) as error:
        build(DataConfig(data_path=whole.split()))
    assert f"text is split at spaces; write ['{whole}'] in YAML" in str(error.value)
    assert build(DataConfig(data_path=[whole])).train is not None
    assert build(DataConfig(data_path=[whole] * 99)).train is not None, "together they are too long for a path"


def test_one_path_is_split_by_documents(folder: Path) -> None:
    built = build(DataConfig(data_path=[str(folder / "web_text_document")], split="80,10,10"), splits=("train", "test"))
    assert isinstance(built.train, GPTDataset) and isinstance(built.test, GPTDataset)
    assert (built.train.documents, built.valid, built.test.documents) == (range(40), None, range(45, 50))
    assert build(DataConfig(data_path=[str(folder / "web_text_document")], split="1,0,0")).valid is None
    built = build(DataConfig(data_path=[str(folder / "books_text_document")]))  # 969,30,1, Megatron-LM's default
    assert isinstance(built.train, GPTDataset) and isinstance(built.valid, GPTDataset)
    assert (built.train.documents, built.valid.documents) == (range(145), range(145, 150))


def test_blend_is_weighted_by_tokens_or_weights(folder: Path) -> None:
    paths = [str(folder / "web_text_document"), str(folder / "books_text_document")]
    train = build(DataConfig(data_path=paths, split="1")).train
    assert isinstance(train, BlendedDataset) and train.shares == [Fraction(1, 4), Fraction(3, 4)]
    values = np.array([train.sample(k)[0] for k in range(400)])
    assert (np.sum(values == 1), np.sum(values == 2)) == (100, 300)
    train = build(DataConfig(data_path=["0.9", paths[0], "0.1", paths[1]], split="90,10")).train
    assert isinstance(train, BlendedDataset) and train.shares == [Fraction(9, 10), Fraction(1, 10)]


def test_paths_for_each_split(folder: Path) -> None:
    web, books = str(folder / "web_text_document"), str(folder / "books_text_document")
    built = build(DataConfig(train_data_path=[books], valid_data_path=[web]), splits=("train", "valid", "test"))
    assert isinstance(built.train, GPTDataset) and isinstance(built.valid, GPTDataset)
    assert (built.train.documents, built.valid.documents, built.test) == (range(150), range(50), None)
    assert set(built.valid.sample(0)) == {1}


def test_mock_data_needs_no_files() -> None:
    built = build(DataConfig(mock_data=True))
    assert isinstance(built.train, MockDataset) and isinstance(built.valid, MockDataset) and built.test is None
    assert not np.array_equal(built.train.sample(0), built.valid.sample(0))


def test_missing_path_names_similar_ones(folder: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(ConfigError) as error:
            build(DataConfig(data_path=[str(path)]))
        return str(error.value)

    web = folder / "web_text_document"
    assert f"{folder} has {web}" in message(folder / "wed_text_documents")
    assert f"{folder}/zzz.bin and {folder}/zzz.idx do not exist" in message(folder / "zzz")
    assert f"has {folder}/books_text_document or {web}" in message(folder / "zzz")
    assert "has no .idx file" in message(folder / "no" / "zzz")
    assert f"give a path without .bin: {folder} has {web}" in message(Path(f"{web}.bin"))
    Path(f"{web}.bin").unlink()
    assert f"{web}.bin does not exist" in message(web)


def test_token_id_outside_the_vocabulary_fails_at_the_start(folder: Path) -> None:
    books = str(folder / "books_text_document")
    with pytest.raises(
        ConfigError, match=r"books_text_document\.bin: holds token id 2, but vocab_size is 2.*; .* least 3"
    ):
        build(DataConfig(data_path=[books]), vocab_size=2)


def test_large_file_is_sampled_at_start_and_checked_when_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.data.token_files.SAMPLED_BYTES", 3 << 20)
    block = 1 << 19  # tokens in a block of 1 MiB; the first, the third and the last of six are checked

    def train(bad: int, value: int = 99) -> GPTDataset:
        tokens = np.zeros(5 * block + 1000, np.uint16)
        tokens[bad] = value
        write_documents(folder / "big", [(tokens, [len(tokens)])], np.uint16)
        built = build(DataConfig(data_path=[str(folder / "big")], split="1")).train
        assert isinstance(built, GPTDataset)
        return built

    for seen in (0, 5, 2 * block + 1, 5 * block + 999):
        with pytest.raises(ConfigError, match=r"big\.bin: holds token id 99, but vocab_size is 10"):
            train(seen)
    dataset = train(block + 8)
    order = dataset._epoch(0).samples
    k = next(k for k in range(dataset.samples_per_epoch) if order(k) == (block + 8) // 8)
    with pytest.raises(ConfigError, match="document 0 holds token id 99, outside vocab_size 10"):
        dataset.sample(k)


def test_negative_token_id_fails_at_the_start(folder: Path) -> None:
    write_by_layout(folder / "negative", [[1, 2, -3] * 9], code=4)
    with pytest.raises(ConfigError, match=r"negative\.bin: holds token id -3; ids are at least 0"):
        build(DataConfig(data_path=[str(folder / "negative")]))


def test_best_fit_gives_packed_datasets(folder: Path) -> None:
    paths = [str(folder / "web_text_document"), str(folder / "books_text_document")]
    train = build_datasets(
        DataConfig(data_path=paths, split="1", packing="best-fit"),
        seq_length=30,
        seed=1,
        vocab_size=10,
        splits=("train",),
        pad_token=7,
    ).train
    assert isinstance(train, BlendedDataset)
    assert all(isinstance(part, PackedDataset) and part.pad_token == 7 for part in train.datasets)
    packing = train.packing(0)
    assert packing is not None and packing.starts[0] == 0
    assert (train.sample(0)[packing.used + 1 :] == 7).all()


def test_location_of_large_indices(folder: Path) -> None:
    """Beside each token file, or in one folder for all; small ones are not written."""
    (folder / "more").mkdir()
    write_by_layout(folder / "more" / "d", [[1] * 20] * 70)
    paths = [str(folder / "web_text_document"), str(folder / "more" / "d")]

    def prepare(small_bytes: int, folder: Path | None = None) -> None:
        built = build_datasets(
            DataConfig(data_path=paths, split="1", data_cache_path=None if folder is None else str(folder)),
            seq_length=8,
            seed=1,
            vocab_size=10,
            splits=("train",),
            small_bytes=small_bytes,
        )
        assert isinstance(built.train, BlendedDataset)
        built.train.prepare(0, 100)
        built.train.sample(0)

    prepare(1 << 20)
    assert not (folder / "cache").exists()
    prepare(0)
    assert [len(list((at / "cache").iterdir())) for at in (folder, folder / "more")] == [1, 1]
    prepare(0, folder / "all")
    assert len(list((folder / "all").iterdir())) == 2


def test_short_unused_split_is_not_an_error(folder: Path) -> None:
    data = DataConfig(data_path=[str(folder / "web_text_document")])
    assert build(data).test is None
    with pytest.raises(ConfigError, match="test split holds 0 tokens"):
        build_datasets(
            DataConfig(data_path=["1", data.data_path[0], "1", str(folder / "books_text_document")], split="1,0,0.005"),
            seq_length=8,
            seed=1,
            vocab_size=10,
            splits=("test",),
        )


def config(**settings: Any) -> RunConfig:
    values = {"train_iters": 100, "global_batch_size": 8, "vocab_size": 64, "data_path": ["a"]} | settings
    return validate(replace(RunConfig(), **values), 1, frozenset(values))


def test_number_of_samples_of_a_run() -> None:
    assert samples_to_read(config()) == {"train": (0, 800)}
    evaluates = config(eval_interval=30, eval_iters=5)
    expected = {"train": (80, 800), "valid": (0, 40), "test": (0, 40)}
    assert samples_to_read(evaluates, step=10, samples=80) == expected
    # Resumed after smaller batches: the number of steps counts.
    assert samples_to_read(config(), step=10, samples=40)["train"] == (40, 760)
    assert samples_to_read(config(), step=100, samples=800)["train"] == (800, 800)


@pytest.mark.parametrize("order", ["megalite", "megatron"])
def test_whole_split_has_one_epoch_of_each_dataset(folder: Path, order: str) -> None:
    """Weights do not matter."""
    tokens = np.random.default_rng(1).integers(1, 10, size=(60, 20)).tolist()
    write_by_layout(folder / "varied", tokens)
    paths = [str(folder / name) for name in ("books_text_document", "varied")]
    data = DataConfig(data_path=["0.9", paths[0], "0.1", paths[1]], split="1,1", data_order=order)
    more = {"whole": ("valid",), "num_samples": {"train": 8}}
    whole, *alone = (
        build(dataclasses.replace(data, data_path=each), **more).valid for each in (data.data_path, *zip(paths))
    )
    assert isinstance(whole, WholeSplit)
    assert [one.samples for one in alone] == [(75 * 20 - 1) // 8, (30 * 20 - 1) // 8]
    seen = [whole.sample(k).tolist() for k in range(whole.samples)]
    assert seen == [one.sample(k).tolist() for one in alone for k in range(one.samples)]
    assert len({tuple(sample) for sample in seen}) == 1 + alone[1].samples
    assert whole.sample(whole.samples).tolist() == seen[0]
    assert samples_to_read(config(), Datasets(None, whole, None))["valid"] == (0, whole.samples)


def test_number_of_samples_with_a_ramp_up() -> None:
    ramp = config(train_iters=None, train_samples=1000, rampup_batch_size=[2, 2, 60])
    first, stop = samples_to_read(ramp)["train"]
    assert (first, 1000 - stop < 8) == (0, True)
    assert samples_to_read(ramp, step=3, samples=6)["train"] == (6, stop)


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        ({}, {"train": 800}),
        # Megatron-LM, training.py: (100 // 30 + 1) * 5 evaluations of 8 samples.
        ({"eval_interval": 30, "eval_iters": 5}, {"train": 800, "valid": 160, "test": 40}),
        (
            {"train_iters": None, "train_samples": 803, "eval_interval": 50, "eval_iters": 2},
            {"train": 803, "valid": 48, "test": 16},
        ),
    ],
)
def test_lengths_equal_megatron(settings: dict[str, Any], lengths: dict[str, int]) -> None:
    assert megatron_lengths(config(**settings)) == lengths
