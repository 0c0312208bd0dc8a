"""What pieces are cut by and made of: limits, places, and stretches of one input."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

TextDocuments = Literal["file", "line", "paragraph"]


@dataclass(frozen=True)
class Limits:
    """How much of an input is held at a time."""

    max_document_bytes: int = 8 << 20
    """A longer line, paragraph or text file is not read; it is reported as a bad document. A tokenizer may
    need 70 times its size in memory."""
    piece_bytes: int = 1 << 18
    """About how much text a piece holds; it goes on to the end of the document that crosses this."""
    text_documents: TextDocuments = "file"
    """What a document is in a text file: the file, each line, or each paragraph (empty lines divide them)."""


@dataclass(frozen=True)
class Place:
    """A place between two documents of the inputs."""

    source: int
    """Number of the input, from 0."""
    offset: int
    """Bytes of (decompressed) content before it, or rows of a parquet file."""
    lines: int = 0
    """Lines (rows) before it."""
    digest: str = ""
    """For standard input: sha256 of all that came before, by which it is known again."""


@dataclass(frozen=True)
class Column:
    """The texts of some rows of a parquet column: row i is data[offsets[i]:offsets[i + 1]]."""

    data: bytes
    offsets: NDArray[np.int64]
    """[rows + 1]"""
    nulls: tuple[int, ...]
    """Rows without a value."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A part of one input that starts and ends between documents."""

    start: int
    """Where it starts: bytes of (decompressed) content, or rows of a parquet file."""
    stop: int
    """Where it ends."""
    kept: int = 0
    """Bytes from `start` on that are looked at: below stop - start where the last document is too long."""
    dropped_lines: int = 0
    """Line ends in the rest, where more than the last line is too long."""
    content: bytes | None = None
    """These bytes; None if they are still to be read from the file."""
    columns: tuple[Column, ...] = ()
    """The rows of a parquet file, a column for each key."""
    disk_bytes: int = 0
    """How much of the file on disk is behind when the stretch ends, in bytes."""
    digest: str = ""
    """For standard input: sha256 of it from its beginning to `stop`."""
