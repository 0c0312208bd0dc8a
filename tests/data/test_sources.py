from pathlib import Path

import numpy as np
import pytest

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.data.blended import BlendedDataset
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.mock_dataset import MockDataset
from megalite.data.sources import Datasets, build_datasets, parse_data_path
from tests.data.token_files import write_by_layout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_by_layout(tmp_path / "web_text_document", [[1] * 20] * 50)
    write_by_layout(tmp_path / "books_text_document", [[2] * 20] * 150)
    return tmp_path


def build(
    data: DataConfig, *, vocab_size: int = 10, splits: tuple[str, ...] = ("train", "valid")
) -> Datasets:
    return build_datasets(data, seq_length=8, seed=1, vocab_size=vocab_size, splits=splits)


def test_parse_data_path() -> None:
    assert parse_data_path(["a"]) == [(None, "a")]
    assert parse_data_path(["a", "b"]) == [(None, "a"), (None, "b")]
    assert parse_data_path(["0.3", "a", "0.7", "b"]) == [(0.3, "a"), (0.7, "b")]
    assert parse_data_path(["1", "2"]) == [(1.0, "2")]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["0.3", "a", "b"], "'0.3' looks like a weight"),
        (["0.3", "a", "x", "b"], "'0.3' looks like a weight"),
        (["0", "a", "1", "b"], "weight 0.0 of a must be above 0"),
        (["-1", "a", "1", "b"], "weight -1.0 of a must be above 0"),
        (["inf", "a"], "weight inf of a"),
    ],
)
def test_bad_data_paths(entries: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_data_path(entries)


def test_one_path_is_split_by_documents(folder: Path) -> None:
    built = build(
        DataConfig(data_path=[str(folder / "web_text_document")], split="80,10,10"), splits=("train", "test")
    )
    assert isinstance(built.train, GPTDataset) and isinstance(built.test, GPTDataset)
    assert (built.train.documents, built.valid, built.test.documents) == (range(40), None, range(45, 50))


def test_the_default_split_is_megatrons(folder: Path) -> None:
    built = build(DataConfig(data_path=[str(folder / "books_text_document")]))
    assert isinstance(built.train, GPTDataset) and isinstance(built.valid, GPTDataset)
    assert (built.train.documents, built.valid.documents) == (range(145), range(145, 150))


def test_a_split_without_documents_is_none(folder: Path) -> None:
    assert build(DataConfig(data_path=[str(folder / "web_text_document")], split="1,0,0")).valid is None


def test_a_blend_without_weights_follows_the_tokens(folder: Path) -> None:
    paths = [str(folder / "web_text_document"), str(folder / "books_text_document")]
    train = build(DataConfig(data_path=paths, split="1")).train
    assert isinstance(train, BlendedDataset) and train.quotas == [1, 3]
    values = np.array([train.sample(k)[0] for k in range(400)])
    assert (np.sum(values == 1), np.sum(values == 2)) == (100, 300)


def test_a_blend_with_weights(folder: Path) -> None:
    paths = ["0.9", str(folder / "web_text_document"), "0.1", str(folder / "books_text_document")]
    train = build(DataConfig(data_path=paths, split="90,10")).train
    assert isinstance(train, BlendedDataset) and train.quotas == [9, 1]


def test_paths_for_each_split(folder: Path) -> None:
    web, books = str(folder / "web_text_document"), str(folder / "books_text_document")
    built = build(
        DataConfig(train_data_path=[books], valid_data_path=[web]), splits=("train", "valid", "test")
    )
    assert isinstance(built.train, GPTDataset) and isinstance(built.valid, GPTDataset)
    assert (built.train.documents, built.valid.documents, built.test) == (range(150), range(50), None)
    assert set(built.valid.sample(0)) == {1}


def test_mock_data_needs_no_files() -> None:
    built = build(DataConfig(mock_data=True))
    assert (
        isinstance(built.train, MockDataset) and isinstance(built.valid, MockDataset) and built.test is None
    )
    assert not np.array_equal(built.train.sample(0), built.valid.sample(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no data: give --data-path PREFIX"),
        ({"data_path": ["a"], "mock_data": True}, "mock_data and data_path are given at once"),
        ({"data_path": ["a"], "train_data_path": ["b"]}, "data_path and train_data_path.* are given at once"),
        ({"train_data_path": ["a"], "split": "1,1,1"}, "split 1,1,1 has no effect"),
        ({"valid_data_path": ["a"]}, "without train_data_path"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(DataConfig(**settings))


def test_a_path_that_does_not_exist_names_its_neighbours(folder: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(ConfigError) as error:
            build(DataConfig(data_path=[str(path)]))
        return str(error.value)

    web = folder / "web_text_document"
    assert f"did you mean {web}" in message(folder / "wed_text_documents")
    assert f"neither {folder}/zzz.bin nor {folder}/zzz.idx exists" in message(folder / "zzz")
    assert "has books_text_document, web_text_document" in message(folder / "zzz")
    assert f"the folder {folder}/no does not exist" in message(folder / "no" / "zzz")
    assert f"give the prefix alone: {web}" in message(Path(f"{web}.bin"))
    Path(f"{web}.bin").unlink()
    assert f"{web}.bin is missing, {web}.idx is there" in message(web)
    (folder / "empty").mkdir()
    assert "has no .idx file" in message(folder / "empty" / "zzz")


def test_a_token_id_outside_the_vocabulary_fails_at_the_start(folder: Path) -> None:
    books = str(folder / "books_text_document")
    with pytest.raises(
        ConfigError, match=r"books_text_document\.bin: holds token id 2, but vocab_size is 2; .* least 3"
    ):
        build(DataConfig(data_path=[books]), vocab_size=2)


def test_a_large_file_is_sampled_and_read_ids_are_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.data.sources._EXACT_CHECK_BYTES", 0)
    tokens = [0] * (3 << 20)
    tokens[(1 << 20) + 1] = 99  # in a block that a sample of a third does not look at
    write_by_layout(folder / "big", [tokens])
    monkeypatch.setattr("megalite.data.sources._SAMPLED_TOKENS", 1 << 20)
    train = build(DataConfig(data_path=[str(folder / "big")], split="1")).train
    assert isinstance(train, GPTDataset)
    k = train._epoch(0).samples.tolist().index((1 << 20) // 8)
    with pytest.raises(ConfigError, match="document 0 holds token id 99, outside vocab_size 10"):
        train.sample(k)


def test_a_short_split_that_nobody_reads_is_no_fault(folder: Path) -> None:
    data = DataConfig(data_path=[str(folder / "web_text_document")])
    assert build(data).test is None
    with pytest.raises(ConfigError, match="test split holds 0 tokens"):
        build_datasets(
            DataConfig(
                data_path=["1", data.data_path[0], "1", str(folder / "books_text_document")],
                split="1,0,0.005",
            ),
            seq_length=8,
            seed=1,
            vocab_size=10,
            splits=("test",),
        )
