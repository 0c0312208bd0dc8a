"""Raw text files cut into batches of documents, and documents out of their lines."""

import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from megalite.config.errors import ConfigError

JSON_SUFFIXES = (".jsonl", ".jsonl.gz")
SUFFIXES = (*JSON_SUFFIXES, ".txt")
_BATCH_BYTES = 1 << 18
_BATCH_LINES = 1000
_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class DocumentBatch:
    """Raw documents of one file, a piece of work for one worker."""

    path: str
    first_line: int
    """Line number of the first document, from 1."""
    documents: list[bytes]
    """JSON lines, or the whole text of a .txt file."""
    is_json: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of raw input."""
        return sum(map(len, self.documents))


class BadDocument(ValueError):
    """A line that is no document; the message says why."""


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """Files named by paths, folders (searched to the bottom) and globs, each once, sorted within each pattern.

    Raises:
        ConfigError: nothing matches, or a file has none of SUFFIXES.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            matches = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
            if not matches:
                raise ConfigError(
                    f"input {pattern} is a folder without files that end in {', '.join(SUFFIXES)}"
                )
        elif path.exists():
            matches = [path]
        else:
            found_here = map(Path, glob.glob(pattern, recursive=True))  # noqa: PTH207 Path.glob takes no absolute pattern
            matches = sorted(p for p in found_here if p.is_file())
            if not matches:
                raise ConfigError(
                    f"input {pattern} does not exist; give files, folders or globs of {', '.join(SUFFIXES)}"
                )
        for match in matches:
            if not match.name.endswith(SUFFIXES):
                raise ConfigError(
                    f"input {match} is of an unknown kind; rename it to one of {', '.join(SUFFIXES)}"
                )
            found.setdefault(match)
    if not found:
        raise ConfigError("no input files; give --input corpus.jsonl")
    return list(found)


def read_batches(paths: Sequence[Path]) -> Iterator[DocumentBatch]:
    """Documents in the order of the files, some hundred kilobytes at a time; blank lines are skipped.

    How documents are cut into batches does not depend on who works on them.

    Raises:
        ConfigError: a file cannot be read, or a .gz is damaged or cut off.
    """
    for path in paths:
        try:
            if path.name.endswith(JSON_SUFFIXES):
                yield from _read_lines(path)
            else:
                yield DocumentBatch(str(path), 1, [path.read_bytes()], is_json=False)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(
                f"input {path} cannot be read: {error}; mend the file or leave it out"
            ) from None


def parse_document(line: bytes, keys: Sequence[str], *, is_json: bool) -> list[str]:
    """The texts under `keys` of one document; a plain-text document is its own single text.

    Raises:
        BadDocument: no UTF-8, no JSON object, a key missing, no string or empty.
    """
    try:
        text = line.removeprefix(_UTF8_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument(f"invalid UTF-8 at byte {error.start}") from None
    texts = _parse_json(text, keys) if is_json else [text]
    for key, value in zip(keys, texts, strict=True):
        if not value:
            raise BadDocument(f"empty text under {key!r}" if is_json else "empty file")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise BadDocument(f"half of a surrogate pair under {key!r}") from None
    return texts


def _parse_json(line: str, keys: Sequence[str]) -> list[str]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadDocument(f"invalid JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadDocument(f"expected a JSON object, got {type(document).__name__}")
    texts = []
    for key in keys:
        if key not in document:
            raise BadDocument(
                f"no key {key!r} (there are {', '.join(map(repr, list(document)[:5])) or 'none'})"
            )
        if not isinstance(document[key], str):
            raise BadDocument(f"expected a string under {key!r}, got {type(document[key]).__name__}")
        texts.append(document[key])
    return texts


def _read_lines(path: Path) -> Iterator[DocumentBatch]:
    with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
        lines: list[bytes] = []
        first = 1
        size = 0
        for number, line in enumerate(cast(BinaryIO, file), 1):
            if not line.strip():
                # A batch numbers its lines by counting, so a gap ends it.
                if lines:
                    yield DocumentBatch(str(path), first, lines, is_json=True)
                lines, first, size = [], number + 1, 0
                continue
            lines.append(line)
            size += len(line)
            if size >= _BATCH_BYTES or len(lines) >= _BATCH_LINES:
                yield DocumentBatch(str(path), first, lines, is_json=True)
                lines, first, size = [], number + 1, 0
        if lines:
            yield DocumentBatch(str(path), first, lines, is_json=True)
