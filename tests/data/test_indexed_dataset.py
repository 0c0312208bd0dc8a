import os
import pickle
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megalite.config.errors import ConfigError
from megalite.data import indexed_dataset
from megalite.data.indexed_dataset import DatasetFault, IndexedDataset, UnsupportedDataset, token_dtype
from megalite.data.indexed_writer import IndexedDatasetWriter
from tests.data.token_files import write_by_layout
from tests.data.tools.layout import MIXED, write

DOCUMENTS = [[1, 2, 3], [65000], [], [7, 8, 9, 10, 11], [12, 13]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_by_layout(tmp_path / "d", DOCUMENTS)
    return tmp_path / "d"


@pytest.mark.parametrize(("dtype", "code", "letter"), [("u2", 8, "H"), ("i4", 4, "i")])
def test_writer_bytes_equal_the_documented_layout(tmp_path: Path, dtype: str, code: int, letter: str) -> None:
    write_by_layout(tmp_path / "theirs", DOCUMENTS, code=code, letter=letter)
    with IndexedDatasetWriter(tmp_path / "ours", np.dtype(dtype)) as writer:
        writer.add_document(DOCUMENTS[0])
        flat = np.array([token for document in DOCUMENTS[1:] for token in document])
        writer.add_documents(flat, [len(document) for document in DOCUMENTS[1:]])
    assert (writer.num_documents, writer.num_tokens) == (5, 11)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_reads_what_the_layout_says(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [d for d in DOCUMENTS if d]
    assert dataset.sizes.tolist() == [3, 1, 5, 2]
    assert dataset.document_indices.tolist() == [0, 1, 2, 2, 3, 4]
    assert (dataset.dtype, dataset.num_tokens, dataset.max_token_id()) == (np.dtype("<u2"), 11, 65000)
    assert dataset.read(2, 1, 3).tolist() == [8, 9, 10]
    assert dataset[-1].tolist() == [12, 13]
    with pytest.raises(IndexError, match=r"\[3, 6\) of sequence 2, which has 5"):
        dataset.read(2, 3, 3)
    with pytest.raises(IndexError, match="sequence 4 of 4"):
        dataset[4]


@pytest.mark.parametrize(("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_every_integer_type_is_read(tmp_path: Path, code: int, letter: str) -> None:
    write_by_layout(tmp_path / "d", [[1, 2], [100]], code=code, letter=letter)
    assert [sequence.tolist() for sequence in IndexedDataset(tmp_path / "d")] == [[1, 2], [100]]


def test_empty_dataset(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "d", np.uint16):
        pass
    dataset = IndexedDataset(tmp_path / "d")
    assert (len(dataset), dataset.num_tokens, dataset.max_token_id()) == (0, 0, -1)


def test_max_token_id_of_a_sample_reads_spread_blocks(tmp_path: Path) -> None:
    tokens = np.zeros(5 << 20, dtype=np.uint16)
    tokens[(2 << 20) + 5] = 9
    tokens[(1 << 20) + 5] = 11
    with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document(tokens)
    dataset = IndexedDataset(tmp_path / "d")
    assert dataset.max_token_id() == 11
    assert dataset.max_token_id(sample=len(tokens) // 2) == 9


def test_dtype_rule() -> None:
    assert [token_dtype(size).name for size in (2, 65499, 65500, 128256)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]


def change(path: Path, offset: int, fmt: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(fmt, data, offset, value)
    path.write_bytes(data)


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
FAULTS = {
    "magic": (
        lambda p: change(p / "d.idx", 0, "<B", 0),
        r"d\.idx: byte 0: starts with b'\\x00MIDIDX.*expected b'MMIDIDX",
    ),
    "version": (
        lambda p: change(p / "d.idx", 9, "<Q", 1 << 32),
        r"byte 9: version 4294967296, expected 1; write",
    ),
    "dtype code": (
        lambda p: change(p / "d.idx", 17, "<B", 9),
        r"d\.idx: byte 17: dtype code 9, expected one of 1 uint8",
    ),
    "wider dtype": (
        lambda p: change(p / "d.idx", 17, "<B", 4),
        r"d\.idx: byte 58: sequence 1 starts at byte 6, expected 12",
    ),
    "sequences": (
        lambda p: change(p / "d.idx", 18, "<Q", 5),
        r"d\.idx: 130 bytes, expected 142 for 5 sequences",
    ),
    "huge count": (lambda p: change(p / "d.idx", 18, "<Q", 1 << 60), r"d\.idx: 130 bytes, expected"),
    "documents": (lambda p: change(p / "d.idx", 26, "<Q", 7), r"expected 138 for 4 sequences and 7 document"),
    "length": (
        lambda p: change(p / "d.idx", 34, "<i", 4),
        r"d\.idx: byte 58: sequence 1 starts at byte 6, expected 8",
    ),
    "negative length": (
        lambda p: change(p / "d.idx", 38, "<i", -1),
        r"d\.idx: byte 38: sequence 1 has length -1, expected",
    ),
    "last length": (lambda p: change(p / "d.idx", 46, "<i", 3), r"d\.bin: truncated: 22 bytes, expected 24"),
    "pointer": (
        lambda p: change(p / "d.idx", POINTERS + 16, "<q", 6),
        r"d\.idx: byte 66: sequence 2 starts at byte 6, expected 8",
    ),
    "first index": (
        lambda p: change(p / "d.idx", INDICES, "<q", 1),
        r"d\.idx: byte 82: document indices start with 1, expected 0",
    ),
    "last index": (
        lambda p: change(p / "d.idx", INDICES + 40, "<q", 3),
        r"d\.idx: byte 122: document indices end with 3, expected 4",
    ),
    "falling index": (
        lambda p: change(p / "d.idx", INDICES + 16, "<q", 3),
        r"d\.idx: byte 106: document 2 holds sequences 3 to 2",
    ),
    "short idx": (lambda p: (p / "d.idx").write_bytes((p / "d.idx").read_bytes()[:-1]), r"d\.idx: 129 bytes"),
    "half header": (
        lambda p: (p / "d.idx").write_bytes((p / "d.idx").read_bytes()[:20]),
        r"at least the header's 34",
    ),
    "empty idx": (lambda p: (p / "d.idx").write_bytes(b""), r"d\.idx: byte 0: starts with b''"),
    "no document index": (
        lambda p: no_document_index(p / "d.idx"),
        r"byte 26: no document indices, expected 4",
    ),
    "swapped": (
        lambda p: swap(p / "d.idx", p / "d.bin"),
        r"d\.bin like an index \(have the two changed names",
    ),
    "folder": (lambda p: replace_by_folder(p / "d.idx"), r"d\.idx is a folder, expected a plain file"),
    "pipe": (lambda p: replace_by_pipe(p / "d.bin"), r"d\.bin is a pipe or a device, expected a plain file"),
    "dangling link": (lambda p: dangle(p / "d.idx"), r"d\.idx cannot be read: No such file"),
    "short bin": (
        lambda p: (p / "d.bin").write_bytes(bytes(21)),
        r"d\.bin: truncated: 21 bytes, expected 22",
    ),
    "long bin": (
        lambda p: (p / "d.bin").write_bytes(bytes(24)),
        r"d\.bin: longer than its index says: 24 bytes",
    ),
    "no bin": (lambda p: (p / "d.bin").unlink(), r"d\.bin does not exist; a dataset is a pair"),
    "no idx": (lambda p: (p / "d.idx").unlink(), r"d\.idx does not exist; a dataset is a pair"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_at_open(prefix: Path, fault: str) -> None:
    damage, message = FAULTS[fault]
    damage(prefix.parent)
    with pytest.raises(ConfigError, match=message):
        IndexedDataset(prefix)


UNSUPPORTED = {
    "version": (lambda p: change(p, 9, "<Q", 2), r"byte 9: version 2 of the format, expected 1"),
    "float64": (lambda p: change(p, 17, "<B", 6), "byte 17: dtype code 6, float64"),
    "float32": (lambda p: change(p, 17, "<B", 7), "byte 17: dtype code 7, float32"),
    "modes": (
        lambda p: p.write_bytes(p.read_bytes() + bytes(4)),
        "byte 130: mode bytes of a multimodal dataset",
    ),
    "TNTIDX": (
        lambda p: p.write_bytes(b"TNTIDX\0\0" + bytes(40)),
        "byte 0: starts with TNTIDX, the format that fairseq and Megatron-LM had before MMIDIDX",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_sound_file_of_another_kind_is_not_called_damaged(prefix: Path, kind: str) -> None:
    make, message = UNSUPPORTED[kind]
    make(prefix.with_suffix(".idx"))
    with pytest.raises(
        UnsupportedDataset,
        match=rf"d\.idx: {message}.*: not supported; write the dataset again from its text with",
    ) as raised:
        IndexedDataset(prefix)
    assert "copy it again" not in str(raised.value)


def test_a_fault_tells_its_place(prefix: Path) -> None:
    change(prefix.with_suffix(".idx"), POINTERS + 8, "<q", 5)
    with pytest.raises(DatasetFault) as raised:
        IndexedDataset(prefix)
    for error in (raised.value, pickle.loads(pickle.dumps(raised.value))):
        assert (error.path, error.offset, str(error)) == (f"{prefix}.idx", POINTERS + 8, str(raised.value))


def test_links_are_followed(prefix: Path) -> None:
    for suffix in (".bin", ".idx"):
        (prefix.parent / f"link{suffix}").symlink_to(f"d{suffix}")
    assert IndexedDataset(prefix.parent / "link").num_tokens == 11


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser reads everything")
def test_a_file_that_may_not_be_read(prefix: Path) -> None:
    prefix.with_suffix(".bin").chmod(0)
    with pytest.raises(ConfigError, match=r"d\.bin cannot be read: Permission denied"):
        IndexedDataset(prefix)


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_header = IndexedDataset._read_header

    def cut_then(self: IndexedDataset, descriptor: int) -> tuple[np.dtype, int, int]:
        found = read_header(self, descriptor)
        os.truncate(self.idx_path, 40)
        return found

    monkeypatch.setattr(IndexedDataset, "_read_header", cut_then)
    with pytest.raises(ConfigError, match=rf"^{prefix}\.idx ends at byte 40, sooner than when it was opened"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("block", [1, 2, 3, 5])
def test_faults_are_found_at_the_edges_of_blocks(
    prefix: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_dataset, "_BLOCK", block)
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


def test_lying_counts_take_no_memory(prefix: Path) -> None:
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


def test_opening_takes_no_memory_for_many_sequences(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_documents(np.zeros(1 << 20, dtype=np.uint16), [1] * (1 << 20))
    tracemalloc.start()
    dataset = IndexedDataset(tmp_path / "d")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(dataset) == 1 << 20
    assert peak < 4 << 20


def test_sequences_without_tokens(tmp_path: Path) -> None:
    """Megatron-LM's and datatrove's builders write one for empty text."""
    write(tmp_path / "d", MIXED)
    dataset = IndexedDataset(tmp_path / "d")
    assert [sequence.tolist() for sequence in dataset] == [s for document in MIXED for s in document]
    assert (dataset.num_documents, dataset.num_tokens, dataset.max_token_id()) == (6, 13, 13)


def test_a_failed_writer_leaves_what_was_there(prefix: Path) -> None:
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}
    with pytest.raises(RuntimeError, match="power"), IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document([1])
        raise RuntimeError("power")
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before


def test_a_writer_replaces_both_files_and_leaves_no_others(prefix: Path) -> None:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document([5, 6])
        assert [d.tolist() for d in IndexedDataset(prefix)] == [d for d in DOCUMENTS if d]
    assert [d.tolist() for d in IndexedDataset(prefix)] == [[5, 6]]
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["d.bin", "d.idx"]


@pytest.mark.parametrize("bad", [-1, 65536])
def test_ids_that_do_not_fit_are_refused(tmp_path: Path, bad: int) -> None:
    with (
        pytest.raises(ConfigError, match=rf"token id {bad} does not fit uint16"),
        IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer,
    ):
        writer.add_document([3, bad])


def test_float_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="type float32 cannot be stored; use one of uint8"):
        IndexedDatasetWriter(tmp_path / "d", np.float32)
