from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.side_file import read_side_file
from megalite.data.splits import split_documents
from megalite.data.tools import split as module
from megalite.data.tools.copying import Written, write_stretches
from megalite.data.tools.merge import merge
from megalite.data.tools.split import parts_of_equal_tokens, parts_of_split, split_dataset
from megalite.data.tools.verify import verify
from tests.data.tools.layout import MIXED, both, pack, write, write_with_side_file

TOKENIZER = {"kind": "NullTokenizer", "sha256": "1" * 64, "vocab_size": 100, "eod": 99}


def outputs(folder: Path, parts: list[range]) -> list[tuple[str, range]]:
    return [(str(folder / f"part{i}"), part) for i, part in enumerate(parts) if part]


@pytest.mark.parametrize("parts", range(1, 7))
def test_parts_merge_to_what_was_split(tmp_path: Path, parts: int) -> None:
    prefix = write(tmp_path / "d", MIXED)
    ranges = parts_of_equal_tokens(IndexedDataset(prefix), parts)
    assert len(ranges) == parts and all(ranges)
    written = split_dataset(prefix, outputs(tmp_path, ranges))
    for part, documents in zip(written, ranges, strict=True):
        assert both(part.prefix) == pack(MIXED[documents.start : documents.stop])
    assert both(merge([part.prefix for part in written], str(tmp_path / "all")).prefix) == both(prefix)


def test_parts_have_about_as_many_tokens(tmp_path: Path) -> None:
    lengths = [5, 1, 1, 1, 40, 2, 9, 30, 1, 10]
    dataset = IndexedDataset(write(tmp_path / "d", [[[0] * length] for length in lengths]))
    for parts in range(1, 11):
        ranges = parts_of_equal_tokens(dataset, parts)
        assert [i for documents in ranges for i in documents] == list(range(10))
        assert all(ranges)
    # Documents end after 5, 6, 7, 8, 48, 50, 59, 89, 90 and 100 tokens; 8, 50 and 89 are nearest to 25, 50 and 75.
    assert [documents.stop for documents in parts_of_equal_tokens(dataset, 4)] == [4, 6, 8, 10]
    for bad in (0, 11):
        with pytest.raises(ConfigError, match=f"parts {bad}: .* has 10 documents; give 1 to 10"):
            parts_of_equal_tokens(dataset, bad)


@pytest.mark.parametrize("split", ["969,30,1", "50,50", "1", "0,1,0", "2,1,1", "0.9,0.05,0.05"])
@pytest.mark.parametrize("documents", [1, 3, 10, 101])
def test_cut_where_a_run_cuts(tmp_path: Path, split: str, documents: int) -> None:
    prefix = write(tmp_path / "d", [[[i, i]] for i in range(documents)])
    parts = parts_of_split(IndexedDataset(prefix), split)
    assert [[*part] for part in parts] == [[*part] for part in split_documents(split, documents)]
    written = split_dataset(prefix, outputs(tmp_path, parts))
    assert both(merge([part.prefix for part in written], str(tmp_path / "all")).prefix) == both(prefix)


def test_a_run_cuts_sequences(tmp_path: Path) -> None:
    """Documents without a sequence go with the part before them; a document is not torn apart."""
    dataset = IndexedDataset(write(tmp_path / "d", [[], [[1], [2]], [], [[3], [4]], []]))
    assert parts_of_split(dataset, "1,1") == [range(2), range(2, 5), range(5, 5)]
    assert parts_of_split(dataset, "0,1,0") == [range(0), range(5), range(5, 5)]
    with pytest.raises(
        ConfigError, match=r"train ends before sequence 3, within document 3 \(sequences 2 to 3\)"
    ):
        parts_of_split(dataset, "3,1")
    empty = IndexedDataset(write(tmp_path / "e", [[], []]))
    assert parts_of_split(empty, "1,1") == [range(2), range(2, 2), range(2, 2)]


@pytest.mark.parametrize(
    ("split", "cut"),
    [
        ("3,1", "--documents 0:2 --documents 2:5"),
        ("1,2,1", "--documents 0:2 --documents 2:5"),
        ("0,3,1", "--documents 0:2 --documents 2:5"),
    ],
)
def test_the_cut_offered_instead_covers_all_parts(tmp_path: Path, split: str, cut: str) -> None:
    dataset = IndexedDataset(write(tmp_path / "d", [[], [[1], [2]], [], [[3], [4]], []]))
    with pytest.raises(ConfigError, match=f"cut between documents instead: {cut}$"):
        parts_of_split(dataset, split)


def test_the_cut_offered_instead_is_near(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "d", [[[i]] * 5 for i in range(20)]))
    with pytest.raises(ConfigError, match=r"instead: --documents 0:10 --documents 10:16 --documents 16:20$"):
        parts_of_split(dataset, "48,30,22")


def test_side_files_of_parts(tmp_path: Path) -> None:
    prefix = write_with_side_file(
        tmp_path / "d", MIXED, tokenizer=TOKENIZER, append_eod=False, bad_lines={"x": 1}, inputs={"files": 1}
    )
    [_, part] = split_dataset(prefix, outputs(tmp_path, [range(1), range(1, 6)]))
    side = read_side_file(part.prefix)
    assert side is not None
    whole = read_side_file(prefix)
    assert whole is not None
    bin_sha256 = whole["files"][".bin"]["sha256"]
    assert side["part_of"] == {"documents": 6, "tokens": 13, "first_document": 1, "bin_sha256": bin_sha256}
    assert (side["documents"], side["tokens"], side["tokenizer"]) == (5, 10, TOKENIZER)
    assert side["document_lengths"] == {"min": 0, "mean": 2.0, "max": 4, "buckets": {"0": 2, "2": 2, "4": 1}}
    assert side["token_histogram"]["max_id"] == 13
    assert not {"bad_lines", "inputs"} & set(side)
    result = verify(part.prefix)
    assert result.fault is None and result.hashed


def test_all_parts_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_with_side_file(tmp_path / "d", MIXED, tokenizer=TOKENIZER)
    before = sorted(tmp_path.iterdir())

    def fail_at_the_third(output: str, *arguments: object, **settings: object) -> Written:
        if output.endswith("2"):
            raise OSError("disk full")
        return write_stretches(output, *arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "write_stretches", fail_at_the_third)
    with pytest.raises(OSError, match="disk full"):
        split_dataset(prefix, outputs(tmp_path, [range(1), range(1, 3), range(3, 6)]))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("part", [0, 1])
def test_stopped_just_when_a_part_is_there(
    tmp_path: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal may come before anybody has written down that it is."""
    prefix = write_with_side_file(tmp_path / "d", MIXED, tokenizer=TOKENIZER)
    before = sorted(tmp_path.iterdir())

    def stop(output: str, *arguments: object, **settings: object) -> Written:
        write_stretches(output, *arguments, **settings)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_stretches", stop)
    with pytest.raises(KeyboardInterrupt):
        split_dataset(prefix, outputs(tmp_path, [range(1), range(1, 6)])[part:])
    assert sorted(tmp_path.iterdir()) == before


def test_an_output_that_is_there(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", MIXED)
    with pytest.raises(ConfigError, match=r"d\.bin is there already"):
        split_dataset(prefix, [(prefix, range(2))])
    assert both(prefix) == pack(MIXED)
