"""Inputs cut into pieces of work."""

import os
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from threading import Event
from typing import BinaryIO, Literal

from megalite.config.errors import ConfigError
from megalite.data.inputs.ahead import ahead
from megalite.data.inputs.find import Input
from megalite.data.inputs.opening import STDIN, changed, open_regular, stdin_number
from megalite.data.inputs.parquet import cut_parquet
from megalite.data.inputs.places import Limits, Place, Stretch
from megalite.data.inputs.plain import LINE_END, PARAGRAPH_END, cut_plain, read_at
from megalite.data.inputs.stream_cut import Stream
from megalite.data.inputs.streams import file_blocks, pipe_blocks

Form = Literal["json", "line", "paragraph", "file", "rows"]
"""What a document is: a line of JSON, a line, paragraph or all of a text file, or a row of a parquet file."""

FOREIGN_HEADS = (
    (b"\x1f\x8b", "gzip data", "gzip -dc"),
    (b"\x28\xb5\x2f\xfd", "zstd data", "zstd -dc"),
    (b"BZh", "bzip2 data", "bzip2 -dc"),
    (b"\xfd7zX", "xz data", "xz -dc"),
    (b"\xff\xfe", "UTF-16 text", "iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "iconv -f UTF-16 -t UTF-8"),
)
"""How other kinds of content begin, what they are, and the program that makes text of them."""


@dataclass(frozen=True, kw_only=True)
class Piece(Stretch):
    """A part of one input, for one worker; it can be sent to another process."""

    source: int
    """Number of the input, from 0."""
    path: str
    form: Form
    file_size: int | None
    """Bytes of the file on disk when it was cut; None for standard input."""

    @property
    def num_bytes(self) -> int:
        """Bytes of (decompressed) content that it stands for; of parquet, the bytes of the texts."""
        if self.form == "rows":
            return sum(len(column.data) for column in self.columns)
        return self.stop - self.start

    @property
    def held_bytes(self) -> int:
        """Bytes of content that it carries; a reader of a plain file gets its own."""
        return len(self.content or b"") + sum(len(column.data) for column in self.columns)

    def after(self, lines: int, before: Place | None = None) -> Place:
        """The place where it ends, if it has `lines` lines and work stood at `before` when it began."""
        same_input = before is not None and before.source == self.source
        return Place(
            self.source, self.stop, lines + (before.lines if before and same_input else 0), self.digest
        )


def cut(
    inputs: Sequence[Input], *, keys: Sequence[str], limits: Limits, after: Place | None = None
) -> Generator[Piece, None, None]:
    """All pieces, in the order of the inputs; with `after`, those from that place on.

    A piece ends between documents; where depends on the content and on limits.piece_bytes alone, so that pieces cut
    after the end of one of them are those that came then. Of a plain file only the ends of pieces are looked at, the
    rest is read by whoever reads the piece. Compressed files, standard input and parquet files are read by a thread, a
    few pieces ahead, and come with their content.

    Raises:
        ConfigError: keys or limits do not fit the inputs; an input is missing, damaged or not what it was.
    """
    _check(inputs, keys, limits, after)

    def pieces(stop: Event) -> Iterator[Piece]:
        for source, item in enumerate(inputs):
            place = after if after and after.source == source else Place(source, 0)
            if after is None or source >= after.source:
                yield from _cut_input(item, keys, limits, place, stop)

    if all(item.kind != "parquet" and item.compression is None and item.path != STDIN for item in inputs):
        yield from pieces(Event())
    else:
        yield from ahead(pieces, lambda piece: piece.held_bytes)


def _check(inputs: Sequence[Input], keys: Sequence[str], limits: Limits, after: Place | None) -> None:
    if not keys or len(set(keys)) != len(keys):
        raise ConfigError(f"json_keys {' '.join(keys)!r} must name one or more different keys; try text")
    plain = next((item for item in inputs if item.kind == "text"), None)
    if plain and len(keys) > 1:
        raise ConfigError(
            f"json_keys {' '.join(keys)!r}: {plain.path} is plain text and has no keys; give one key"
        )
    if limits.max_document_bytes < 1 or limits.piece_bytes < 1:
        raise ConfigError(
            f"max_document_bytes {limits.max_document_bytes} and piece_bytes {limits.piece_bytes} "
            f"must be at least 1; try {Limits()}"
        )
    if after and not (0 <= after.source < len(inputs) and after.offset >= 0):
        raise ConfigError(
            f"cannot go on at {after}: there are {len(inputs)} inputs; start from the beginning"
        )


def _cut_input(
    item: Input, keys: Sequence[str], limits: Limits, place: Place, stop: Event
) -> Iterator[Piece]:
    form = _form(item, limits)

    def as_pieces(stretches: Iterator[Stretch]) -> Iterator[Piece]:
        for stretch in stretches:
            yield Piece(source=place.source, path=item.path, form=form, file_size=item.size, **vars(stretch))

    if item.size is None:
        stream = Stream(item.path, pipe_blocks(stdin_number(), stop), limits, digest=True)
        yield from as_pieces(_cut_stream(stream, item, form, place))
        return
    with open_regular(item.path) as file:
        _check_size(item, file)
        if form == "rows":
            yield from as_pieces(cut_parquet(item.path, item.size, keys, limits, place.offset, stop))
        elif item.compression:
            blocks = file_blocks(item.path, file, item.compression, stop)
            stream = Stream(item.path, blocks, limits, digest=False)
            yield from as_pieces(_cut_stream(stream, item, form, place))
        elif form == "file":
            if not place.offset:
                kept = item.size if item.size <= limits.max_document_bytes else 0
                yield from as_pieces(
                    iter([Stretch(start=0, stop=item.size, kept=kept, disk_bytes=item.size)])
                )
        else:
            _check_place(item, file, place)
            if form == "json":
                _check_head(item.path, read_at(item.path, file, 0, min(4, item.size)))
            yield from as_pieces(
                cut_plain(item.path, file, item.size, _separator(form), limits, place.offset)
            )
        _check_size(item, file)


def _cut_stream(stream: Stream, item: Input, form: Form, place: Place) -> Iterator[Stretch]:
    if form == "file":
        return iter(()) if place.offset else stream.whole()
    if form == "json":
        _check_head(item.path, stream.head(4))
    stream.skip(place)
    return stream.cut(_separator(form))


def _form(item: Input, limits: Limits) -> Form:
    if item.kind == "text":
        return limits.text_documents
    return "json" if item.kind == "jsonl" else "rows"


def _separator(form: Form) -> re.Pattern[bytes]:
    return PARAGRAPH_END if form == "paragraph" else LINE_END


def _check_size(item: Input, file: BinaryIO) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != item.size:
        raise changed(item.path, f"it had {item.size} bytes and now has {size}")


def _check_place(item: Input, file: BinaryIO, place: Place) -> None:
    """A place in a plain file is its beginning, its end, or behind a line end."""
    size = item.size or 0
    if place.offset > size:
        raise changed(item.path, f"it has {size} bytes, and byte {place.offset} is the one to go on at")
    if 0 < place.offset < size and read_at(item.path, file, place.offset - 1, 1) != b"\n":
        raise changed(item.path, f"byte {place.offset} is not the beginning of a line any more")


def _check_head(path: str, head: bytes) -> None:
    """Files that are not what their name says, one fault instead of one for each line."""
    for mark, what, remedy in FOREIGN_HEADS:
        if head.startswith(mark):
            where = f"pipe it through {remedy}" if path == STDIN else f"run {remedy} on it, or rename it"
            raise ConfigError(f"input {path} holds {what}, not lines of JSON; {where}")
