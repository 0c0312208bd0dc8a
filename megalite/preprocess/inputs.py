"""Input files named by paths, folders and globs, and the errors about them."""

import errno
import glob
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import BinaryIO, Literal

from megalite.config import reading
from megalite.config.errors import ConfigError
from megalite.preprocess.streams import Compression, file_blocks, unreadable

Kind = Literal["jsonl", "text", "parquet"]

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
