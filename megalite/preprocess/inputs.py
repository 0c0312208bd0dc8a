"""Input files named by paths, folders and globs; their bytes in bounded blocks, rows of parquet files, and reading ahead.

zstandard's own stream reader does not notice a truncated file; its frames are decoded one by one here.
"""

import errno
import glob
import gzip
import json
import os
import select
import sys
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

from megalite.config import reading
from megalite.config.data import is_address
from megalite.config.errors import ConfigError
from megalite.tokenizers.base import needed_package

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

T = TypeVar("T")
Kind = Literal["jsonl", "text", "parquet"]
Compression = Literal["gz", "zst"]
Blocks = Generator[tuple[bytes, int], None, None]  # (bytes, how much has been read from the disk so far)
Row = tuple[bytes | None, ...]  # of each key its text; None: there is none

STDIN = "-"  # the name of standard input
UNFINISHED = ".unfinished"  # suffix of the folder of an unfinished run
SUFFIXES = ".jsonl, .jsonl.gz, .jsonl.zst, .txt, .txt.gz, .txt.zst, .parquet"
"""For messages; .ndjson is .jsonl by another name, and .json is taken where it holds a JSON object a line."""
_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
_KINDS: dict[str, Kind] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".txt": "text",
    ".parquet": "parquet",
}
_SNIFFED_BYTES = 1 << 20


@dataclass(frozen=True)
class Input:
    path: str
    kind: Kind
    compression: Compression | None
    size: int | None  # bytes on disk; None for standard input
    start: int = 0  # of a part that another process does not read: its bytes, between lines
    stop: int | None = None

    @property
    def amount(self) -> int | None:
        """Bytes on disk that are read; None: unknown."""
        return None if self.size is None else (self.size if self.stop is None else self.stop) - self.start


def open_regular(path: str) -> BinaryIO:
    """An input file, opened without waiting for anything. Raises ConfigError: it cannot be opened, or is not a regular
    file."""
    try:
        return reading.open_regular(path)
    except OSError as error:
        hint = " (a pipe can be read as --input -)" if error.errno == errno.EINVAL else ""
        raise unreadable(path, f"{error.strerror}{hint}") from None


def stdin_number() -> int:
    """The file descriptor of standard input. Raises ConfigError: there is none, or it is a terminal."""
    try:
        number = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        raise ConfigError("input -: there is no standard input; pipe text into the command") from None
    if os.isatty(number):
        raise ConfigError("input -: standard input is a terminal; pipe text into the command")
    return number


def find_inputs(patterns: Sequence[str]) -> list[Input]:
    """Files named by paths, folders (searched recursively) and globs, each once, sorted within each pattern.

    What a folder or a glob holds is left out where it is hidden, of an unknown kind, empty (as programs write that
    divide their output by hashes), a .json that does not hold a JSON object a line, or in the folder of an unfinished
    run. A file with two names (symbolic links) is taken under the first. `-` is standard input, a JSON object a line.

    Raises ConfigError: nothing matches; a named file is empty, of an unknown kind, not a regular file or unreadable."""
    found: dict[str, Input] = {}
    for pattern in patterns:
        if pattern == STDIN:
            found.setdefault(STDIN, Input(STDIN, "jsonl", None, None))
            continue
        for path in _matches(pattern):
            identity = os.path.realpath(path)
            if identity not in found:
                found[identity] = _describe(path)
    if not found:
        raise ConfigError("no input files; give --input corpus.jsonl")
    return list(found.values())


def _matches(pattern: str) -> list[str]:
    if is_address(pattern):
        raise ConfigError(f"input {pattern} is an address; copy it here, or let megalite train read it as --data-path")
    if Path(pattern).is_dir():
        files = list(_search(pattern))
        what = "is a folder without files"
    elif os.path.lexists(pattern):
        return [pattern]
    else:
        hits = [Path(hit) for hit in glob.glob(pattern, recursive=True)]  # noqa: PTH207 Path.glob takes no absolute pattern
        if not hits:
            raise ConfigError(f"input {pattern} does not exist; give files, folders or globs of {SUFFIXES}")
        hits = [hit for hit in hits if not any(part.endswith(UNFINISHED) for part in hit.parts)]
        files = [str(hit) for hit in hits if not hit.is_dir() and _is_wanted(str(hit))]
        if "**" not in pattern:  # with **, the contents of the folders were matched themselves
            files += [path for hit in hits if hit.is_dir() for path in _search(str(hit))]
        what = "matches no file"
    if not files:
        raise ConfigError(f"input {pattern} {what} ending in {SUFFIXES} (empty ones do not count)")
    return sorted(files, key=lambda path: Path(path).parts)


def _search(folder: str) -> Iterator[str]:
    """Files of known kinds below a folder, through symbolic links, each folder once."""

    def refuse(error: OSError) -> None:
        raise unreadable(str(error.filename), error)

    seen = set()
    for here, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        identity = os.path.realpath(here)
        if identity in seen:
            folders.clear()
            continue
        seen.add(identity)
        folders[:] = [name for name in folders if not name.startswith(".") and not name.endswith(UNFINISHED)]
        paths = [str(Path(here, name)) for name in names if not name.startswith(".")]
        yield from filter(_is_wanted, paths)


def _is_wanted(path: str) -> bool:
    kind, suffix, compression = _kind_of(Path(path).name)
    if kind is None:
        return False
    with suppress(OSError):  # opening it will say what is wrong
        if not Path(path).stat().st_size and Path(path).is_file():
            return False
    return suffix != ".json" or _why_not_lines(path, compression) is None


def _kind_of(name: str) -> tuple[Kind | None, str, Compression | None]:
    stem, suffix = os.path.splitext(name.lower())  # noqa: PTH122 Path.suffix knows no file named ".jsonl.gz" in its parts
    compression = _COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]  # noqa: PTH122
    kind = _KINDS.get(suffix)
    return (None if compression and kind == "parquet" else kind), suffix, compression


def _describe(path: str) -> Input:
    kind, suffix, compression = _kind_of(Path(path).name)
    if kind is None:
        raise ConfigError(f"input {path} is of an unknown kind; rename it to one of {SUFFIXES}")
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if not size:
        raise unreadable(path, "it is empty (0 bytes; a download that failed?)")
    if suffix == ".json" and (reason := _why_not_lines(path, compression)):
        raise ConfigError(f"input {path} is not one JSON object a line: {reason}; for an array use jq -c '.[]'")
    return Input(path, kind, compression, size)


def _why_not_lines(path: str, compression: Compression | None) -> str | None:
    """None if a .json evidently holds an object a line, else why not."""
    head = b""
    with open_regular(path) as file, closing(file_blocks(path, file, compression, Event())) as blocks:
        for block, _ in blocks:
            head += block
            if len(head) >= _SNIFFED_BYTES:
                break
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    line, newline, _ = head.partition(b"\n")
    if not line.startswith(b"{"):
        return f"it starts with {line[:10].decode('utf-8', 'replace')!r}"
    if not newline and len(head) >= _SNIFFED_BYTES:
        return None
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return "its first line is not a whole object"
    return None


AHEAD_ITEMS = 8
_READ_BYTES = 1 << 18
_ZSTD_INPUT = 1 << 10  # a zstd block of 4 bytes may stand for 128 KiB: 32 MiB
_ZSTD_WINDOW = 1 << 27
_POLL_SECONDS = 0.1
_ROWS = 16  # read at a time: however large the texts after these are, or how well they are compressed
_BUFFER_BYTES = 1 << 18
_SHOWN_COLUMNS = 20


class Stopped(Exception):
    """The consumer of these bytes has gone."""


def unreadable(path: str, reason: object) -> ConfigError:
    """The error for an input that is missing, damaged or not allowed."""
    why = reason.strerror or str(reason) if isinstance(reason, OSError) else str(reason)
    return ConfigError(f"input {path} cannot be read: {why}; fix the file or leave it out")


def changed(path: str, how: str) -> ConfigError:
    """The error for an input that is no longer what it was."""
    return ConfigError(f"input {path} has changed since it was found: {how}; start again once nothing writes to it")


def file_blocks(path: str, file: BinaryIO, compression: Compression | None, stop: Event) -> Blocks:
    """The (decompressed) content of an open file.

    Several gzip members or zstd frames one after the other are one content. Memory is bounded, also for content that
    is compressed many thousandfold.

    Raises ConfigError: the file cannot be read, is damaged, ends early, or zstandard is not installed. Stopped: `stop`
    is set."""
    try:
        if compression == "zst":
            yield from _zstd_blocks(path, file, stop)
            return
        # read1: read would lose what comes before damage.
        read = gzip.GzipFile(fileobj=file).read1 if compression else file.read
        while block := read(_READ_BYTES):
            check(stop)
            yield block, file.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        if isinstance(error, EOFError):
            raise unreadable(path, "it ends in the middle (a download that broke off?)") from None
        raise unreadable(path, f"as gzip it is damaged ({error})") from None
    except OSError as error:
        raise unreadable(path, error) from None


def _zstd_blocks(path: str, file: BinaryIO, stop: Event) -> Blocks:
    zstandard = needed_package(path, "zstandard", "data")
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    frame: Any = None
    try:
        while data := file.read(_ZSTD_INPUT):
            check(stop)
            while data:
                frame = frame or decoder.decompressobj()
                if content := frame.decompress(data):
                    yield content, file.tell()
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        if "too much memory" in str(error):
            raise unreadable(
                path,
                f"it was compressed with a window above {_ZSTD_WINDOW >> 20} MiB; compress it again with zstd --long=27 or "
                "without --long",
            ) from None
        raise unreadable(path, f"as zstd it is damaged ({str(error).rpartition(': ')[2]})") from None
    if frame is not None:
        raise unreadable(path, "it ends in the middle (a download that broke off?)")


def pipe_blocks(number: int, stop: Event) -> Blocks:
    """What comes out of standard input, without ever waiting in a call that cannot be stopped. Raises ConfigError: it
    cannot be read. Stopped: `stop` is set."""
    total = 0
    try:
        while True:
            while not select.select([number], [], [], _POLL_SECONDS)[0]:
                check(stop)
            check(stop)
            block = os.read(number, _READ_BYTES)
            if not block:
                return
            total += len(block)
            yield block, total
    except OSError as error:
        raise unreadable("-", error) from None


def check(stop: Event) -> None:
    if stop.is_set():
        raise Stopped


def read_ahead(make: Callable[[Event], Iterator[T]]) -> Generator[T, None, None]:
    """The items of an iterator that a thread runs, at most AHEAD_ITEMS ahead. The thread ends with this generator, also
    if that is closed early: `make` gets an event that is then set and on which it raises Stopped. What else it raises
    is raised here, after the items before it."""
    stop = Event()
    items = make(stop)
    with ThreadPoolExecutor(1, "input reader") as pool:  # one thread: it takes item after item
        coming = deque(pool.submit(next, items, None) for _ in range(AHEAD_ITEMS))
        try:
            while (item := coming.popleft().result()) is not None:
                coming.append(pool.submit(next, items, None))
                yield item
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def cut_parquet(
    path: str, size: int, keys: Sequence[str], piece_bytes: int, start: int, stop: Event
) -> Iterator[tuple[int, tuple[Row, ...], int]]:
    """(row after the last, rows, disk bytes) from row `start` on, about piece_bytes of text at a time and
    never across row groups.

    Only the columns of `keys` are read, through small buffers and a few rows at a time, so that memory grows neither
    with the row groups nor with how well they are compressed.

    Raises ConfigError: the file is damaged, has become shorter, lacks a column or has no texts in it, or pyarrow is not
    installed. Stopped: `stop` is set."""
    parquet = needed_package(path, "pyarrow.parquet", "data")
    try:
        # pyarrow compares the checksums of pages (where the writer left some) only on request.
        with parquet.ParquetFile(
            path, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        ) as file:
            _check_columns(path, file.schema_arrow, keys)
            rows = file.metadata.num_rows
            if start > rows:
                raise changed(path, f"it has {rows} rows, and row {start} is the one to resume at")
            for end, found in _pieces(file, keys, piece_bytes, start):
                check(stop)
                yield end, tuple(found), size * end // rows
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
            raise ConfigError(f"input {path}: column {key!r} is of type {kind}, expected string; there are {shown}")


def _pieces(
    file: "pyarrow.parquet.ParquetFile", keys: Sequence[str], piece_bytes: int, start: int
) -> Iterator[tuple[int, list[Row]]]:
    """(row after the last, rows) from row `start` on. Where pieces end depends on the content alone: from row `start`,
    where one ended, they end as they did then."""
    row = 0
    for number in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(number).num_rows
        if row + rows <= start:
            row += rows
            continue
        piece: list[Row] = []
        held = 0
        for batch in file.iter_batches(_ROWS, row_groups=[number], columns=list(keys), use_threads=False):
            for texts in zip(*map(_texts, batch.select(list(keys)).columns), strict=True):
                row += 1
                if row <= start:
                    continue
                piece.append(texts)
                held += sum(len(text or b"") for text in texts)
                if held >= piece_bytes:
                    yield row, piece
                    piece, held = [], 0
        if piece:
            yield row, piece


def _texts(array: "pyarrow.Array") -> list[bytes | None]:
    """The bytes of each text: not every writer of parquet checks that its strings are UTF-8."""
    import pyarrow

    plain = array.dictionary_decode() if pyarrow.types.is_dictionary(array.type) else array
    found: list[bytes | None] = plain.cast(pyarrow.large_string()).cast(pyarrow.large_binary()).to_pylist()
    return found
