"""The documents of a piece, and what is wrong with those that are none."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from megalite.data.inputs.documents import BadDocument, parse_line, plain_text
from megalite.data.inputs.opening import changed, open_regular
from megalite.data.inputs.pieces import Piece
from megalite.data.inputs.places import Limits
from megalite.data.inputs.plain import PARAGRAPH_END, read_at

KINDS = (
    "invalid JSON",
    "no object",
    "missing key",
    "wrong type",
    "empty text",
    "invalid UTF-8",
    "lone surrogate",
    "too long",
)
"""What may be wrong with a line."""

_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class BadLine:
    """A line (paragraph, file, row) that is no document."""

    line: int
    """Its number in the piece, from 0."""
    kind: str
    """One of KINDS."""
    reason: str
    """What is wrong, for people."""


@dataclass
class PieceTexts:
    """What a piece holds."""

    lines: int
    """Lines in the piece, blank ones included; rows of a parquet file."""
    texts: list[list[str]]
    """[key][document]: a document is left out whole, so that all keys keep in step."""
    at: list[int] = field(default_factory=list)
    """[document]: the number in the piece of its (first) line, from 0."""
    bad: list[BadLine] = field(default_factory=list)


def read_piece(piece: Piece, keys: Sequence[str], limits: Limits) -> PieceTexts:
    """Documents of a piece that was cut with the same keys and limits. Blank lines are no documents and no fault.

    Raises:
        ConfigError: the file cannot be read or has changed since the piece was cut.
    """
    if piece.form == "rows":
        return _read_rows(piece, limits)
    content = _from_file(piece) if piece.content is None else piece.content
    is_whole = piece.kept == piece.stop - piece.start
    if piece.start == 0:
        content = content.removeprefix(_UTF8_MARK)
    if piece.form == "file":
        return _read_file(content, is_whole, limits)
    if piece.form == "paragraph":
        return _read_paragraphs(content, is_whole, piece.dropped_lines, limits)
    lines = content.split(b"\n")
    # What follows the last line end is nothing, or the beginning of a line that is too long.
    if not is_whole or not lines[-1]:
        lines.pop()
    found = PieceTexts(len(lines), [[] for _ in keys])
    is_json = piece.form == "json"
    for number, line in enumerate(lines):
        try:
            if len(line) > limits.max_document_bytes:
                raise _too_long(limits)
            texts = (
                parse_line(line, keys)
                if is_json
                else [plain_text(line.rstrip(b"\r") if line.strip() else b"")]
            )
        except BadDocument as error:
            # Blank lines are looked for here alone, where it costs good lines nothing.
            if len(line) > limits.max_document_bytes or line.strip():
                found.bad.append(BadLine(number, error.kind, str(error)))
            continue
        found.at.append(number)
        for column, text in zip(found.texts, texts, strict=True):
            column.append(text)
    if not is_whole:
        found.bad.append(_bad(found.lines, _too_long(limits)))
        found.lines += 1
    return found


def _from_file(piece: Piece) -> bytes:
    with open_regular(piece.path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != piece.file_size:
            raise changed(piece.path, f"it had {piece.file_size} bytes and now has {size}")
        content = read_at(piece.path, file, piece.start, piece.kept)
    is_cut_inside = piece.form != "file" and piece.kept == piece.stop - piece.start and piece.stop < size
    if is_cut_inside and not content.endswith(b"\n"):
        raise changed(piece.path, f"byte {piece.stop} is not the beginning of a line any more")
    return content


def _read_file(content: bytes, is_whole: bool, limits: Limits) -> PieceTexts:
    found = PieceTexts(max(1, content.count(b"\n")), [[]])
    try:
        if not is_whole:
            raise _too_long(limits)
        found.texts[0].append(plain_text(content))
        found.at.append(0)
    except BadDocument as error:
        found.bad.append(_bad(0, error))
    return found


def _read_paragraphs(content: bytes, is_whole: bool, dropped_lines: int, limits: Limits) -> PieceTexts:
    parts = PARAGRAPH_END.split(content)
    found = PieceTexts(content.count(b"\n") + dropped_lines, [[]])
    found.lines += is_whole and not content.endswith(b"\n")
    line = 0
    for number, part in enumerate(parts):
        # A third line end in a row is left at the beginning, half of a CRLF and the last line end of a file at the end.
        text = part.removeprefix(b"\r\n") if part.startswith(b"\r\n") else part.removeprefix(b"\n")
        first = line + (len(text) < len(part))
        line += part.count(b"\n") + 2
        text = text.removesuffix(b"\n").removesuffix(b"\r")
        try:
            if len(text) > limits.max_document_bytes or (not is_whole and number == len(parts) - 1):
                raise _too_long(limits)
            if text.strip():
                found.texts[0].append(plain_text(text))
                found.at.append(first)
        except BadDocument as error:
            found.bad.append(_bad(first, error))
    return found


def _read_rows(piece: Piece, limits: Limits) -> PieceTexts:
    rows = piece.stop - piece.start
    found = PieceTexts(rows, [[] for _ in piece.columns])
    nulls = set().union(*(column.nulls for column in piece.columns))
    ends = [column.offsets.tolist() for column in piece.columns]
    for row in range(rows):
        try:
            if row in nulls:
                raise BadDocument("wrong type", "null instead of a text")
            raw = [
                column.data[end[row] : end[row + 1]] for column, end in zip(piece.columns, ends, strict=True)
            ]
            if any(len(text) > limits.max_document_bytes for text in raw):
                raise _too_long(limits)
            texts = [plain_text(text) for text in raw]
        except BadDocument as error:
            found.bad.append(_bad(row, error))
            continue
        found.at.append(row)
        for column_texts, text in zip(found.texts, texts, strict=True):
            column_texts.append(text)
    return found


def _bad(line: int, error: BadDocument) -> BadLine:
    return BadLine(line, error.kind, str(error))


def _too_long(limits: Limits) -> BadDocument:
    return BadDocument(
        "too long", f"longer than {limits.max_document_bytes:,} bytes; raise the limit with --max-document-mb"
    )
