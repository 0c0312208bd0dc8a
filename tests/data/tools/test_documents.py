from pathlib import Path

import numpy as np
import pytest

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.tools import documents
from megalite.data.tools.documents import (
    document_of_token,
    first_token,
    lengths_in_blocks,
    parse_documents,
    sequence_of_token,
    token_ends,
)
from tests.data.tools.layout import MIXED, write

LENGTHS = [3, 3, 0, 0, 3, 4]


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    return IndexedDataset(write(tmp_path / "d", MIXED))


def test_where_documents_are(dataset: IndexedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = np.cumsum(LENGTHS).tolist()
    assert token_ends(dataset, range(6)).tolist() == ends
    assert token_ends(dataset, range(2, 5)).tolist() == ends[2:5]
    assert [first_token(dataset, i) for i in range(7)] == [0, *ends]
    for block in (1, 2, 4, 100):
        monkeypatch.setattr(documents, "BLOCK", block)
        assert np.concatenate(list(lengths_in_blocks(dataset, range(6)))).tolist() == LENGTHS
        assert np.concatenate(list(lengths_in_blocks(dataset, range(1, 5)))).tolist() == LENGTHS[1:5]


def test_what_holds_a_token(dataset: IndexedDataset) -> None:
    of_document = [i for i, length in enumerate(LENGTHS) for _ in range(length)]
    assert [document_of_token(dataset, token) for token in range(13)] == of_document
    sequences = [sequence for document in MIXED for sequence in document]
    of_sequence = [i for i, sequence in enumerate(sequences) for _ in sequence]
    assert [sequence_of_token(dataset, token) for token in range(13)] == of_sequence


def test_documents_behind_the_last_sequence(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "d", [[[1, 2]], [], []]))
    assert token_ends(dataset, range(3)).tolist() == [2, 2, 2]
    assert document_of_token(dataset, 1) == 0
    assert token_ends(IndexedDataset(write(tmp_path / "e", [[], []])), range(2)).tolist() == [0, 0]


def test_ranges(dataset: IndexedDataset) -> None:
    expected = {"0:3": range(3), "2:": range(2, 6), ":2": range(2), "4": range(4, 5), ":": range(6)}
    assert {text: parse_documents(text, dataset) for text in expected} == expected
    for bad in ("x", "1:2:3", "", "1.5"):
        with pytest.raises(ConfigError, match="is no range of numbers; give a range such as 0:3"):
            parse_documents(bad, dataset)
    with pytest.raises(
        ConfigError, match=r"'4:2': the range ends before it starts \(the end is .*give a range such"
    ):
        parse_documents("4:2", dataset)
    with pytest.raises(ConfigError, match="'3:3': the range holds none"):
        parse_documents("3:3", dataset)
    for bad in ("7:", "7:7", "9:8", "0:7", "6", "-1:3"):
        with pytest.raises(ConfigError, match="has the documents 0 to 5"):
            parse_documents(bad, dataset)


def test_ranges_of_nothing(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "e", []))
    for text in ("0", "0:0", "x", ":"):
        with pytest.raises(
            ConfigError, match=f"documents '{text}': .*e has no documents; give a dataset that has"
        ):
            parse_documents(text, dataset)
