"""tiktoken's files: lines of base64 and rank, or Megatron-LM's JSON list of the same."""

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError

MAX_RANK = 1 << 24
"""Ranks are below it: far more than any vocabulary, and few enough that a garbled one costs no memory."""
_FIELDS = {"rank", "token_bytes", "token_str"}


def parse_ranks(content: bytes, path: str | Path) -> dict[bytes, int]:
    """Token -> rank, in the order of ranks; a lower rank is merged first.

    Args:
        content: `base64 SPACE rank` a line, or a JSON list of {rank, token_bytes (base64), token_str}.

    Raises:
        ConfigError: base64 or a rank is garbled, a token or a rank comes twice, or one of the 256 bytes is no token.
    """
    pairs = _json_entries(content, path) if content.lstrip()[:1] == b"[" else _lines(content, path)
    ranks: dict[bytes, int] = {}
    owners: dict[int, str] = {}
    for place, token, rank in pairs:
        if token in ranks:
            raise ConfigError(f"{path}: {place}: token {token!r} has rank {ranks[token]} already")
        if rank in owners:
            raise ConfigError(f"{path}: {place}: rank {rank} is taken by {owners[rank]} already")
        ranks[token], owners[rank] = rank, place
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConfigError(
            f"{path}: {len(missing)} of the 256 single bytes are missing, 0x{missing[0]:02x} among them; give the whole "
            "file of a byte-level BPE"
        )
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _lines(content: bytes, path: str | Path) -> list[tuple[str, bytes, int]]:
    entries = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        place = f"line {number}"
        fields = line.split()
        if len(fields) != 2:
            raise ConfigError(f"{path}: {place}: expected a token in base64 and its rank, got {line[:60]!r}")
        digits = fields[1] if fields[1].isdigit() and len(fields[1]) < 12 else b"-1"
        entries.append((place, _token(fields[0], place, path), _rank(int(digits), fields[1], place, path)))
    return entries


def _json_entries(content: bytes, path: str | Path) -> list[tuple[str, bytes, int]]:
    try:
        values = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {str(error)[:200]}; give the file unharmed") from None
    entries = []
    for i, value in enumerate(values):
        place = f"entry {i}"
        if not isinstance(value, dict) or not {"rank", "token_bytes"} <= value.keys() <= _FIELDS:
            raise ConfigError(
                f"{path}: {place}: expected an object of rank, token_bytes and token_str, got {str(value)[:60]}"
            )
        rank = _rank(value["rank"], value["rank"], place, path)
        if rank != i:
            raise ConfigError(f"{path}: {place}: rank is {rank}; such a list is in the order of ranks")
        entries.append((place, _token(value["token_bytes"], place, path), rank))
    return entries


def _token(text: Any, place: str, path: str | Path) -> bytes:
    try:
        token = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {place}: {str(text)[:60]!r} is not base64: {error}") from None
    if not token:
        raise ConfigError(f"{path}: {place}: the token is empty")
    return token


def _rank(rank: Any, text: Any, place: str, path: str | Path) -> int:
    if type(rank) is not int or not 0 <= rank < MAX_RANK:
        shown = text.decode("latin-1") if isinstance(text, bytes) else str(text)
        raise ConfigError(f"{path}: {place}: rank {shown[:30]!r} is not a number from 0 to {MAX_RANK - 1}")
    return rank
