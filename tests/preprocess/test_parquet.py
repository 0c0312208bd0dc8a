"""Parquet files: columns of texts."""

import random
from pathlib import Path
from threading import Event

import pyarrow
import pyarrow.parquet
import pytest

from megalite.config.errors import ConfigError
from megalite.preprocess.inputs import cut_parquet
from megalite.preprocess.pieces import Limits, Place
from tests.preprocess.reading import only, pieces_of, read, read_all, words

GENERATOR = random.Random(0)
TEXTS = [words(GENERATOR, 9) for _ in range(300)]


def write(path: Path, columns: dict[str, object], **settings: object) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **settings)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
    ids=str,
)
@pytest.mark.parametrize("piece_bytes", [1, 500, 1 << 18])
def test_all_rows_are_read_once_in_order(tmp_path: Path, kind: pyarrow.DataType, piece_bytes: int) -> None:
    table = {"n": range(300), "text": pyarrow.array(TEXTS).cast(kind)}
    path = write(tmp_path / "a.parquet", table, row_group_size=70, compression="zstd")
    limits = Limits(piece_bytes=piece_bytes)
    pieces = pieces_of(path, limits=limits)
    assert read(pieces, limits) == (TEXTS, [])
    assert sum(piece.num_bytes for piece in pieces) == sum(len(text.encode()) for text in TEXTS)
    assert len(pieces) == 300 if piece_bytes == 1 else len(pieces) >= 5
    assert pieces[-1].disk_bytes == path.stat().st_size
    for start in (0, 1, 69, 70, 71, 222, 299, 300):
        assert read_all(path, limits=limits, after=Place(0, start, start)) == (TEXTS[start:], [])


def test_bad_rows_are_named(tmp_path: Path) -> None:
    raw = pyarrow.array([b"good", None, b"", b"a\xffb", b"0123456789a", b"also good"], pyarrow.binary())
    # Not every writer of parquet checks that its strings are UTF-8.
    texts = pyarrow.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2], raw.buffers()[0])
    path = write(tmp_path / "a.parquet", {"text": texts})
    found = only(path, limits=Limits(max_document_bytes=10))
    assert found.texts == [["good", "also good"]] and found.at == [0, 5] and found.lines == 6
    assert [(bad.line, bad.kind) for bad in found.bad] == [
        (1, "wrong type"),
        (2, "empty text"),
        (3, "invalid UTF-8"),
        (4, "too long"),
    ]


def test_several_columns_and_names_with_dots(tmp_path: Path) -> None:
    columns = {"a.b": ["1", "2", None], "a": [{"b": "x"}] * 3, "q": ["4", "5", "6"]}
    found = only(write(tmp_path / "a.parquet", columns), ["q", "a.b"])
    assert found.texts == [["4", "5"], ["1", "2"]] and [bad.line for bad in found.bad] == [2]


def test_invalid_columns_are_errors(tmp_path: Path) -> None:
    columns = {"body": ["a"], "n": [1], "blob": [b"a"], "list": [["a"]]}
    path = write(tmp_path / "a.parquet", columns)
    for key, message in (
        ("text", r"a\.parquet has no column 'text'; there are body, n, blob, list"),
        ("n", r"a\.parquet: column 'n' is of type int64, expected string; there are body"),
        ("blob", "column 'blob' is of type binary, expected string"),
        ("list", "column 'list' is of type list"),
    ):
        with pytest.raises(ConfigError, match=message):
            only(path, [key])
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"b\.parquet has more than one column 'text'"):
        only(tmp_path / "b.parquet")


def test_resume_beyond_the_end_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["a"]})
    assert pieces_of(path, after=Place(0, 1)) == []
    with pytest.raises(ConfigError, match=r"a\.parquet has changed .*it has 1 rows, but the work resumes at row 2"):
        pieces_of(path, after=Place(0, 2))


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())], ids=str)
def test_memory_does_not_depend_on_the_compression_ratio(tmp_path: Path, kind: pyarrow.DataType) -> None:
    """Two texts of 300 KB, 400 times."""
    texts = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0, 1] * 200, pyarrow.int32()), pyarrow.array(["a" * 300_000, "b" * 300_000])
    )
    table = pyarrow.table({"text": texts}).cast(pyarrow.schema([("text", kind)]))
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=200, compression="zstd")
    assert path.stat().st_size < 30_000
    del texts, table
    before = pyarrow.total_allocated_bytes()
    most = held = total = 0
    places = []
    for piece in cut_parquet(str(path), path.stat().st_size, ["text"], 1 << 18, 0, Event()):
        most = max(most, pyarrow.total_allocated_bytes() - before)
        size = sum(len(text or b"") for row in piece[1] for text in row)
        held, total = max(held, size), total + size
        places.append(piece[0])
    assert total == 400 * 300_000 and places[-1] == 400
    assert held <= 4 * Limits().piece_bytes and most < 12 << 20  # all 200 rows are 60 MB
    # When resumed after a piece, the other pieces are the same.
    for number in (0, len(places) // 3, len(places) - 2):
        again = cut_parquet(str(path), path.stat().st_size, ["text"], 1 << 18, places[number], Event())
        assert [piece[0] for piece in again] == places[number + 1 :]
