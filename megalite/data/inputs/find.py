"""Input files named by paths, folders and globs."""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Literal

from megalite.config.errors import ConfigError
from megalite.data.inputs.opening import STDIN, open_regular, unreadable
from megalite.data.inputs.streams import Compression, file_blocks

Kind = Literal["jsonl", "text", "parquet"]

COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
KINDS_BY_SUFFIX: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".parquet": "parquet",
}
SUFFIXES = ".jsonl, .jsonl.gz, .jsonl.zst, .txt, .txt.gz, .txt.zst, .parquet"
"""For messages; .ndjson is .jsonl by another name, and .json is taken where it holds a JSON object a line."""
UNFINISHED = ".unfinished"
"""How the folder of an unfinished run ends."""
_SNIFFED_BYTES = 1 << 20


@dataclass(frozen=True)
class Input:
    """One file, or standard input."""

    path: str
    """`-` is standard input."""
    kind: Kind
    compression: Compression | None
    size: int | None
    """Bytes on disk; None for standard input."""


def find_inputs(patterns: Sequence[str]) -> list[Input]:
    """Files named by paths, folders (searched to the bottom) and globs, each once, sorted within each pattern.

    Out of what a folder or a glob holds are left: hidden files and folders, files of unknown kinds, empty ones (as
    programs write that divide their output by hashes), a .json that does not hold a JSON object a line, and the folders
    of unfinished runs. A file that is reached by two names (symbolic links) is taken under the first. `-` is standard
    input, a JSON object a line.

    Raises:
        ConfigError: nothing matches; a file that is named is empty or of an unknown kind; a file is no file at all, or
            not to be read.
    """
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
    """Files of one pattern, in order."""
    if Path(pattern).is_dir():
        files = _sorted(_search(pattern))
        if not files:
            raise ConfigError(
                f"input {pattern} is a folder without files that end in {SUFFIXES} (empty ones do not count)"
            )
        return files
    if os.path.lexists(pattern):
        return [pattern]
    hits = [Path(hit) for hit in glob.glob(pattern, recursive=True)]  # noqa: PTH207 Path.glob takes no absolute pattern
    if not hits:
        raise ConfigError(f"input {pattern} does not exist; give files, folders or globs of {SUFFIXES}")
    hits = [hit for hit in hits if not any(part.endswith(UNFINISHED) for part in hit.parts)]
    files = [str(hit) for hit in hits if not hit.is_dir() and _is_wanted(str(hit))]
    if "**" not in pattern:  # with **, the contents of the folders were matched themselves
        folders = [str(hit) for hit in hits if hit.is_dir()]
        files += [path for folder in folders for path in _search(folder)]
    if not files:
        raise ConfigError(
            f"input {pattern} matches no file that ends in {SUFFIXES} (empty ones do not count)"
        )
    return _sorted(files)


def _sorted(files: Iterator[str] | list[str]) -> list[str]:
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
        for name in names:
            path = str(Path(here, name))
            if not name.startswith(".") and _is_wanted(path):
                yield path


def _is_wanted(path: str) -> bool:
    """Whether a file that nobody has named, but a search found, is an input."""
    kind, suffix, compression = _kind_of(Path(path).name)
    if kind is None:
        return False
    with suppress(OSError):  # what cannot be looked at is told when it is opened
        if not Path(path).stat().st_size and Path(path).is_file():
            return False
    return suffix != ".json" or _why_no_lines(path, compression) is None


def _kind_of(name: str) -> tuple[Kind | None, str, Compression | None]:
    """Kind, suffix without the compression's, and compression, as the name tells."""
    stem, suffix = os.path.splitext(name.lower())  # noqa: PTH122 Path.suffix knows no file named ".jsonl.gz" in its parts
    compression = COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]  # noqa: PTH122
    kind = KINDS_BY_SUFFIX.get(suffix)
    return (None if compression and kind == "parquet" else kind), suffix, compression


def _describe(path: str) -> Input:
    """The input that a file is.

    Raises:
        ConfigError: as find_inputs.
    """
    kind, suffix, compression = _kind_of(Path(path).name)
    if kind is None:
        raise ConfigError(f"input {path} is of an unknown kind; rename it to one of {SUFFIXES}")
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if not size:
        raise unreadable(path, "it is empty (0 bytes; a download that failed?)")
    if suffix == ".json" and (reason := _why_no_lines(path, compression)):
        raise ConfigError(
            f"input {path} is not one JSON object a line: {reason}; turn it into .jsonl, "
            "for an array with: jq -c '.[]' IN.json > OUT.jsonl"
        )
    return Input(path, kind, compression, size)


def _why_no_lines(path: str, compression: Compression | None) -> str | None:
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
        return "its first line is no whole object"
    return None
