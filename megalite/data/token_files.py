"""Open and check token files, and read and write their side files `<prefix>.json`, which describe them.

A side file does not depend on time, host or the number of workers. Preprocessing writes:

    format           1
    documents        number of documents, each with one sequence or none
    tokens           tokens in .bin
    dtype            numpy's name of the type of a stored token
    key, keys        the JSON key of this dataset, and all keys of the job
    append_eod       whether each document ends with `tokenizer.eod`
    bad_lines        lines left out, by kind
    tokenizer        kind, sha256, vocab_size, eod
    files            {".bin": {"bytes", "sha256"}, ".idx": {...}}
    shard            with --shard: number of the part, and number of parts with content
    document_lengths min, mean, max (tokens) and buckets: documents by the largest power of two in their length"""

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megalite.config.data import TEXT_SUFFIXES
from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset
from megalite.tokenizers.base import Tokenizer

FORMAT = 1
MASK_KEY = "sft_mask"
"""Key of the mask in `keys` of a fine-tuning dataset."""
_LIMIT = 64 << 20
_SHA256 = re.compile("[0-9a-f]{64}")

SAMPLED_BYTES = 64 << 20  # part of a token file that is checked for ids outside the vocabulary when it is opened
_BLOCK_BYTES = 1 << 20


def is_dataset(prefix: str) -> bool:
    """Return whether there is a token file of this name."""
    try:
        return Path(f"{prefix}.idx").exists()
    except OSError:  # such as a name that is too long
        return False


def side_file_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


def encode_side_file(facts: Mapping[str, Any]) -> bytes:
    return (json.dumps({"format": FORMAT, **facts}, indent=2) + "\n").encode("ascii")


def read_side_file(prefix: str | Path) -> dict[str, Any] | None:
    """Read `<prefix>.json`; return None if it does not exist or another program wrote it. Raises ConfigError if it is a
    damaged side file, of a newer version, or not readable."""
    path = side_file_path(prefix)
    try:
        # Another program may have written a .json of any size; side files are short.
        if not path.is_file() or path.stat().st_size > _LIMIT:
            return None
        facts = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; make it readable, or move it away") from None
    except (ValueError, RecursionError):
        return None
    version = facts.get("format") if isinstance(facts, dict) else None
    if type(version) is not int or version < FORMAT:
        return None
    if version > FORMAT:
        raise ConfigError(
            f"{path}: written by a newer megalite (format {str(version)[:40]}, this version reads {FORMAT}); use the newer "
            "one, or move the file away"
        )
    fault = _side_fault(facts)
    if fault is not None:
        raise ConfigError(f"{path}: {fault}; move it away, or write the dataset again with megalite preprocess")
    return dict(facts)


def side_digests(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the sha256 of .bin and .idx that the side file contains."""
    files = facts.get("files", {})
    return {suffix: files[suffix]["sha256"] for suffix in (".bin", ".idx") if suffix in files}


def _side_fault(facts: dict[str, Any]) -> str | None:
    def is_count(value: object) -> bool:
        return type(value) is int and value >= 0

    for name in ("documents", "tokens", "dtype"):
        value = facts.get(name)
        if not (isinstance(value, str) if name == "dtype" else is_count(value)):
            return f"{name} is {value!r:.80}, expected {'the name of a type' if name == 'dtype' else 'a number of at least 0'}"
    files = facts.get("files", {})
    for suffix, entry in files.items() if isinstance(files, dict) else [("", files)]:
        sha256 = entry.get("sha256") if isinstance(entry, dict) else None
        if not (isinstance(sha256, str) and _SHA256.fullmatch(sha256) and is_count(entry["bytes"])):
            return f"files {suffix} is {entry!r:.80}, expected bytes and sha256"
    return None


class TokenFiles:
    """Opens and checks each token file once, for all splits. `tokenizer`: token files that record another one are an
    error; without it, files that record different ones are."""

    def __init__(self, vocab_size: int, tokenizer: Tokenizer | None = None) -> None:
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self._open: dict[str, IndexedDataset] = {}
        self._first: tuple[str, str, str] | None = None
        """The first file that records its tokenizer: prefix, and kind and sha256 of the tokenizer."""

    def open(self, prefix: str) -> IndexedDataset:
        """Open `prefix`.bin with its .idx. Raises ConfigError if it is missing, damaged, or contains a token id outside
        the vocabulary."""
        if prefix not in self._open:
            check_exists(prefix)
            indexed = IndexedDataset(prefix)
            if not indexed.num_tokens:
                raise ConfigError(
                    f"data path {prefix}: {prefix}.bin has no tokens; leave it out, or write it again from text"
                )
            if self.tokenizer is not None:
                require_recorded_tokenizer(prefix, self.tokenizer)
            else:
                self._require_one_tokenizer(prefix)
            _check_token_ids(indexed, self.vocab_size, self.tokenizer)
            self._open[prefix] = indexed
        return self._open[prefix]

    def _require_one_tokenizer(self, prefix: str) -> None:
        recorded = _recorded_tokenizer(prefix)
        if recorded is None:
            return
        self._first = self._first or (prefix, *recorded)
        first, kind, sha256 = self._first
        if recorded[1] != sha256:
            raise ConfigError(
                f"{prefix}.bin was made with {recorded[0]} (sha256 {recorded[1][:12]}...), and {first}.bin with {kind} (sha256 "
                f"{sha256[:12]}...): the same id means different text; preprocess one of them again with the other's tokenizer, "
                f"or move {side_file_path(prefix)} away if both tokenizers give the same ids"
            )

    def open_mask(self, prefix: str) -> IndexedDataset:
        """Open the response mask of `prefix`: `name_mask_document` beside `name_document`. Raises ConfigError if it is
        missing or its lengths differ from the tokens'."""
        path = mask_prefix(prefix)
        if not (_exists(f"{path}.bin") and _exists(f"{path}.idx")):
            raise ConfigError(
                f"data path {prefix}: sft needs {path}.bin and .idx, which mark the responses; use the examples (a .jsonl "
                "file), or the output of megalite preprocess --sft"
            )
        mask = IndexedDataset(path)
        if not np.array_equal(mask.sizes, self.open(prefix).sizes):
            raise ConfigError(f"{path} does not match {prefix}; write both again with megalite preprocess --sft")
        return mask


def refuse_examples(prefix: str) -> None:
    """Raise ConfigError if a run without sft would also learn the prompts of fine-tuning examples, recognised by the
    side file or a mask beside the tokens."""
    mask, keys = Path(f"{mask_prefix(prefix)}.idx"), _recorded(prefix, "keys")
    signs = [side_file_path(prefix)] if isinstance(keys, list) and MASK_KEY in keys else []
    signs += [mask] if _exists(str(mask)) else []
    if signs:
        raise ConfigError(
            f"data path {prefix} contains fine-tuning examples (see {' and '.join(map(str, signs))}); without sft their "
            "prompts are learned too; add --sft to learn the responses alone, or move "
            f"{'these files' if len(signs) > 1 else 'that file'} away to learn all tokens"
        )


def mask_prefix(prefix: str) -> str:
    """Return the prefix of the response mask of fine-tuning examples."""
    return f"{prefix.removesuffix('_document')}_mask_document"


def require_recorded_tokenizer(prefix: str, tokenizer: Tokenizer | str) -> None:
    """Raise ConfigError if the side file records another tokenizer. `tokenizer` may be the fingerprint of a model's
    tokenizer."""
    if isinstance(tokenizer, str):
        sha256, current, remedy = tokenizer, "the model has its own", "use token files of its tokenizer"
    else:
        sha256, current, remedy = tokenizer.fingerprint(), f"this run has {tokenizer.name}", "use the one of the file"
    recorded = _recorded_tokenizer(prefix)
    if recorded is not None and recorded[1] != sha256:
        raise ConfigError(
            f"{prefix}.bin was made with another tokenizer: {recorded[0]} (sha256 {recorded[1][:12]}...), and {current} (sha256 "
            f"{sha256[:12]}...); {remedy}, or move {side_file_path(prefix)} away if both tokenizers give the same ids"
        )


def _recorded(prefix: str, name: str) -> Any:
    """Return an entry of the side file, or None if it is missing or the file is damaged."""
    try:
        return (read_side_file(prefix) or {}).get(name)
    except ConfigError:
        return None


def _recorded_tokenizer(prefix: str) -> tuple[str, str] | None:
    """Return kind and sha256 of the tokenizer in the side file, or None."""
    recorded = _recorded(prefix, "tokenizer")
    if not isinstance(recorded, dict) or not isinstance(sha256 := recorded.get("sha256"), str):
        return None
    return str(recorded.get("kind", "a tokenizer"))[:40], sha256


def check_exists(prefix: str) -> None:
    """Raise ConfigError for missing files, with existing names that are similar."""
    folder = Path(prefix).parent
    try:
        missing = [f"{prefix}{suffix}" for suffix in (".bin", ".idx") if not _exists(f"{prefix}{suffix}")]
        if not missing:
            return
        existing = sorted({path.stem for path in folder.iterdir() if path.suffix == ".idx"}) if folder.is_dir() else []
    except OSError as error:
        raise ConfigError(
            f"data path {prefix}: {error.strerror}; a prefix is a path without .bin in a readable folder"
        ) from None
    near = difflib.get_close_matches(Path(prefix).name, existing, n=3, cutoff=0.4) or existing[:5]
    has = (
        "has " + " or ".join(str(folder / name) for name in near) if near else "has no .idx file (megalite preprocess)"
    )
    if Path(prefix).is_dir():
        has += f"; the text files in a folder are {prefix}/"
    elif Path(prefix).is_file() and not prefix.endswith((".bin", ".idx")):
        has += f"; a text file is named {', '.join(TEXT_SUFFIXES[::3])}"
    verb = "do" if len(missing) == 2 else "does"
    raise ConfigError(
        f"data path {prefix}: {' and '.join(missing)} {verb} not exist; give a path without .bin: {folder} {has}"
    )


def _exists(path: str) -> bool:
    """Return whether a path exists. Unlike Path.exists, raise OSError if that is unknown."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _check_token_ids(indexed: IndexedDataset, vocab_size: int, tokenizer: Tokenizer | None) -> None:
    """Check all ids of a small file, or evenly spread blocks of a large one. Other bad ids fail when they are read."""
    tokens = indexed.tokens
    if tokens.dtype.kind == "u" and np.iinfo(tokens.dtype).max < vocab_size:
        return
    block = _BLOCK_BYTES // tokens.dtype.itemsize
    blocks, sampled = -(-len(tokens) // block), max(2, SAMPLED_BYTES // _BLOCK_BYTES)
    chosen = [i * (blocks - 1) // (sampled - 1) for i in range(sampled)]
    lowest, highest = 0, 0
    for number in range(blocks) if blocks <= sampled else chosen:
        part = tokens[number * block : (number + 1) * block]
        lowest, highest = min(lowest, int(part.min())), max(highest, int(part.max()))
    if lowest < 0:
        raise ConfigError(
            f"{indexed.bin_path}: holds token id {lowest}; ids are at least 0: write the dataset again with "
            "megalite preprocess"
        )
    if highest >= vocab_size:
        made = "" if tokenizer is None else f" of {tokenizer.name} (sha256 {tokenizer.fingerprint()[:12]}...)"
        raise ConfigError(
            f"{indexed.bin_path}: holds token id {highest}, but vocab_size is {vocab_size}{made}; use the tokenizer that wrote "
            f"the file, or set vocab_size to at least {highest + 1}"
        )
