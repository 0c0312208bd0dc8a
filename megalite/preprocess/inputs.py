"""Find input files by path, folder and glob, and read their bytes in bounded blocks or their parquet rows.

zstandard's stream reader does not detect a truncated file, so frames are decoded one by one here."""

import codecs
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
from megalite.tokenizers.base import require_package

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

T = TypeVar("T")
Kind = Literal["jsonl", "text", "parquet"]
Compression = Literal["gz", "zst"]
Blocks = Generator[tuple[bytes, int], None, None]  # (bytes, total bytes read from disk so far)
Row = tuple[bytes | None, ...]  # text per key; None for null

STDIN = "-"  # the name of standard input
UNFINISHED = ".unfinished"  # suffix of the folder of an unfinished run
SUFFIXES = ".jsonl, .jsonl.gz, .jsonl.zst, .txt, .txt.gz, .txt.zst, .parquet"
"""For messages. .ndjson is treated as .jsonl, and .json is accepted if each line is a JSON object."""
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
    start: int = 0  # byte range of a shard, cut between lines
    stop: int | None = None

    @property
    def amount(self) -> int | None:
        """Bytes to read from disk; None if unknown."""
        return None if self.size is None else (self.size if self.stop is None else self.stop) - self.start


def open_regular(path: str) -> BinaryIO:
    """Open an input file without blocking. Raises ConfigError if it cannot be opened or is not a regular file."""
    try:
        return reading.open_regular(path)
    except OSError as error:
        hint = " (a pipe can be read as --input -)" if error.errno == errno.EINVAL else ""
        raise unreadable(path, f"{error.strerror}{hint}") from None


def stdin_number() -> int:
    """Return the file descriptor of standard input. Raises ConfigError if it is missing or a terminal."""
    try:
        number = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        raise ConfigError("input -: there is no standard input; pipe text into the command") from None
    if os.isatty(number):
        raise ConfigError("input -: standard input is a terminal; pipe text into the command")
    return number


def find_inputs(patterns: Sequence[str]) -> list[Input]:
    """Find the files of paths, folders (searched recursively) and globs, each once, sorted within each pattern.

    In folders and globs, a file is skipped if it is hidden, of an unknown kind, empty (as written by programs that
    partition their output by hash), a .json without a JSON object per line, or in the folder of an unfinished run. A
    file with two names (symbolic links) is read under the first. `-` is standard input, with a JSON object per line.

    Raises ConfigError if nothing matches, or a named file is empty, of an unknown kind, not regular or not readable."""
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
        if "**" not in pattern:  # with **, the glob already contains the folders' contents
            files += [path for hit in hits if hit.is_dir() for path in _search(str(hit))]
        what = "matches no file"
    if not files:
        raise ConfigError(f"input {pattern} {what} ending in {SUFFIXES} (empty ones do not count)")
    return sorted(files, key=lambda path: Path(path).parts)


def _search(folder: str) -> Iterator[str]:
    """Yield files of known kinds below a folder, following symbolic links, each folder once."""

    def refuse(error: OSError) -> None:
        raise unreadable(str(error.filename), error)

    seen = set()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        identity = os.path.realpath(parent)
        if identity in seen:
            folders.clear()
            continue
        seen.add(identity)
        folders[:] = [name for name in folders if not name.startswith(".") and not name.endswith(UNFINISHED)]
        paths = [str(Path(parent, name)) for name in names if not name.startswith(".")]
        yield from filter(_is_wanted, paths)


def _is_wanted(path: str) -> bool:
    kind, suffix, compression = _kind_of(Path(path).name)
    if kind is None:
        return False
    with suppress(OSError):  # opening the file later reports the error
        if not Path(path).stat().st_size and Path(path).is_file():
            return False
    return suffix != ".json" or _why_not_lines(path, compression) is None


def _kind_of(name: str) -> tuple[Kind | None, str, Compression | None]:
    stem, suffix = os.path.splitext(name.lower())  # noqa: PTH122 Path.suffix is wrong for a file named ".jsonl.gz"
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
    """Return None if a .json file seems to have an object per line, else the reason against it."""
    head = b""
    with open_regular(path) as file, closing(file_blocks(path, file, compression, Event())) as blocks:
        for block, _ in blocks:
            head += block
            if len(head) >= _SNIFFED_BYTES:
                break
    head = head.removeprefix(codecs.BOM_UTF8).lstrip()
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
_ZSTD_INPUT = 1 << 10  # a zstd block of 4 bytes may decompress to 128 KiB, so this becomes 32 MiB at most
_ZSTD_WINDOW = 1 << 27
_POLL_SECONDS = 0.1
_ROWS = 16  # read at a time, to bound memory for large or strongly compressed texts
_BUFFER_BYTES = 1 << 18
_SHOWN_COLUMNS = 20


class Stopped(Exception):
    """Raised in the reader thread when the consumer has stopped."""


def unreadable(path: str, reason: object) -> ConfigError:
    """Build the error for an input that is missing, damaged or not allowed."""
    why = reason.strerror or str(reason) if isinstance(reason, OSError) else str(reason)
    return ConfigError(f"input {path} cannot be read: {why}; fix the file or leave it out")


def changed(path: str, how: str) -> ConfigError:
    """Build the error for an input that has changed."""
    return ConfigError(f"input {path} has changed since it was found: {how}; start again when no program writes to it")


def file_blocks(path: str, file: BinaryIO, compression: Compression | None, stop: Event) -> Blocks:
    """Yield the (decompressed) content of an open file.

    Consecutive gzip members or zstd frames are concatenated. Memory is bounded even for extreme compression ratios.

    Raises ConfigError if the file cannot be read, is damaged or truncated, or zstandard is not installed; Stopped if
    `stop` is set."""
    try:
        if compression == "zst":
            yield from _zstd_blocks(path, file, stop)
            return
        # read1, because read would lose the content before a damaged part.
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
    zstandard = require_package(path, "zstandard", "data")
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
    """Yield the content of standard input, without blocking in a call that cannot be interrupted. Raises ConfigError if
    it cannot be read; Stopped if `stop` is set."""
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
    """Yield the items of the iterator `make(stop)`, which runs in a thread up to AHEAD_ITEMS ahead. The thread ends
    with this generator, even if it is closed early: then `stop` is set and the iterator raises Stopped. Other
    exceptions are raised here after the items before them."""
    stop = Event()
    items = make(stop)
    with ThreadPoolExecutor(1, "input reader") as pool:  # one thread, so that items stay in order
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
    """Yield (row after the last, rows, disk bytes) from row `start` on, with about piece_bytes of text each and never
    across row groups.

    Only the columns of `keys` are read, through small buffers and a few rows at a time, so that memory depends neither
    on the size of row groups nor on their compression.

    Raises ConfigError if the file is damaged, has become shorter, lacks a column or has one that is not text, or
    pyarrow is not installed; Stopped if `stop` is set."""
    parquet = require_package(path, "pyarrow.parquet", "data")
    try:
        # pyarrow verifies page checksums, if the file has any, only on request.
        with parquet.ParquetFile(
            path, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        ) as file:
            _check_columns(path, file.schema_arrow, keys)
            rows = file.metadata.num_rows
            if start > rows:
                raise changed(path, f"it has {rows} rows, but the work resumes at row {start}")
            for end, found in _pieces(file, keys, piece_bytes, start):
                check(stop)
                yield end, tuple(found), size * end // rows
    except (ConfigError, Stopped):
        raise
    except Exception as error:  # pyarrow raises many types for damaged files, such as KeyError and MemoryError
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
    """Yield (row after the last, rows) from row `start` on. Ends of pieces depend on the content alone, so a resumed
    run cuts the same pieces."""
    row = 0
    for number in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(number).num_rows
        if row + rows <= start:
            row += rows
            continue
        piece: list[Row] = []
        num_bytes = 0
        for batch in file.iter_batches(_ROWS, row_groups=[number], columns=list(keys), use_threads=False):
            for texts in zip(*map(_texts, batch.select(list(keys)).columns), strict=True):
                row += 1
                if row <= start:
                    continue
                piece.append(texts)
                num_bytes += sum(len(text or b"") for text in texts)
                if num_bytes >= piece_bytes:
                    yield row, piece
                    piece, num_bytes = [], 0
        if piece:
            yield row, piece


def _texts(array: "pyarrow.Array") -> list[bytes | None]:
    """Return the bytes of each text, because not every writer of parquet checks that strings are UTF-8."""
    import pyarrow

    plain = array.dictionary_decode() if pyarrow.types.is_dictionary(array.type) else array
    return plain.cast(pyarrow.large_string()).cast(pyarrow.large_binary()).to_pylist()
