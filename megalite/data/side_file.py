"""`<prefix>.json` beside a pair of token files: what they are made of, for people and for checks.

Nothing in it depends on time, host or the number of workers. Made by preprocessing:

    format           1
    documents        documents, of which each is one sequence or none
    tokens           tokens in .bin
    dtype            type of a stored token, as numpy names it
    key, keys        the JSON key of this dataset, and all keys of the job
    append_eod       whether each document ends with `tokenizer.eod`
    bad_lines        lines left out, by kind
    tokenizer        kind, sha256, vocab_size, eod
    files            {".bin": {"bytes", "sha256"}, ".idx": {...}}
    inputs           files, bytes and, where they are few, list of {"name", "bytes"} (no bytes for stdin)
    document_lengths min, mean, max (tokens) and buckets: documents by the largest power of two in their length
    token_histogram  most_common (id, count, text), unused (ids that never occur), max_id, entropy_bits; null for huge
                     vocabularies
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError

FORMAT = 1
_EARLIER = {"tokenizer_sha256", "bin_sha256"}
"""Fields of side files before they had a format."""
_LIMIT = 64 << 20
_SHA256 = re.compile("[0-9a-f]{64}")


def side_file_path(prefix: str | Path) -> Path:
    """Where the side file of a dataset is."""
    return Path(f"{prefix}.json")


def encode_side_file(facts: Mapping[str, Any]) -> bytes:
    """The content of a side file; `format` is put in front."""
    return (json.dumps({"format": FORMAT, **facts}, indent=2) + "\n").encode("ascii")


def read_side_file(prefix: str | Path) -> dict[str, Any] | None:
    """The facts in `<prefix>.json`, or None if there is none, or one of another program or of an earlier version.

    Raises:
        ConfigError: it is ours and damaged, of a newer version, or cannot be read; names the file and what is wrong.
    """
    return _read(side_file_path(prefix))[0]


def unused_side_file(prefix: str | Path) -> str | None:
    """Why `<prefix>.json`, which is there, is not read: it is not ours, or of an earlier version.

    None if it is read, or not there. Raises what read_side_file raises.
    """
    return _read(side_file_path(prefix))[1]


def _read(path: Path) -> tuple[dict[str, Any] | None, str | None]:
    """(facts, None), (None, why the file that is there is not used) or (None, None)."""
    foreign = None, f"{path} is not a side file of megalite: not used"
    try:
        if not path.exists():
            return None, None
        # Texts in JSON may bear any name, and may be as long as they like: ours are short.
        if not path.is_file() or path.stat().st_size > _LIMIT:
            return foreign
        facts = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; make it readable, or move it away"
        ) from None
    except (ValueError, RecursionError):
        return foreign
    if not isinstance(facts, dict):
        return foreign
    version = facts.get("format")
    if "format" not in facts and facts.keys() >= _EARLIER:
        return None, f"{path} is of an earlier version: not used"
    if type(version) is not int or version < FORMAT:
        return foreign
    if version > FORMAT:
        raise ConfigError(
            f"{path}: written by a newer megalite (format {str(version)[:40]}, this one reads {FORMAT}); use that one, "
            "or move the file away"
        )
    fault = _fault(facts)
    if fault is not None:
        raise ConfigError(
            f"{path}: {fault}; move it away, or write the dataset again with tools/preprocess_data.py"
        )
    return facts, None


def _fault(facts: dict[str, Any]) -> str | None:
    """What is wrong with the fields that checks rely on."""
    for name in ("documents", "tokens", "dtype"):
        if name not in facts:
            return f"{name} is missing"
    for name in ("documents", "tokens"):
        if not _is_count(facts[name]):
            return f"{name} is {_shown(facts[name])}, expected a number of at least 0"
    if not isinstance(facts["dtype"], str):
        return f"dtype is {_shown(facts['dtype'])}, expected the name of a type"
    files = facts.get("files", {})
    if not isinstance(files, dict):
        return f"files is {_shown(files)}, expected an object"
    for suffix, entry in files.items():
        if not (
            isinstance(entry, dict) and _is_count(entry.get("bytes")) and _is_digest(entry.get("sha256"))
        ):
            return f"files {_shown(suffix)} is {_shown(entry)}, expected bytes and sha256"
    return None


def _shown(value: object) -> str:
    """A value as it stands in the file, if it is a short one."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value)[:80]


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None
