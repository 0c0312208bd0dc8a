"""Parse the documents of a piece, report the bad ones, and tokenize the others."""

import codecs
import difflib
import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import token_dtype
from megalite.preprocess.inputs import Input
from megalite.preprocess.job import MAX_FAULTS, PreprocessJob, require_tokenizer
from megalite.preprocess.pieces import PARAGRAPH_END, Limits, Piece, Place, cut
from megalite.tokenizers.base import Tokenizer

_SHOWN_KEYS, _SHOWN_CHARACTERS = 5, 40
_JSON_BLANKS = " \t\r\n"
_JSON_TYPES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
_decoder = json.JSONDecoder()
# Called by decode(), which also skips blanks around the value: (line, 0) -> (value, position of its end).
_scan = _decoder.scan_once  # type: ignore[attr-defined]


class BadDocument(ValueError):
    """Raised for a bad document. Bad documents are counted by `kind`, such as `invalid JSON` or `too long`."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class BadLine(NamedTuple):
    """A line (paragraph, file, row) that is a bad document."""

    line: int  # number in the piece, from 0
    kind: str
    reason: str


@dataclass
class PieceTexts:
    lines: int  # lines of the piece, including blank ones; rows of a parquet file
    texts: list[list[Any]]  # [key][document]; a bad document is left out under all keys
    at: list[int] = field(default_factory=list)  # [document]: number of its first line in the piece, from 0
    bad: list[BadLine] = field(default_factory=list)

    def add(self, line: int, texts: Sequence[Any]) -> None:
        self.at.append(line)
        for column, text in zip(self.texts, texts, strict=True):
            column.append(text)

    def refuse(self, line: int, error: BadDocument) -> None:
        self.bad.append(BadLine(line, error.kind, str(error)))


def read_piece(
    piece: Piece,
    keys: Sequence[str],
    limits: Limits,
    parse: Callable[[bytes, Sequence[str]], Sequence[Any]] | None = None,
) -> PieceTexts:
    """Parse the documents of a piece that was cut with the same keys and limits. Blank lines are skipped. `parse`:
    converts a line of JSON to one value per key; default: the texts under the keys (`parse_line`)."""
    if piece.form == "rows":
        return _read_rows(piece, keys, limits)
    content, is_whole = piece.content, len(piece.content) == piece.stop - piece.start
    if piece.start == 0:
        content = content.removeprefix(codecs.BOM_UTF8)
    if piece.form == "file":
        return _read_file(content, is_whole, limits)
    if piece.form == "paragraph":
        return _read_paragraphs(content, is_whole, piece.dropped_lines, limits)
    lines = content.split(b"\n")
    # The part after the last line end is empty, or the beginning of a line that is too long.
    if not is_whole or not lines[-1]:
        lines.pop()
    found = PieceTexts(len(lines), [[] for _ in keys])
    is_json = piece.form == "json"
    for number, line in enumerate(lines):
        try:
            if len(line) > limits.max_document_bytes:
                raise _too_long(limits)
            if is_json:
                texts: Sequence[Any] = (parse or parse_line)(line, keys)
            else:
                texts = [plain_text(line.rstrip(b"\r") if line.strip() else b"")]
        except BadDocument as error:
            # Blank lines are detected only here, at no cost for good lines.
            if len(line) > limits.max_document_bytes or line.strip():
                found.refuse(number, error)
            continue
        found.add(number, texts)
    if not is_whole:
        found.refuse(found.lines, _too_long(limits))
        found.lines += 1
    return found


def good_texts(
    inputs: Sequence[Input],
    key: str,
    limits: Limits,
    parse: Callable[[bytes, Sequence[str]], Sequence[Any]] | None = None,
) -> Iterator[list[Any]]:
    """Yield the texts of each piece of the inputs, or the results of `parse` for lines of JSON. Raises ConfigError as
    `cut`, and for a bad line."""
    place: Place | None = None
    for piece in cut(inputs, keys=[key], limits=limits):
        found = read_piece(piece, [key], limits, parse)
        if found.bad:
            bad = found.bad[0]
            line = piece.after(bad.line + 1, place).lines
            raise ConfigError(f"{piece.path}:{line}: {bad.reason}; fix the line or leave it out")
        place = piece.after(found.lines, place)
        yield found.texts[0]


def _read_file(content: bytes, is_whole: bool, limits: Limits) -> PieceTexts:
    found = PieceTexts(max(1, content.count(b"\n")), [[]])
    try:
        if not is_whole:
            raise _too_long(limits)
        found.add(0, [plain_text(content)])
    except BadDocument as error:
        found.refuse(0, error)
    return found


def _read_paragraphs(content: bytes, is_whole: bool, dropped_lines: int, limits: Limits) -> PieceTexts:
    parts = PARAGRAPH_END.split(content)
    found = PieceTexts(content.count(b"\n") + dropped_lines, [[]])
    found.lines += is_whole and not content.endswith(b"\n")
    line = 0
    for number, part in enumerate(parts):
        # A third line end in a row remains at the start of a part, half a CRLF or the file's last line end at its end.
        text = part.removeprefix(b"\r\n") if part.startswith(b"\r\n") else part.removeprefix(b"\n")
        first = line + (len(text) < len(part))
        line += part.count(b"\n") + 2
        text = text.removesuffix(b"\n").removesuffix(b"\r")
        try:
            if len(text) > limits.max_document_bytes or (not is_whole and number == len(parts) - 1):
                raise _too_long(limits)
            if text.strip():
                found.add(first, [plain_text(text)])
        except BadDocument as error:
            found.refuse(first, error)
    return found


def _read_rows(piece: Piece, keys: Sequence[str], limits: Limits) -> PieceTexts:
    found = PieceTexts(len(piece.rows), [[] for _ in keys])
    for number, row in enumerate(piece.rows):
        try:
            raw = [text for text in row if text is not None]
            if len(raw) < len(row):
                raise BadDocument("wrong type", "null instead of a text")
            if any(len(text) > limits.max_document_bytes for text in raw):
                raise _too_long(limits)
            found.add(number, [plain_text(text) for text in raw])
        except BadDocument as error:
            found.refuse(number, error)
    return found


def _too_long(limits: Limits) -> BadDocument:
    return BadDocument(
        "too long", f"longer than {limits.max_document_bytes:,} bytes; raise the limit with --max-document-mb"
    )


def parse_line(raw: bytes, keys: Sequence[str]) -> list[str]:
    """Return the texts under `keys` of a JSON object (of a repeated key the last one). Raises BadDocument if the line
    is not UTF-8 or not a JSON object, or if a key is missing or its value is not a string, empty or a lone
    surrogate."""
    document = parse_object(raw)
    texts = []
    for key in keys:
        if key not in document:
            raise BadDocument("missing key", _missing(key, tuple(document)[:50]))
        text = text_of(document[key], key)
        if not text.isascii() and (b"\\ud" in raw or b"\\uD" in raw):
            check_surrogates(text, key)
        texts.append(text)
    return texts


def text_of(value: object, key: str) -> str:
    """Return `value` if it is a non-empty string, else raise BadDocument."""
    if type(value) is not str:
        raise BadDocument("wrong type", f"expected a string under {key!r}, got {type_name(value)}")
    if not value:
        raise BadDocument("empty text", f"empty text under {key!r}")
    return value


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse a line with a JSON object. Raises BadDocument if it is not UTF-8, not JSON or not an object."""
    line = _decode(raw)
    try:
        document, end = _scan(line, 0)
        if end != len(line) and line[end:].strip(_JSON_BLANKS):
            document = _decode_json(line)
    except (ValueError, StopIteration, RecursionError):
        document = _decode_json(line)
    if type(document) is not dict:
        raise BadDocument("no object", f"expected a JSON object, got {type_name(document)}")
    return document


def plain_text(raw: bytes) -> str:
    """Decode a plain-text document. Raises BadDocument if it is not UTF-8 or empty."""
    if not raw:
        raise BadDocument("empty text", "empty text")
    return _decode(raw)


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument("invalid UTF-8", f"invalid UTF-8 at byte {error.start}") from None


def _decode_json(line: str) -> object:
    try:
        return _decoder.decode(line)
    except json.JSONDecodeError as error:
        # Some of Python's messages end with "at".
        reason = f"{error.msg.removesuffix(' at')} at character {error.pos}"
    except RecursionError:
        reason = "nested too deep"
    except ValueError:  # Python limits the digits of an int
        reason = f"a number has more than {sys.get_int_max_str_digits()} digits"
    raise BadDocument("invalid JSON", f"invalid JSON: {reason}")


def check_surrogates(text: str, key: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadDocument(
            "lone surrogate", f"half of a surrogate pair under {key!r} at character {error.start}"
        ) from None


@functools.lru_cache(maxsize=64)
def _missing(key: str, present: tuple[str, ...]) -> str:
    """Describe a missing key. Cached, because the same keys are usually missing in many lines."""
    names = [name[:_SHOWN_CHARACTERS] + "..." * (len(name) > _SHOWN_CHARACTERS) for name in present]
    near = difflib.get_close_matches(key, names, 1)
    shown = ", ".join(map(repr, names[:_SHOWN_KEYS])) or "none"
    more = ", ..." if len(present) > _SHOWN_KEYS else ""
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if "messages" in names or "prompt" in names:
        hint = "; examples to fine-tune on need --sft"
    return f"no key {key!r} (there are {shown}{more}){hint}"


def type_name(value: object) -> str:
    return _JSON_TYPES.get(type(value), "a number")


@dataclass(frozen=True)
class TokenizedPiece:
    """The tokens of a piece's good documents, and its bad lines."""

    lines: int  # lines of the piece, including bad and blank ones
    first_line: int | None  # line in the piece of the first good document
    tokens: list[NDArray]  # for each key the concatenated tokens of all documents, in the stored type
    lengths: list[NDArray[np.int64]]  # for each key the length of each document `[documents]`
    bad: dict[str, int]  # bad lines, by kind
    faults: list[tuple[int, str]]  # (line in the piece, reason) of the first of them, in order


class PieceTokenizer:
    def __init__(self, job: PreprocessJob, tokenizer: Tokenizer | None = None) -> None:
        self._keys, self._limits = job.json_keys, job.limits
        self._tokenizer = tokenizer or require_tokenizer(job)
        self._ending = [self._tokenizer.eod] if job.append_eod else []
        self._dtype = token_dtype(self._tokenizer.vocab_size)

    def __call__(self, piece: Piece) -> TokenizedPiece:
        """Parse and tokenize a piece. A bad document is left out under all keys. Raises ConfigError if the tokenizer
        returns ids outside its vocabulary."""
        read = self._read(piece)
        left_out: dict[int, tuple[str, str]] = {}
        encoded = self._encode_all(read, left_out)
        good = [i for i in range(len(encoded[0])) if i not in left_out]
        bad = sorted([*read.bad, *(BadLine(read.at[i], kind, reason) for i, (kind, reason) in left_out.items())])
        joined = [self._join([ids[i] for i in good]) for ids in encoded]
        return TokenizedPiece(
            lines=read.lines,
            first_line=read.at[good[0]] if good else None,
            tokens=[tokens for tokens, _ in joined],
            lengths=[lengths for _, lengths in joined],
            bad=dict(Counter(kind for _, kind, _ in bad)),
            faults=[(line, reason) for line, _, reason in bad[:MAX_FAULTS]],
        )

    def _read(self, piece: Piece) -> PieceTexts:
        return read_piece(piece, self._keys, self._limits)

    def _encode_all(
        self, read: PieceTexts, left_out: dict[int, tuple[str, str]]
    ) -> list[Sequence[Sequence[int] | NDArray]]:
        """Return [key][document] ids; add document -> (kind, reason) to `left_out` for documents without ids."""
        return [self._encode(key, texts, left_out) for key, texts in zip(self._keys, read.texts, strict=True)]

    def _encode(
        self, key: str, texts: Sequence[str], left_out: dict[int, tuple[str, str]]
    ) -> Sequence[Sequence[int] | NDArray]:
        """Return [document] ids; add document -> (kind, reason) to `left_out` for documents without ids."""
        try:
            encoded: Sequence[Sequence[int] | NDArray] = self._tokenizer.encode_batch(texts)
        except ConfigError:
            encoded = [self._encode_one(i, text, left_out) for i, text in enumerate(texts)]
        where = f" under {key!r}" if len(self._keys) > 1 else ""
        for i, document in enumerate(encoded):
            if not len(document):
                left_out.setdefault(i, ("no tokens", f"no tokens{where}"))
        return encoded

    def _encode_one(self, i: int, text: str, left_out: dict[int, tuple[str, str]]) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except ConfigError as error:
            left_out.setdefault(i, ("not tokenized", str(error)))
            return []

    def _join(self, documents: Sequence[Sequence[int] | NDArray]) -> tuple[NDArray, NDArray[np.int64]]:
        """Return (all tokens in the stored type, length of each document), including EOD tokens."""
        lengths = np.array([len(ids) + len(self._ending) for ids in documents], dtype=np.int64)
        if documents and isinstance(documents[0], np.ndarray):
            ending = np.array(self._ending, dtype=self._dtype)
            tokens = np.concatenate([part for ids in documents for part in (ids, ending)])
        else:
            flat: list[int] = []
            for ids in documents:
                flat += ids
                flat += self._ending
            tokens = np.fromiter(flat, np.int64, len(flat))
        size = self._tokenizer.vocab_size
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
            wrong = int(tokens.max()) if int(tokens.min()) >= 0 else int(tokens.min())
            raise ConfigError(f"{self._tokenizer.name} returns token id {wrong}, beyond its {size} ids; fetch it again")
        return tokens.astype(self._dtype), lengths
