"""Merging and splitting datasets."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.cli.model_commands import PREPROCESS as preprocess_main
from megalite.config.errors import ConfigError
from megalite.data import indexed_dataset
from megalite.data.dataset import split_documents
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.token_files import read_side_file
from megalite.preprocess import merge_split as module
from megalite.preprocess.merge_split import merge, parts_of_equal_tokens, parts_of_split, split_dataset
from megalite.preprocess.verify import verify
from tests.preprocess.layout import LETTERS, MIXED, both, pack, write, write_with_side_file

OTHER = [[], [[20], [21, 22]], [[]]]
TOKENIZER = {"kind": "NullTokenizer", "sha256": "1" * 64, "vocab_size": 100, "eod": 99}


def preprocess(output: Path, *inputs: Path) -> str:
    """Preprocess texts of numbers. Returns the prefix."""
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--append-eod", "--workers", "1"]
    command = ["--input", *map(str, inputs), "--output-prefix", str(output), *flags]
    assert preprocess_main(command) == 0
    return f"{output}_text_document"


@pytest.mark.parametrize("code", LETTERS)
def test_sequences_and_documents_are_unchanged(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if blocks end within a dataset."""
    monkeypatch.setattr(indexed_dataset, "_BLOCK_BYTES", 16)
    monkeypatch.setattr(indexed_dataset, "BLOCK", 2)
    monkeypatch.setattr(module, "BLOCK", 2)
    inputs = [MIXED, [], OTHER, [[]], MIXED]
    prefixes = [write(tmp_path / f"d{i}", content, code=code) for i, content in enumerate(inputs)]
    read: list[int] = []
    written = merge(prefixes, str(tmp_path / "new" / "all"), on_bytes=read.append)
    together = [document for content in inputs for document in content]
    assert both(written.prefix) == pack(together, code=code)
    assert (written.documents, written.sequences, written.tokens) == (16, 19, 29)
    assert sum(read) == len(both(written.prefix)[0])
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["all.bin", "all.idx"]


def test_merge_equals_preprocessing_all_inputs(tmp_path: Path) -> None:
    texts = [["1 2 3", "4", "oops", "7 8"], ["5 6", "", "98 97 1 1 1"], ["2 2 2"]]
    paths = []
    for name, lines in zip("abc", texts, strict=True):
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    together = preprocess(tmp_path / "together", *paths)
    parts = [preprocess(tmp_path / path.stem, path) for path in paths]
    merged = merge(parts, str(tmp_path / "merged")).prefix
    assert both(merged) == both(together)
    assert read_side_file(merged) == read_side_file(together)
    assert verify(merged).hashed


def test_merge_uses_the_widest_dtype(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", MIXED), write(tmp_path / "b", [[[70000]]], code=4)
    output = str(tmp_path / "all")
    with pytest.raises(ConfigError, match=r"a has uint16 tokens, .*b int32; add --dtype int32"):
        merge([a, b], output)
    merge([a, b], output, dtype="int32")
    assert both(output) == pack([*MIXED, [[70000]]], code=4)
    merge([a], str(tmp_path / "narrow"), dtype="uint8")
    assert both(tmp_path / "narrow") == pack(MIXED, code=1)
    with pytest.raises(ConfigError, match=r"b\.bin: token id 70000 does not fit uint16 \(0 to 65535\)"):
        merge([a, b], str(tmp_path / "no"), dtype="uint16")
    assert not list(tmp_path.glob("no*"))


def test_merge_of_different_tokenizers_is_an_error(tmp_path: Path) -> None:
    a = write_with_side_file(tmp_path / "a", MIXED, tokenizer=TOKENIZER)
    b = write_with_side_file(tmp_path / "b", MIXED, tokenizer=TOKENIZER | {"sha256": "2" * 64})
    with pytest.raises(ConfigError, match=r"a was made with NullTokenizer 1{12}, .*b with NullTokenizer 2{12}"):
        merge([a, write(tmp_path / "c", MIXED), b], str(tmp_path / "all"))
    assert not list(tmp_path.glob("all*"))


def test_side_file_has_only_facts_common_to_all(tmp_path: Path) -> None:
    facts = {"tokenizer": TOKENIZER, "key": "text"}
    a = write_with_side_file(tmp_path / "a", [[[1, 99]]], append_eod=True, bad_lines={"x": 1}, **facts)
    b = write_with_side_file(tmp_path / "b", [[[2, 1]]], append_eod=False, **facts)
    side = read_side_file(merge([a, b], str(tmp_path / "ab")).prefix)
    assert side is not None
    assert (side["documents"], side["tokens"], side["key"], side["tokenizer"]) == (2, 4, "text", TOKENIZER)
    assert not {"append_eod", "bad_lines"} & set(side)
    assert verify(str(tmp_path / "ab")).fault is None
    # A part without a side file: its tokenizer is unknown.
    written = merge([a, write(tmp_path / "c", MIXED)], str(tmp_path / "ac"))
    assert not written.files and not (tmp_path / "ac.json").exists()


@pytest.mark.parametrize("at", [".idx", ".json", "folder"])
def test_merge_writes_all_files_or_none(tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a failure at any step from the last byte to the last rename."""
    a = write_with_side_file(tmp_path / "a", MIXED, tokenizer=TOKENIZER)
    before = sorted(tmp_path.iterdir())
    replace = Path.replace

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    def replace_or_fail(self: Path, target: str) -> Path:
        return fail() if target.endswith(at) else replace(self, target)  # type: ignore[return-value]

    monkeypatch.setattr(Path, "replace", replace_or_fail)
    if at == "folder":
        monkeypatch.setattr(indexed_dataset, "sync_folder", lambda _: fail() if list(tmp_path.glob("all*")) else None)
    with pytest.raises(OSError, match="disk full"):
        merge([a], str(tmp_path / "all"))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("suffix", "offset"), [(".bin", 2), (".idx", 34 + 12 * 8 + 8)])
def test_changed_inputs_are_an_error(tmp_path: Path, suffix: str, offset: int) -> None:
    """A changed id or document border must not get a valid sha256 in the new side file."""
    a = write_with_side_file(tmp_path / "a", MIXED)
    merge([a], str(tmp_path / "wide"), dtype="int32")
    data = bytearray(Path(a + suffix).read_bytes())
    data[offset] ^= 2
    Path(a + suffix).write_bytes(data)
    for dtype in (None, "int32"):
        with pytest.raises(ConfigError, match=rf"a\{suffix} is damaged: sha256 is .*; copy it again"):
            merge([a], str(tmp_path / "all"), dtype=dtype)
    assert not list(tmp_path.glob("all*"))


def test_failure_keeps_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has written datasets with the output's name in the meantime."""
    a = write(tmp_path / "a", MIXED)

    def fail(*arguments: object, **settings: object) -> None:
        write(tmp_path / "all", OTHER)
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_index", fail)
        with pytest.raises(OSError, match="disk full"):
            merge([a], str(tmp_path / "all"))
    assert both(tmp_path / "all") == pack(OTHER)
    replace = Path.replace

    def replace_or_fail(self: Path, target: str) -> Path:
        if target.endswith(".idx"):
            (tmp_path / "new.json").write_text("theirs")
            raise OSError("disk full")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_or_fail)
    with pytest.raises(OSError, match="disk full"):
        merge([a], str(tmp_path / "new"))
    assert [path.name for path in tmp_path.glob("new*")] == ["new.json"]


def test_damaged_inputs_are_an_error(tmp_path: Path) -> None:
    a = write_with_side_file(tmp_path / "a", [[[100]]], tokenizer=TOKENIZER)
    with pytest.raises(ConfigError, match=r"a\.bin: token id 100, expected 0 to 99"):
        merge([a], str(tmp_path / "all"))
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"a\.bin: truncated"):
        merge([a], str(tmp_path / "all"))
    assert not list(tmp_path.glob("all*"))


@pytest.mark.parametrize("changed", [OTHER, [*MIXED[:-1], [[10]]]])
def test_dataset_changed_during_the_merge_is_an_error(
    tmp_path: Path, changed: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = write(tmp_path / "a", MIXED), write(tmp_path / "b", MIXED)
    monkeypatch.setattr(module, "free_bytes", lambda folder: len(write(tmp_path / "b", changed)) << 40)
    with pytest.raises(ConfigError, match="b changed while it was read"):
        merge([a, b], str(tmp_path / "all"))
    assert not list(tmp_path.glob("all*"))


def test_merge_of_more_datasets_than_open_files(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    prefixes = [write(tmp_path / f"d{i:03d}", [[[i]]]) for i in range(60)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Files left open by earlier tests count too.
    table = Path("/proc/self/fd")
    taken = max(int(entry.name) for entry in table.iterdir()) if table.is_dir() else 30
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 20, hard))
    try:
        merge(prefixes, str(tmp_path / "all"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert both(tmp_path / "all") == pack([[[i]] for i in range(60)])


def outputs(folder: Path, parts: list[range]) -> list[tuple[str, range]]:
    return [(str(folder / f"part{i}"), part) for i, part in enumerate(parts) if part]


@pytest.mark.parametrize("parts", [1, 6])
def test_merged_parts_equal_the_split_dataset(tmp_path: Path, parts: int) -> None:
    prefix = write(tmp_path / "d", MIXED)
    ranges = parts_of_equal_tokens(IndexedDataset(prefix), parts)
    assert len(ranges) == parts and all(ranges)
    written = split_dataset(prefix, outputs(tmp_path, ranges))
    for part, documents in zip(written, ranges, strict=True):
        assert both(part.prefix) == pack(MIXED[documents.start : documents.stop])
    assert both(merge([part.prefix for part in written], str(tmp_path / "all")).prefix) == both(prefix)


def test_parts_have_similar_numbers_of_tokens(tmp_path: Path) -> None:
    lengths = [5, 1, 1, 1, 40, 2, 9, 30, 1, 10]
    dataset = IndexedDataset(write(tmp_path / "d", [[[0] * length] for length in lengths]))
    for parts in range(1, 11):
        ranges = parts_of_equal_tokens(dataset, parts)
        assert [i for documents in ranges for i in documents] == list(range(10))
        assert all(ranges)
    # Documents end after 5, 6, 7, 8, 48, 50, 59, 89, 90 and 100 tokens; 8, 50 and 89 are nearest to 25, 50 and 75.
    assert [documents.stop for documents in parts_of_equal_tokens(dataset, 4)] == [4, 6, 8, 10]
    for bad in (0, 11):
        with pytest.raises(ConfigError, match=f"parts {bad}: .* has 10 documents; use 1 to 10"):
            parts_of_equal_tokens(dataset, bad)


@pytest.mark.parametrize("split", ["969,30,1", "0,1,0", "2,1,1", "0.9,0.05,0.05"])
@pytest.mark.parametrize("documents", [1, 101])
def test_split_equals_the_split_of_a_run(tmp_path: Path, split: str, documents: int) -> None:
    prefix = write(tmp_path / "d", [[[i, i]] for i in range(documents)])
    parts = parts_of_split(IndexedDataset(prefix), split)
    assert [[*part] for part in parts] == [[*part] for part in split_documents(split, documents)]
    written = split_dataset(prefix, outputs(tmp_path, parts))
    assert both(merge([part.prefix for part in written], str(tmp_path / "all")).prefix) == both(prefix)


def test_split_by_sequences(tmp_path: Path) -> None:
    """Documents without a sequence belong to the part before them; no document is divided."""
    dataset = IndexedDataset(write(tmp_path / "d", [[], [[1], [2]], [], [[3], [4]], []]))
    assert parts_of_split(dataset, "1,1") == [range(2), range(2, 5), range(5, 5)]
    assert parts_of_split(dataset, "0,1,0") == [range(0), range(5), range(5, 5)]
    with pytest.raises(ConfigError, match=r"train ends before sequence 3, within document 3 \(sequences 2 to 3\)"):
        parts_of_split(dataset, "3,1")
    empty = IndexedDataset(write(tmp_path / "e", [[], []]))
    assert parts_of_split(empty, "1,1") == [range(2), range(2, 2), range(2, 2)]


def test_parts_have_side_files(tmp_path: Path) -> None:
    prefix = write_with_side_file(tmp_path / "d", MIXED, tokenizer=TOKENIZER, append_eod=False, bad_lines={"x": 1})
    [_, part] = split_dataset(prefix, outputs(tmp_path, [range(1), range(1, 6)]))
    side = read_side_file(part.prefix)
    assert side is not None
    whole = read_side_file(prefix)
    assert whole is not None
    bin_sha256 = whole["files"][".bin"]["sha256"]
    assert side["part_of"] == {"documents": 6, "tokens": 13, "first_document": 1, "bin_sha256": bin_sha256}
    assert (side["documents"], side["tokens"], side["tokenizer"]) == (5, 10, TOKENIZER)
    assert side["document_lengths"] == {"min": 0, "mean": 2.0, "max": 4, "buckets": {"0": 2, "2": 2, "4": 1}}
    assert side["append_eod"] is False and "bad_lines" not in side
    result = verify(part.prefix)
    assert result.fault is None and result.hashed


@pytest.mark.parametrize("at", ["part2.bin", "part2.json", "the third"])
def test_split_writes_all_parts_or_none(tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a signal arrives after some were renamed."""
    prefix = write_with_side_file(tmp_path / "d", MIXED, tokenizer=TOKENIZER)
    before = sorted(tmp_path.iterdir())
    replace, write_parts = Path.replace, module._write_parts

    def replace_or_stop(self: Path, target: str) -> Path:
        if target.endswith(at):
            raise KeyboardInterrupt
        return replace(self, target)

    def write_or_stop(stem: Path, *arguments: Any, **settings: Any) -> module.Written:
        if at == "the third" and stem.name == "2":
            raise KeyboardInterrupt
        return write_parts(stem, *arguments, **settings)

    monkeypatch.setattr(Path, "replace", replace_or_stop)
    monkeypatch.setattr(module, "_write_parts", write_or_stop)
    with pytest.raises(KeyboardInterrupt):
        split_dataset(prefix, outputs(tmp_path, [range(1), range(1, 3), range(3, 6)]))
    assert sorted(tmp_path.iterdir()) == before
