"""Cut inputs into pieces of work that end between documents.

Ends of pieces depend on the (decompressed) content and on piece_bytes alone, so a run can resume at any of them."""

import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import BinaryIO, Literal, cast

from megalite.config.errors import ConfigError
from megalite.config.reading import Span
from megalite.preprocess.inputs import (
    Blocks,
    Input,
    Row,
    changed,
    cut_parquet,
    file_blocks,
    open_regular,
    pipe_blocks,
    read_ahead,
    stdin_number,
)

TextDocuments = Literal["file", "line", "paragraph"]
Form = Literal["json", "line", "paragraph", "file", "rows"]
"""The unit of a document: a line of JSON, a line, paragraph or all of a text file, or a row of a parquet file."""

LINE_END = re.compile(rb"\n")
PARAGRAPH_END = re.compile(rb"\n\r?\n")
_SEPARATOR_BYTES = 3  # length of the longest separator
_SLACK = 8  # more than the line ends around a document; with them it may exceed max_document_bytes by that much


@dataclass(frozen=True)
class Limits:
    max_document_bytes: int = 8 << 20  # longer documents are bad: a tokenizer may need 70 times their size
    piece_bytes: int = 1 << 18  # approximate; a piece extends to the end of its last document
    text_documents: TextDocuments = "file"  # the unit of a document in a text file


@dataclass(frozen=True)
class Place:
    """A position between two documents of the inputs."""

    source: int  # number of the input, from 0
    offset: int  # in bytes of (decompressed) content, or rows of a parquet file
    lines: int = 0  # lines (rows) before it
    digest: str = ""  # for standard input: sha256 of the content before it


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of one input, for one worker; it can be pickled."""

    source: int  # number of the input, from 0
    path: str
    form: Form
    start: int  # in bytes of (decompressed) content, or rows of a parquet file
    stop: int
    content: bytes = b""  # fewer than stop - start bytes if the last document is too long
    dropped_lines: int = 0  # line ends in the bytes that are not in `content`
    rows: tuple[Row, ...] = ()  # for parquet
    disk_bytes: int = 0  # bytes of the file on disk up to the end of the piece
    digest: str = ""  # for standard input: sha256 of the content up to `stop`

    @property
    def num_bytes(self) -> int:
        """Bytes of (decompressed) content; for parquet, bytes of the texts."""
        if self.form != "rows":
            return self.stop - self.start
        return sum(len(text or b"") for row in self.rows for text in row)

    def after(self, lines: int, before: Place | None = None) -> Place:
        """Return the place of its end, for a piece of `lines` lines that starts at `before`."""
        earlier = before.lines if before is not None and before.source == self.source else 0
        return Place(self.source, self.stop, lines + earlier, self.digest)


def cut(
    inputs: Sequence[Input], *, keys: Sequence[str], limits: Limits, after: Place | None = None
) -> Generator[Piece, None, None]:
    """Yield all pieces, or those after a place, in the order of the inputs. A thread reads a few pieces ahead. Raises
    ConfigError if the keys do not fit the inputs, or an input is missing, damaged or changed."""
    check_keys(keys)
    plain = next((item for item in inputs if item.kind == "text"), None)
    if plain and len(keys) > 1:
        raise ConfigError(f"json_keys {' '.join(keys)!r}: {plain.path} is plain text without keys; use one key")
    assert after is None or (0 <= after.source < len(inputs) and after.offset >= 0), after

    def pieces(stop: Event) -> Iterator[Piece]:
        first = after.source if after else 0
        for source, item in enumerate(inputs[first:], first):
            place = after if after and after.source == source else Place(source, item.start)
            yield from _cut_input(item, keys, limits, place, stop)

    return read_ahead(pieces)


def check_keys(keys: Sequence[str]) -> None:
    """Raise ConfigError if there is no key or two keys are equal."""
    if not keys or len(set(keys)) != len(keys):
        raise ConfigError(f"json_keys {' '.join(keys)!r} must name one or more different keys; try text")


def _cut_input(item: Input, keys: Sequence[str], limits: Limits, place: Place, stop: Event) -> Iterator[Piece]:
    forms: dict[str, Form] = {"jsonl": "json", "text": limits.text_documents, "parquet": "rows"}
    form = forms[item.kind]
    make = partial(Piece, source=place.source, path=item.path, form=form)
    if item.size is None:
        stream = _Stream(item.path, pipe_blocks(stdin_number(), stop), limits, make, hashed=True)
        yield from stream.cut(form, place)
        return
    with open_regular(item.path) as file:
        _check_size(item, file)
        if form == "rows":
            rows = cut_parquet(item.path, item.size, keys, limits.piece_bytes, place.offset, stop)
            start = place.offset
            for end, texts, disk_bytes in rows:
                yield make(start=start, stop=end, rows=texts, disk_bytes=disk_bytes)
                start = end
        elif form == "file" and item.compression is None and item.size > limits.max_document_bytes:
            if not place.offset:
                yield make(start=0, stop=item.size, disk_bytes=item.size)
        else:
            plain = file if item.stop is None else cast(BinaryIO, Span(file, 0, item.stop))
            stream = _Stream(
                item.path, file_blocks(item.path, plain, item.compression, stop), limits, make, hashed=False
            )
            yield from stream.cut(form, place, plain if item.compression is None else None)
        _check_size(item, file)


def _check_size(item: Input, file: BinaryIO) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != item.size:
        raise changed(item.path, f"it had {item.size} bytes and now has {size}")


class _Stream:
    """Cuts a stream of bytes into pieces; buffers at most piece_bytes + max_document_bytes and some blocks. `path`: its
    name, for messages. `blocks`: its content from the start. `make`: builds a piece. `hashed`: compute a running sha256
    of the content, for standard input."""

    def __init__(self, path: str, blocks: Blocks, limits: Limits, make: Callable[..., Piece], *, hashed: bool) -> None:
        self._path, self._blocks, self._limits, self._make = path, blocks, limits, make
        self._sha256 = hashlib.sha256() if hashed else None
        self._buffer = bytearray()
        self._start = 0  # offset of the buffer in the stream
        self._dropped = self._dropped_lines = 0  # bytes and line ends dropped inside a document that is too long
        self._hashed = 0  # bytes of the buffer that are already hashed
        self._disk_bytes = 0
        self._is_plain = False

    def cut(self, form: Form, place: Place, file: BinaryIO | None = None) -> Iterator[Piece]:
        """Yield the pieces from `place` on. `file`: the file, if it is not compressed and can be read from `place`."""
        if form == "file":
            if not place.offset:
                yield self._whole()
            return
        self._is_plain = file is not None
        if file is not None and place.offset > len(self._buffer):
            self._buffer.clear()
            self._start = file.seek(place.offset - 1)
        self._skip(place)
        yield from self._cut(PARAGRAPH_END if form == "paragraph" else LINE_END)

    def _cut(self, separator: re.Pattern[bytes]) -> Iterator[Piece]:
        """Yield pieces that end at the first separator after `piece_bytes` or more."""
        nominal = self._limits.piece_bytes
        head = nominal + _SLACK
        look_from = first_look = max(0, nominal - _SEPARATOR_BYTES)
        while True:
            end = _find_end(separator, self._buffer, look_from, nominal)
            if end is not None:
                yield self._take(end)
                look_from = first_look
                continue
            look_from = max(first_look, len(self._buffer) - _SEPARATOR_BYTES + 1)
            if len(self._buffer) > head + self._limits.max_document_bytes:
                self._drop_inside(head, look_from)
                look_from = head
            if not self._more():
                break
        if self._buffer:
            yield self._take(len(self._buffer))

    def _whole(self) -> Piece:
        """Return the whole stream as one piece, without content if it is too long."""
        while self._more():
            if self._dropped + len(self._buffer) > self._limits.max_document_bytes:
                self._drop_inside(0, len(self._buffer))
        content = b"" if self._dropped else bytes(self._buffer)
        length = self._dropped + len(self._buffer)
        return self._make(start=0, stop=length, content=content, disk_bytes=self._disk_bytes)

    def _skip(self, place: Place) -> None:
        """Skip to a place. Raises ConfigError if no piece can end there, or the content of standard input before it has
        changed."""
        last = b"\n"
        while (left := place.offset - self._start) > 0:
            if not self._buffer and not self._more():
                raise changed(self._path, f"it ends {left} bytes before the place to resume from")
            count = min(left, len(self._buffer))
            last = bytes(self._buffer[count - 1 : count])
            self._drop(count)
        if last != b"\n" and (self._buffer or self._more()):
            raise changed(self._path, f"byte {place.offset} is no longer the start of a line")
        if self._sha256 and place.digest and self._sha256.hexdigest() != place.digest:
            raise changed(self._path, f"its first {place.offset} bytes differ from those of the earlier run")

    def _more(self) -> bool:
        content, self._disk_bytes = next(self._blocks, (b"", self._disk_bytes))
        self._buffer += content
        return bool(content)

    def _drop(self, count: int) -> None:
        if self._sha256:
            self._sha256.update(self._buffer[self._hashed : count])
        del self._buffer[:count]
        self._start += count
        self._hashed = 0

    def _drop_inside(self, start: int, stop: int) -> None:
        if self._sha256:
            self._sha256.update(self._buffer[self._hashed : stop])
        self._hashed = start
        self._dropped += stop - start
        self._dropped_lines += self._buffer.count(b"\n", start, stop)
        del self._buffer[start:stop]

    def _take(self, end: int) -> Piece:
        head, length = self._limits.piece_bytes + _SLACK, self._dropped + end
        kept = head if length > head + self._limits.max_document_bytes else length
        content, start = bytes(self._buffer[:kept]), self._start
        dropped_lines = self._dropped_lines + self._buffer.count(b"\n", len(content), end)
        self._drop(end)
        self._start = start + length
        self._dropped = self._dropped_lines = 0
        return self._make(
            start=start,
            stop=start + length,
            content=content,
            dropped_lines=dropped_lines,
            disk_bytes=start + length if self._is_plain else self._disk_bytes,
            digest=self._sha256.hexdigest() if self._sha256 else "",
        )


def _find_end(separator: re.Pattern[bytes], content: bytearray, look_from: int, least: int) -> int | None:
    """Return the end of the first separator that starts at `look_from` or later and ends at `least` or later."""
    while found := separator.search(content, look_from):
        if found.end() >= least:
            return found.end()
        look_from = found.start() + 1
    return None
