"""Documents out of lines of JSON and of text."""

import difflib
import functools
import json
import sys
from collections.abc import Sequence

_SHOWN_KEYS = 5
_SHOWN_CHARACTERS = 40
_JSON_BLANKS = " \t\r\n"
_decoder = json.JSONDecoder()
# What decode() calls, without looking for blanks before and after: (line, 0) -> (value, where it ends).
_scan = _decoder.scan_once  # type: ignore[attr-defined]


class BadDocument(ValueError):
    """A document that is none: of a kind in read.KINDS; the message says why."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def parse_line(raw: bytes, keys: Sequence[str]) -> list[str]:
    """The texts under `keys` of a JSON object; the last one of a key that occurs twice.

    Raises:
        BadDocument: no UTF-8, no JSON object, a key missing, its value no string, empty or half a surrogate pair.
    """
    line = _decode(raw)
    try:
        document, end = _scan(line, 0)
        if end != len(line) and line[end:].strip(_JSON_BLANKS):
            document = _decode_json(line)
    except (ValueError, StopIteration, RecursionError):
        document = _decode_json(line)
    if type(document) is not dict:
        raise BadDocument("no object", f"expected a JSON object, got {_name(document)}")
    texts = []
    for key in keys:
        if key not in document:
            raise BadDocument("missing key", _missing(key, tuple(document)[:50]))
        text = document[key]
        if type(text) is not str:
            raise BadDocument("wrong type", f"expected a string under {key!r}, got {_name(text)}")
        if not text:
            raise BadDocument("empty text", f"empty text under {key!r}")
        if not text.isascii() and (b"\\ud" in raw or b"\\uD" in raw):
            _check_surrogates(text, key)
        texts.append(text)
    return texts


def plain_text(raw: bytes) -> str:
    """The text of a document that is nothing but text.

    Raises:
        BadDocument: no UTF-8, or empty.
    """
    if not raw:
        raise BadDocument("empty text", "empty text")
    return _decode(raw)


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument("invalid UTF-8", f"invalid UTF-8 at byte {error.start}") from None


def _decode_json(line: str) -> object:
    """What a line holds, told carefully.

    Raises:
        BadDocument: it is no JSON.
    """
    try:
        return _decoder.decode(line)
    except json.JSONDecodeError as error:
        # Some of these messages end with "at", some do not.
        reason = f"{error.msg.removesuffix(' at')} at character {error.pos}"
    except RecursionError:
        reason = "nested too deep"
    except ValueError:  # Python makes no int of so many
        reason = f"a number has more than {sys.get_int_max_str_digits()} digits"
    raise BadDocument("invalid JSON", f"invalid JSON: {reason}")


def _check_surrogates(text: str, key: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadDocument(
            "lone surrogate", f"half of a surrogate pair under {key!r} at character {error.start}"
        ) from None


@functools.lru_cache(maxsize=64)
def _missing(key: str, present: tuple[str, ...]) -> str:
    """What to say about a missing key; the same keys are missed in line after line."""
    near = difflib.get_close_matches(key, [name[:_SHOWN_CHARACTERS] for name in present], 1)
    shown = ", ".join(_short(name) for name in present[:_SHOWN_KEYS]) or "none"
    more = ", ..." if len(present) > _SHOWN_KEYS else ""
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no key {key!r} (there are {shown}{more}){hint}"


def _short(name: str) -> str:
    return repr(name if len(name) <= _SHOWN_CHARACTERS else name[:_SHOWN_CHARACTERS] + "...")


def _name(value: object) -> str:
    """A JSON type as JSON calls it."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
