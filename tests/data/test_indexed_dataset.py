"""Reading and writing token files: bytes compared with the documented layout, and errors that name the fault."""

import contextlib
import os
import pickle
import random
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from megalite.config.errors import ConfigError
from megalite.data import indexed_dataset
from megalite.data.indexed_dataset import (
    DatasetFault,
    IndexedDataset,
    TokenCounts,
    TokenStream,
    UnsupportedDataset,
    token_dtype,
    write_documents,
)
from tests.data.token_files import blocks_of, change, write_by_layout

DOCUMENTS = [[1, 2, 3], [65000], [], [7, 8, 9, 10, 11], [12, 13]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_by_layout(tmp_path / "d", DOCUMENTS)
    return tmp_path / "d"


def test_read_documented_layout(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [d for d in DOCUMENTS if d]
    assert dataset.sizes.tolist() == [3, 1, 5, 2]
    assert dataset.document_indices.tolist() == [0, 1, 2, 2, 3, 4]
    assert (dataset.dtype, dataset.num_tokens) == (np.dtype("<u2"), 11)
    assert dataset[-1].tolist() == [12, 13]
    with pytest.raises(IndexError, match="sequence 4 of 4"):
        dataset[4]


def no_document_index(path: Path) -> None:
    data = bytearray(path.read_bytes()[: 34 + 12 * 4])
    struct.pack_into("<Q", data, 26, 0)
    path.write_bytes(data)


def swap(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("gone"))


POINTERS = 34 + 4 * 4
INDICES = 34 + 12 * 4
CHANGED = {
    "magic": (0, "<B", 0, r"d\.idx: byte 0: starts with b'\\x00MIDIDX.*expected b'MMIDIDX"),
    "version": (9, "<Q", 1 << 32, r"byte 9: version 4294967296, expected 1; write"),
    "dtype code": (17, "<B", 9, r"d\.idx: byte 17: dtype code 9, expected one of 1 uint8"),
    "wider dtype": (17, "<B", 4, r"d\.idx: byte 58: sequence 1 starts at byte 6, expected 12"),
    "sequences": (18, "<Q", 5, r"d\.idx: 130 bytes, expected 142 for 5 sequences"),
    "huge count": (18, "<Q", 1 << 60, r"d\.idx: 130 bytes, expected"),
    "documents": (26, "<Q", 7, r"expected 138 for 4 sequences and 7 document"),
    "length": (34, "<i", 4, r"d\.idx: byte 58: sequence 1 starts at byte 6, expected 8"),
    "negative length": (38, "<i", -1, r"d\.idx: byte 38: sequence 1 has length -1, expected"),
    "last length": (46, "<i", 3, r"d\.bin: truncated: 22 bytes, expected 24"),
    "pointer": (POINTERS + 16, "<q", 6, r"d\.idx: byte 66: sequence 2 starts at byte 6, expected 8"),
    "first index": (INDICES, "<q", 1, r"d\.idx: byte 82: document indices start with 1, expected 0"),
    "last index": (INDICES + 40, "<q", 3, r"d\.idx: byte 122: document indices end with 3, expected 4"),
    "falling index": (INDICES + 16, "<q", 3, r"d\.idx: byte 106: document 2 holds sequences 3 to 2"),
}


@pytest.mark.parametrize("fault", CHANGED)
def test_changed_field_is_named_at_open(prefix: Path, fault: str) -> None:
    offset, fmt, value, message = CHANGED[fault]
    change(prefix.with_suffix(".idx"), offset, fmt, value)
    with pytest.raises(ConfigError, match=message):
        IndexedDataset(prefix)


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


FAULTS = {
    "short idx": (lambda p: cut(p / "d.idx", 129), r"d\.idx: 129 bytes"),
    "half header": (lambda p: cut(p / "d.idx", 20), "at least the header's 34"),
    "empty idx": (lambda p: cut(p / "d.idx", 0), r"d\.idx: byte 0: starts with b''"),
    "no document index": (lambda p: no_document_index(p / "d.idx"), "byte 26: no document indices, exp"),
    "swapped": (lambda p: swap(p / "d.idx", p / "d.bin"), r"d\.bin like an index \(are the two names swapped"),
    "folder": (lambda p: replace_by_folder(p / "d.idx"), r"d\.idx cannot be read: Is a directory; use the"),
    "pipe": (lambda p: replace_by_pipe(p / "d.bin"), r"d\.bin .* it is a pipe or device, not a file"),
    "dangling link": (lambda p: dangle(p / "d.idx"), r"d\.idx cannot be read: No such file"),
    "short bin": (lambda p: cut(p / "d.bin", 21), r"d\.bin: truncated: 21 bytes, expected 22"),
    "long bin": (lambda p: (p / "d.bin").write_bytes(bytes(24)), r"d\.bin: longer than in its index: 24"),
    "no bin": (lambda p: (p / "d.bin").unlink(), r"d\.bin does not exist; a dataset is a pair"),
    "no idx": (lambda p: (p / "d.idx").unlink(), r"d\.idx does not exist; a dataset is a pair"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named_at_open(prefix: Path, fault: str) -> None:
    damage, message = FAULTS[fault]
    damage(prefix.parent)
    with pytest.raises(ConfigError, match=message):
        IndexedDataset(prefix)


UNSUPPORTED = {
    "version": (lambda p: change(p, 9, "<Q", 2), "byte 9: version 2 of the format, expected 1"),
    "float64": (lambda p: change(p, 17, "<B", 6), "byte 17: dtype code 6, float64"),
    "float32": (lambda p: change(p, 17, "<B", 7), "byte 17: dtype code 7, float32"),
    "modes": (lambda p: p.write_bytes(p.read_bytes() + bytes(4)), "byte 130: mode bytes of a multimodal"),
    "TNTIDX": (lambda p: p.write_bytes(b"TNTIDX\0\0" + bytes(40)), "byte 0: starts with TNTIDX, the format"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_valid_file_of_another_kind_is_not_called_damaged(prefix: Path, kind: str) -> None:
    make, message = UNSUPPORTED[kind]
    make(prefix.with_suffix(".idx"))
    with pytest.raises(
        UnsupportedDataset, match=rf"d\.idx: {message}.*: not supported; write the dataset again from its text with"
    ) as raised:
        IndexedDataset(prefix)
    assert "copy it again" not in str(raised.value)


def test_error_names_the_position(prefix: Path) -> None:
    change(prefix.with_suffix(".idx"), POINTERS + 8, "<q", 5)
    with pytest.raises(DatasetFault) as raised:
        IndexedDataset(prefix)
    for error in (raised.value, pickle.loads(pickle.dumps(raised.value))):
        assert (error.path, error.offset, str(error)) == (f"{prefix}.idx", POINTERS + 8, str(raised.value))


def test_file_truncated_while_read_is_named(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_header = IndexedDataset._read_header

    def cut_then(self: IndexedDataset, file: BinaryIO) -> tuple[np.dtype, int, int]:
        found = read_header(self, file)
        os.truncate(self.idx_path, 40)
        return found

    monkeypatch.setattr(IndexedDataset, "_read_header", cut_then)
    with pytest.raises(ConfigError, match=rf"^{prefix}\.idx ends at byte 40, sooner than when it was opened"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("block", [1, 2, 3, 5])
def test_faults_at_block_edges_are_found(prefix: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_dataset, "_CHECKED_BYTES", 4 * block)
    assert IndexedDataset(prefix).num_documents == 5
    original = prefix.with_suffix(".idx").read_bytes()
    places = [("<q", POINTERS + 8 * i) for i in range(4)] + [("<q", INDICES + 8 * i) for i in range(6)]
    for fmt, place in [*places, *(("<i", 34 + 4 * i) for i in range(4))]:
        for value in (-1, 5, 1 << 30):
            prefix.with_suffix(".idx").write_bytes(original)
            change(prefix.with_suffix(".idx"), place, fmt, value)
            if prefix.with_suffix(".idx").read_bytes() == original:
                continue
            with pytest.raises(DatasetFault, match=r"d\.(idx|bin)"):
                IndexedDataset(prefix)


def test_wrong_counts_allocate_no_memory(prefix: Path) -> None:
    for offset in (18, 26):
        for count in ((1 << 64) - 1, 1 << 63, (1 << 63) - 1, 1 << 61, 1 << 40, 1 << 30):
            write_by_layout(prefix, DOCUMENTS)
            change(prefix.with_suffix(".idx"), offset, "<Q", count)
            tracemalloc.start()
            with pytest.raises(DatasetFault, match=r"d\.idx: 130 bytes, expected \d+ for"):
                IndexedDataset(prefix)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 1 << 17


def test_open_needs_no_memory_per_sequence(tmp_path: Path) -> None:
    write_documents(tmp_path / "d", [(np.zeros(1 << 20, dtype=np.uint16), np.ones(1 << 20))], np.uint16)
    tracemalloc.start()
    dataset = IndexedDataset(tmp_path / "d")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(dataset) == 1 << 20
    assert peak < 4 << 20


def test_failed_writer_keeps_existing_files(prefix: Path) -> None:
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}

    def documents() -> Iterator[list[int]]:
        yield [1]
        raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        write_documents(prefix, blocks_of(documents()), np.uint16)
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before
    write_documents(prefix, blocks_of([[5, 6]]), np.uint16)
    assert [d.tolist() for d in IndexedDataset(prefix)] == [[5, 6]]
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["d.bin", "d.idx"]


def test_ids_and_dtypes_out_of_range_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in (-1, 65536):
        with pytest.raises(ConfigError, match=rf"token id {bad} does not fit uint16"):
            write_documents(tmp_path / "d", blocks_of([[3, bad]]), np.uint16)
    with pytest.raises(ConfigError, match="type float32 cannot be stored; use one of uint8"):
        write_documents(tmp_path / "d", [], np.float32)
    monkeypatch.setattr(indexed_dataset, "LENGTH", np.dtype("i1"))
    with pytest.raises(ConfigError, match="a document has 128 tokens; the format allows at most 127: split it"):
        write_documents(tmp_path / "d", blocks_of([[1] * 127, [1] * 128]), np.uint16)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("block", "size", "code"), [(1, 2, 8), (3, 65499, 8), (1000, 65500, 4)])
def test_index_written_in_blocks_has_the_documented_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, size: int, code: int
) -> None:
    draw = random.Random(block)
    documents = [[draw.randrange(60000) for _ in range(draw.randrange(4))] for _ in range(100)]
    documents = [[], *documents, []]
    write_by_layout(tmp_path / "theirs", documents, code=code)
    monkeypatch.setattr(indexed_dataset, "BLOCK", block)
    rest = np.array([token for document in documents[50:] for token in document], dtype=np.int32)
    blocks = [*blocks_of(documents[:50]), (rest, [len(document) for document in documents[50:]])]
    write_documents(tmp_path / "ours", blocks, token_dtype(size))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    assert sorted(path.name for path in tmp_path.glob("ours*")) == ["ours.bin", "ours.idx"]


def test_wrong_lengths_of_another_program(tmp_path: Path) -> None:
    with contextlib.closing(TokenStream(tmp_path / "0", TokenCounts(np.dtype("<u2")), name="d")) as stream:
        stream.append(np.zeros(7, dtype=np.uint16), [3, 4])
    np.array([3, 5], dtype="<i4").tofile(tmp_path / "0.lengths")
    with pytest.raises(ConfigError, match="7 tokens in 2 documents were written, but their lengths sum to 8"):
        stream.write_index()
