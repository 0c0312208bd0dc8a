import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset, token_dtype
from megalite.data.indexed_writer import IndexedDatasetWriter
from tests.data.token_files import write_by_layout

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


POINTERS = 34 + 4 * 4
INDICES = 34 + 12 * 4
FAULTS = {
    "magic": (
        lambda p: change(p / "d.idx", 0, "<B", 0),
        r"d\.idx: starts with b'\\x00MIDIDX.*expected b'MMIDIDX",
    ),
    "version": (lambda p: change(p / "d.idx", 9, "<Q", 2), r"d\.idx: version 2, expected 1"),
    "dtype code": (
        lambda p: change(p / "d.idx", 17, "<B", 9),
        r"d\.idx: dtype code 9, expected one of 1 uint8",
    ),
    "float dtype": (lambda p: change(p / "d.idx", 17, "<B", 7), r"d\.idx: dtype code 7"),
    "wider dtype": (lambda p: change(p / "d.idx", 17, "<B", 4), r"sequence 1 starts at byte 6, expected 12"),
    "sequences": (
        lambda p: change(p / "d.idx", 18, "<Q", 5),
        r"d\.idx: 130 bytes, expected 142 for 5 sequences",
    ),
    "huge count": (lambda p: change(p / "d.idx", 18, "<Q", 1 << 60), r"d\.idx: 130 bytes, expected"),
    "documents": (lambda p: change(p / "d.idx", 26, "<Q", 7), r"expected 138 for 4 sequences and 7 document"),
    "length": (lambda p: change(p / "d.idx", 34, "<i", 4), r"sequence 1 starts at byte 6, expected 8"),
    "negative length": (lambda p: change(p / "d.idx", 38, "<i", -1), r"d\.idx: sequence 1 has length -1"),
    "last length": (lambda p: change(p / "d.idx", 46, "<i", 3), r"d\.bin: truncated: 22 bytes, expected 24"),
    "pointer": (
        lambda p: change(p / "d.idx", POINTERS + 16, "<q", 6),
        r"sequence 2 starts at byte 6, expected 8",
    ),
    "first index": (lambda p: change(p / "d.idx", INDICES, "<q", 1), r"indices run 1 to 4, expected 0 to 4"),
    "last index": (
        lambda p: change(p / "d.idx", INDICES + 40, "<q", 3),
        r"indices run 0 to 3, expected 0 to 4",
    ),
    "falling index": (
        lambda p: change(p / "d.idx", INDICES + 16, "<q", 3),
        r"document 2 holds sequences 3 to 2",
    ),
    "short idx": (lambda p: (p / "d.idx").write_bytes((p / "d.idx").read_bytes()[:-1]), r"d\.idx: 129 bytes"),
    "half header": (
        lambda p: (p / "d.idx").write_bytes((p / "d.idx").read_bytes()[:20]),
        r"at least the header's 34",
    ),
    "empty idx": (lambda p: (p / "d.idx").write_bytes(b""), r"d\.idx: starts with b''"),
    "modes": (
        lambda p: (p / "d.idx").write_bytes((p / "d.idx").read_bytes() + bytes(4)),
        r"multimodal dataset",
    ),
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


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_changed_index_byte_passes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """The documents' borders are the only bytes whose change can be another valid index."""
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    write_by_layout(folder / "d", DOCUMENTS)
    position = data.draw(st.integers(0, INDICES - 1))
    original = (folder / "d.idx").read_bytes()[position]
    change(
        folder / "d.idx", position, "<B", data.draw(st.integers(0, 255).filter(lambda byte: byte != original))
    )
    if position == 17 and (folder / "d.idx").read_bytes()[17] == 3:
        return  # int16 instead of uint16 is a well-formed file; its negative ids fail the vocabulary check
    with pytest.raises(ConfigError, match=r"d\.(idx|bin)"):
        IndexedDataset(folder / "d")


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
