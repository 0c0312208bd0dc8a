import hashlib
import random
from pathlib import Path

import numpy as np
import pytest

from megalite.config.errors import ConfigError
from megalite.data import indexed_writer
from megalite.data.indexed_writer import IndexedDatasetWriter, TokenCounts, write_index
from tests.data.token_files import write_by_layout


@pytest.mark.parametrize("block", [1, 2, 3, 1000])
def test_an_index_made_in_blocks_has_the_documented_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    draw = random.Random(block)
    documents = [[draw.randrange(60000) for _ in range(draw.randrange(4))] for _ in range(100)]
    documents = [[], *documents, []]
    write_by_layout(tmp_path / "theirs", documents)
    monkeypatch.setattr(indexed_writer, "_BLOCK", block)
    with IndexedDatasetWriter(tmp_path / "ours", np.uint16) as writer:
        for document in documents[:50]:
            writer.add_document(document)
        rest = np.array([token for document in documents[50:] for token in document], dtype=np.int32)
        writer.add_documents(rest, np.array([len(document) for document in documents[50:]]))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    assert sorted(path.name for path in tmp_path.glob("ours*")) == ["ours.bin", "ours.idx"]
    assert (writer.num_documents, writer.num_tokens) == (102, sum(map(len, documents)))


def test_lengths_go_to_a_file_while_documents_are_added(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(tmp_path / "d", np.uint16)
    writer.add_documents(np.zeros(300_000, dtype=np.uint16), np.ones(300_000, dtype=np.int64))
    (lengths,) = tmp_path.glob("d.lengths.*.tmp")
    assert lengths.stat().st_size == 4 * 300_000
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_document_that_the_format_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_writer, "LENGTH", np.dtype("i1"))
    with (
        pytest.raises(ConfigError, match="a document of 128 tokens; the format holds at most 127: split it"),
        IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer,
    ):
        writer.add_document([1] * 127)
        writer.add_document([1] * 128)


def test_lengths_that_another_program_has_changed(tmp_path: Path) -> None:
    counts = TokenCounts(np.dtype("<u2"))
    counts.add_lengths(np.array([3, 4], dtype="<i4"))
    counts.tokens = 7
    np.array([3, 5], dtype="<i4").tofile(tmp_path / "lengths")
    with pytest.raises(ConfigError, match="holds 2 documents of 8 tokens, 2 of 7 were written"):
        write_index(tmp_path / "idx", tmp_path / "lengths", counts)


def test_the_digest_is_that_of_the_bin(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "d", np.int32) as writer:
        writer.add_document([1, 2])
        writer.add_document(np.array([3], dtype=np.uint8))
        digest = writer.sha256
    assert digest == hashlib.sha256((tmp_path / "d.bin").read_bytes()).hexdigest()
