"""Datasets of a command line, their contents, and the first wrong byte."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config.errors import ConfigError
from megalite.data import indexed_dataset
from megalite.data.indexed_dataset import IndexedDataset, UnsupportedDataset, first_token, lengths_in_blocks, token_ends
from megalite.preprocess.output import refuse_existing
from megalite.preprocess.verify import find_prefixes, inspect, parse_documents, verify
from tests.data.token_files import change
from tests.preprocess.layout import LETTERS, MIXED, write, write_with_side_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b", "a", "c.idx"):
        write(tmp_path / name, MIXED)
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    return tmp_path


def test_prefixes_files_and_folders(folder: Path) -> None:
    a, b, c = (str(folder / name) for name in ("a", "b", "c.idx"))
    assert find_prefixes([b, a]) == [b, a]
    assert find_prefixes([f"{b}.bin", f"{b}.idx", f"{a}.json"]) == [b, a]
    assert find_prefixes([str(folder)]) == [a, b, c]
    assert find_prefixes([c]) == [c]
    assert find_prefixes([f"{b}.bin", a, f"{folder}/./b.idx"]) == [f"{b}", a]
    Path(f"{b}.bin").unlink()
    # The error is that of opening it.
    assert find_prefixes([str(folder)]) == [a, b, c] and find_prefixes([b]) == [b]
    (folder / "h.bin").write_bytes(b"")
    assert find_prefixes([f"{folder}/h.bin"]) == find_prefixes([f"{folder}/h"]) == [f"{folder}/h"]


def test_repeated_dataset_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under any name: in a merge its documents would count twice."""
    monkeypatch.chdir(folder)
    (folder / "link").symlink_to(".")
    (folder / "links").mkdir()
    for suffix in (".bin", ".idx"):
        (folder / "links" / f"alias{suffix}").symlink_to(folder / f"a{suffix}")
    for entries in (
        "a a",
        "a.bin b a.bin",
        "a ./a",
        "a a.idx",
        "a.idx a",
        "a.bin ./a.bin",
        "a link/a",
        "a links",
        "b .",
    ):
        with pytest.raises(ConfigError, match=r"[ab] and .* are one dataset; give each dataset once"):
            find_prefixes(entries.split())


def test_invalid_paths_are_errors(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither .*zzz\.idx nor a folder"):
        find_prefixes([str(folder / "zzz")])
    (folder / "empty").mkdir()
    with pytest.raises(ConfigError, match="contains no dataset"):
        find_prefixes([str(folder / "empty")])


def test_existing_outputs_are_refused(folder: Path) -> None:
    refuse_existing([str(folder / "new")])
    (folder / "new.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"new\.json exists"):
        refuse_existing([str(folder / "other"), str(folder / "new")])
    for nameless in (f"{folder}/sub/", f"{folder}/..", ""):
        with pytest.raises(ConfigError, match=r"output_prefix .* has no name; use one such as .*whole"):
            refuse_existing([nameless])
    with pytest.raises(ConfigError, match="must be a path on this machine"):
        refuse_existing(["gs://bucket/whole"])


LENGTHS = [3, 3, 0, 0, 3, 4]


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    return IndexedDataset(write(tmp_path / "d", MIXED))


def test_offsets_of_documents(dataset: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = np.cumsum(LENGTHS).tolist()
    assert token_ends(dataset, range(6)).tolist() == ends
    assert token_ends(dataset, range(2, 5)).tolist() == ends[2:5]
    assert [first_token(dataset, i) for i in range(7)] == [0, *ends]
    for block in (1, 2, 4, 100):
        monkeypatch.setattr(indexed_dataset, "BLOCK", block)
        assert np.concatenate(list(lengths_in_blocks(dataset, range(6)))).tolist() == LENGTHS
        assert np.concatenate(list(lengths_in_blocks(dataset, range(1, 5)))).tolist() == LENGTHS[1:5]
    behind = IndexedDataset(write(tmp_path / "e", [[[1, 2]], [], []]))  # the last sequence
    assert token_ends(behind, range(3)).tolist() == [2, 2, 2]


def test_ranges_of_documents(dataset: IndexedDataset, tmp_path: Path) -> None:
    expected = {"0:3": range(3), "2:": range(2, 6), ":2": range(2), "4": range(4, 5), ":": range(6)}
    assert {text: parse_documents(text, dataset) for text in expected} == expected
    for bad in ("x", "1:2:3", "", "1.5"):
        with pytest.raises(ConfigError, match="is not a range of numbers; give a range such as 0:3"):
            parse_documents(bad, dataset)
    with pytest.raises(ConfigError, match=r"'4:2': the range ends before it starts \(the end is .*give a range such"):
        parse_documents("4:2", dataset)
    with pytest.raises(ConfigError, match="'3:3': the range is empty"):
        parse_documents("3:3", dataset)
    for bad in ("7:", "7:7", "9:8", "0:7", "6", "-1:3"):
        with pytest.raises(ConfigError, match="has the documents 0 to 5"):
            parse_documents(bad, dataset)
    empty = IndexedDataset(write(tmp_path / "e", []))
    for text in ("0", "x", ":"):
        with pytest.raises(ConfigError, match="e has no documents; give a dataset that has"):
            parse_documents(text, empty)


def test_summary_of_a_dataset(tmp_path: Path) -> None:
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


EOD = 99
TOKENIZER = {"kind": "NullTokenizer", "sha256": "0" * 64, "vocab_size": 100, "eod": EOD}
ENDED = [[[1, 2, EOD]], [], [[3], [4, EOD]], [[EOD], []]]


def test_valid_datasets_pass(tmp_path: Path) -> None:
    read: list[int] = []
    result = verify(write(tmp_path / "d", MIXED), vocab_size=14, on_bytes=read.append)
    assert (result.fault, result.documents, result.sequences, result.tokens) == (None, 6, 8, 13)
    assert (result.dtype, result.largest_id, result.vocab_size) == ("uint16", 13, 14)
    assert (result.hashed, result.eod) == (False, None)
    assert sum(read) == result.bytes == 13 * 2 + 34 + 12 * 8 + 8 * 7
    empty = verify(write(tmp_path / "e", []))
    assert (empty.fault, empty.tokens, empty.largest_id) == (None, 0, None)


@pytest.mark.parametrize("code", LETTERS)
def test_ids_outside_the_vocabulary_are_found(tmp_path: Path, code: int) -> None:
    prefix = write(tmp_path / "d", MIXED, code=code)
    assert verify(prefix, vocab_size=14).fault is None
    fault = verify(prefix, vocab_size=9).fault
    size = struct.calcsize(LETTERS[code])
    assert fault is not None
    assert (fault.path, fault.offset) == (f"{prefix}.bin", 8 * size)
    assert fault.text == (
        f"{prefix}.bin: byte {8 * size}: token id 9 (document 4, sequence 6, token 0), expected an id from 0 to 8"
    )
    if LETTERS[code].islower():
        change(f"{prefix}.bin", 4 * size, f"<{LETTERS[code]}", -3)
        for vocab_size in (None, 9):
            fault = verify(prefix, vocab_size=vocab_size).fault
            assert fault is not None and fault.offset == 4 * size
            assert "token id -3 (document 1, sequence 3, token 0), expected " in fault.text


def test_vocabulary_of_the_side_file_is_used(tmp_path: Path) -> None:
    prefix = write_with_side_file(tmp_path / "d", [[[5, 100]]], tokenizer=TOKENIZER)
    fault = verify(prefix).fault
    assert fault is not None and fault.text.endswith("token id 100 (document 0, token 1), expected an id from 0 to 99")
    # A larger size does not override it, a smaller one does.
    result = verify(prefix, vocab_size=101)
    assert (result.fault, result.vocab_size) == (fault, 100)
    assert verify(prefix, vocab_size=5).vocab_size == 5


def test_missing_ends_of_documents_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, Any] = {"tokenizer": TOKENIZER, "append_eod": True}
    prefix = write_with_side_file(tmp_path / "d", ENDED, **facts)
    result = verify(prefix)
    assert (result.fault, result.eod, result.hashed) == (None, EOD, True)
    unended = [*ENDED, [], [[7, EOD], [8]], [[9]]]
    prefix = write_with_side_file(tmp_path / "u", unended, **facts)
    # The first fault is named, for any block size.
    for block_bytes in (2, 4, 6, 1 << 20):
        monkeypatch.setattr(indexed_dataset, "_BLOCK_BYTES", block_bytes)
        fault = verify(prefix).fault
        assert fault is not None and fault.offset == 18
        assert "ends with token id 8 (document 5, sequence 6, token 0), expected its end 99" in fault.text
        # A bad id is named if it comes first.
        fault = verify(prefix, vocab_size=7).fault  # below the side file's size
        assert fault is not None and "token id 99" in fault.text and fault.offset == 4
    prefix = write_with_side_file(tmp_path / "n", unended, tokenizer=TOKENIZER, append_eod=False)
    assert verify(prefix).fault is None


FAULTS: dict[str, tuple[Callable[[Path], None], str, int | None, str]] = {
    "length": (lambda p: change(f"{p}.idx", 34, "<i", 4), ".idx", 74, "sequence 1 starts at byte 6, expected 8"),
    "dtype": (lambda p: change(f"{p}.idx", 17, "<B", 9), ".idx", 17, "dtype code 9, expected one of"),
    "short": (lambda p: Path(f"{p}.bin").write_bytes(bytes(3)), ".bin", 3, "truncated: 3 bytes, expected 26"),
    "border": (lambda p: change(f"{p}.idx", 138, "<q", 3), ".idx", None, "sha256 is"),
    "token": (lambda p: change(f"{p}.bin", 4, "<H", 2), ".bin", None, "sha256 is"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_first_fault_is_named(tmp_path: Path, name: str) -> None:
    damage, suffix, offset, text = FAULTS[name]
    prefix = write_with_side_file(tmp_path / "d", MIXED)
    assert verify(prefix).fault is None
    damage(tmp_path / "d")
    fault = verify(prefix).fault
    assert fault is not None
    assert (fault.path, fault.offset) == (prefix + suffix, offset)
    assert fault.text.startswith(prefix + suffix) and text in fault.text
    assert (verify(prefix, hashes=False).fault is None) == (text == "sha256 is")


@pytest.mark.parametrize(("name", "value"), [("documents", 7), ("tokens", 12), ("dtype", "int32")])
def test_side_file_of_another_dataset_is_an_error(tmp_path: Path, name: str, value: object) -> None:
    prefix = write_with_side_file(tmp_path / "d", MIXED, **{name: value})
    fault = verify(prefix, hashes=False).fault
    assert fault is not None and f"d.json: {name} is {value!r}, expected " in fault.text


def test_bad_input_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"zzz\.idx does not exist"):
        verify(str(tmp_path / "zzz"))
    prefix = write(tmp_path / "d", MIXED)
    Path(f"{prefix}.json").write_text("[" * 10**5)
    result = verify(prefix)
    assert (result.fault, result.has_side_file, result.bad_side_file) == (None, False, None)
    change(f"{prefix}.idx", 17, "<B", 7)
    with pytest.raises(UnsupportedDataset, match="dtype code 7"):
        verify(prefix)


@pytest.mark.parametrize("side", [{"format": 99}, {"format": 1}])
def test_files_are_checked_despite_a_bad_side_file(tmp_path: Path, side: dict[str, int]) -> None:
    prefix = write(tmp_path / "d", MIXED)
    Path(f"{prefix}.json").write_text(json.dumps(side))
    result = verify(prefix, vocab_size=14)
    assert result.fault is None and f"{prefix}.json: " in str(result.bad_side_file)
    assert (result.largest_id, result.has_side_file, result.hashed) == (13, False, False)
    fault = verify(prefix, vocab_size=9).fault
    assert fault is not None and fault.path == f"{prefix}.bin"
    change(f"{prefix}.idx", 34, "<i", 4)
    result = verify(prefix)
    assert result.fault is not None and result.fault.path == f"{prefix}.idx" and result.bad_side_file


def test_unsupported_dtype_with_a_side_file_is_damage(tmp_path: Path) -> None:
    """A dtype code of floats is then a flipped bit."""
    prefix = write_with_side_file(tmp_path / "d", MIXED)
    change(f"{prefix}.idx", 17, "<B", 7)
    fault = verify(prefix).fault
    assert fault is not None and (fault.path, fault.offset) == (f"{prefix}.idx", 17)
    assert "d.json is of one with uint16 tokens: bytes have changed since" in fault.text
