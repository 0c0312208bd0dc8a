from pathlib import Path

from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.tools.inspect import Document, inspect, read_documents
from tests.data.tools.layout import MIXED, write, write_with_side_file


def test_facts(tmp_path: Path) -> None:
    facts = inspect(IndexedDataset(write(tmp_path / "d", MIXED)))
    assert facts == {
        "prefix": str(tmp_path / "d"),
        "dtype": "uint16",
        "documents": 6,
        "empty_documents": 2,
        "sequences": 8,
        "tokens": 13,
        "bytes": {".bin": 26, ".idx": 34 + 12 * 8 + 8 * 7},
        "document_lengths": {"min": 0, "mean": 2.17, "max": 4, "buckets": {"0": 2, "2": 3, "4": 1}},
        "side_file": None,
    }
    side = inspect(IndexedDataset(write_with_side_file(tmp_path / "s", MIXED, key="text")))["side_file"]
    assert (side["documents"], side["key"]) == (6, "text")
    empty = inspect(IndexedDataset(write(tmp_path / "e", [])))
    assert empty["document_lengths"] == {"min": 0, "mean": 0.0, "max": 0, "buckets": {}}


def test_documents(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "d", MIXED))
    assert list(read_documents(dataset, range(1, 4), max_tokens=2)) == [
        Document(1, sequences=3, length=3, tokens=[4, 5]),
        Document(2, sequences=0, length=0, tokens=[]),
        Document(3, sequences=1, length=0, tokens=[]),
    ]
    assert [document.tokens for document in read_documents(dataset, range(6), max_tokens=9)] == [
        [token for sequence in document for token in sequence] for document in MIXED
    ]
