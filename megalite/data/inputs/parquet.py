"""Parquet files: the columns of texts, some rows at a time."""

from collections.abc import Iterator, Sequence
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.inputs.opening import changed, open_regular, unreadable
from megalite.data.inputs.places import Column, Limits, Stretch
from megalite.data.inputs.streams import Stopped

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_FIRST_ROWS, _MAX_ROWS = 16, 1024
_PART, _BATCH = 4, 32
"""A piece may hold this many times piece_bytes, and a batch twice that many before the next ones have fewer rows."""
_BUFFER_BYTES = 1 << 18
_SHOWN_COLUMNS = 20


def cut_parquet(
    path: str, size: int, keys: Sequence[str], limits: Limits, start: int, stop: Event
) -> Iterator[Stretch]:
    """Rows from row `start` on, about piece_bytes of text at a time and never across row groups.

    Only the columns of `keys` are read, through small buffers and as many rows at a time as their texts allow, so that
    memory grows neither with the row groups nor with how well they are compressed.

    Raises:
        ConfigError: the file is damaged, has become shorter, lacks a column or has no texts in it, or pyarrow is not
            installed.
        Stopped: `stop` is set.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"{path} needs the package pyarrow, which is not installed: pip install 'megalite[data]'"
        ) from None
    open_regular(path).close()
    try:
        # Checksums of pages are compared where the writer has left some; pyarrow does not by itself.
        with pyarrow.parquet.ParquetFile(
            path, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        ) as file:
            _check_columns(path, file.schema_arrow, keys)
            rows = file.metadata.num_rows
            if start > rows:
                raise changed(path, f"it has {rows} rows, and row {start} is the one to go on at")
            for batch, first in _batches(file, keys, limits, start):
                for part, at in _parts(batch, limits):
                    if stop.is_set():
                        raise Stopped
                    begin, end = max(first + at, start), first + at + part.num_rows
                    if begin < end:
                        columns = tuple(_column(column.slice(begin - first - at)) for column in part.columns)
                        yield Stretch(start=begin, stop=end, columns=columns, disk_bytes=size * end // rows)
    except (ConfigError, Stopped):
        raise
    # pyarrow raises its own errors, OSError, ValueError, TypeError, KeyError, MemoryError ... for damaged files.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise unreadable(path, f"as parquet it is damaged ({reason})") from None


def _check_columns(path: str, schema: "pyarrow.Schema", keys: Sequence[str]) -> None:
    import pyarrow

    names = schema.names
    shown = ", ".join(names[:_SHOWN_COLUMNS]) + (", ..." if len(names) > _SHOWN_COLUMNS else "")
    for key in keys:
        if names.count(key) != 1:
            what = "no" if key not in names else "more than one"
            raise ConfigError(f"input {path} has {what} column {key!r}; there are {shown or 'none'}")
        kind = schema.field(key).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        is_text = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
        if not any(test(kind) for test in is_text):
            raise ConfigError(
                f"input {path}: column {key!r} is of type {kind}, expected string; there are {shown}"
            )


def _batches(
    file: "pyarrow.parquet.ParquetFile", keys: Sequence[str], limits: Limits, start: int
) -> Iterator[tuple["pyarrow.RecordBatch", int]]:
    """Batches with the number of their first row, from the row group of row `start` on.

    What a row group takes in the file says little about its texts, which may be one text many times. So each begins
    with few rows at a time, and the size of the texts tells how many come next. Where batches end depends on the
    content alone, not on `start`.
    """
    first = 0
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        if first + group.num_rows > start:
            # Of all columns: to ask for those of one column aborts the process where its metadata is damaged.
            most = limits.piece_bytes * group.num_rows // max(group.total_byte_size, 1)
            most = max(1, min(most, _MAX_ROWS))
            for batch, at in _group_batches(file, number, keys, limits, most):
                yield batch, first + at
        first += group.num_rows


def _group_batches(
    file: "pyarrow.parquet.ParquetFile", number: int, keys: Sequence[str], limits: Limits, most: int
) -> Iterator[tuple["pyarrow.RecordBatch", int]]:
    """Batches of one row group, of at most `most` rows, with the number of their first row in it.

    Another number of rows takes another reading from the beginning of the group. So it grows only at the beginning,
    where little lies before, and shrinks to half or less.
    """
    rows, may_grow, done = min(_FIRST_ROWS, most), True, 0
    while True:
        wanted, seen = rows, 0
        for batch in file.iter_batches(
            batch_size=rows, row_groups=[number], columns=list(keys), use_threads=False
        ):
            skipped = min(max(done - seen, 0), batch.num_rows)
            seen += batch.num_rows
            if skipped == batch.num_rows:
                continue
            yield batch.slice(skipped).select(list(keys)), seen - batch.num_rows + skipped
            done = seen
            fitting = max(1, min(limits.piece_bytes * batch.num_rows // max(_decoded(batch), 1), most))
            may_grow = may_grow and fitting >= min(2 * rows, most) > rows
            room = max(1, _BATCH * limits.piece_bytes * batch.num_rows // max(_decoded(batch), 1))
            wanted = min(fitting, 4 * rows) if may_grow else room if 2 * room <= rows else rows
            if wanted != rows:
                may_grow = may_grow and wanted > rows
                break
        if wanted == rows:
            return
        rows = wanted


def _decoded(batch: "pyarrow.RecordBatch") -> int:
    """Bytes of the texts that a batch holds decoded, which those behind a dictionary are not yet."""
    import pyarrow

    return sum(column.nbytes for column in batch.columns if not pyarrow.types.is_dictionary(column.type))


def _parts(batch: "pyarrow.RecordBatch", limits: Limits) -> Iterator[tuple["pyarrow.RecordBatch", int]]:
    """A batch in parts of at most some times piece_bytes of text, or of one row, with their first rows."""
    ends = np.cumsum(sum(_lengths(column) for column in batch.columns))
    at = 0
    while at < batch.num_rows:
        before = ends[at - 1] if at else 0
        last = int(np.searchsorted(ends, before + _PART * limits.piece_bytes, side="right"))
        last = max(last, at + 1)
        yield batch.slice(at, last - at), at
        at = last


def _lengths(array: "pyarrow.Array") -> NDArray[np.int64]:
    """Bytes of each text, 0 where there is none; a dictionary is not decoded for it."""
    import pyarrow

    if pyarrow.types.is_dictionary(array.type):
        lengths = np.append(_lengths(array.dictionary), 0)
        return lengths[array.indices.fill_null(len(array.dictionary)).to_numpy(zero_copy_only=False)]
    array = array.cast(pyarrow.large_string()).cast(pyarrow.large_binary())
    offsets = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
    return np.diff(offsets)


def _column(array: "pyarrow.Array") -> Column:
    """The bytes of a column of texts, without the parts of the batch that are not its."""
    import pyarrow

    if pyarrow.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    array = array.cast(pyarrow.large_string()).cast(pyarrow.large_binary())
    nulls = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist()
    _, ends, data = array.buffers()
    offsets = np.frombuffer(ends, np.int64)[array.offset : array.offset + len(array) + 1]
    content = bytes(memoryview(data)[offsets[0] : offsets[-1]]) if data else b""
    return Column(content, offsets - offsets[0], tuple(nulls))
