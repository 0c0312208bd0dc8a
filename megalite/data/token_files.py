"""Token files opened once and checked, and `<prefix>.json` beside them: what they are made of, for people and checks.

Nothing in this side file depends on time, host or the number of workers. Made by preprocessing:

    format           1
    documents        documents, of which each is one sequence or none
    tokens           tokens in .bin
    dtype            type of a stored token, as numpy names it
    key, keys        the JSON key of this dataset, and all keys of the job
    append_eod       whether each document ends with `tokenizer.eod`
    bad_lines        lines left out, by kind
    tokenizer        kind, sha256, vocab_size, eod
    files            {".bin": {"bytes", "sha256"}, ".idx": {...}}
    shard            of a part that --shard wrote: its number, and how many have content
    document_lengths min, mean, max (tokens) and buckets: documents by the largest power of two in their length
"""

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset
from megalite.tokenizers.base import Tokenizer

SUFFIXES = (".bin", ".idx", ".json")
"""Files of one dataset: tokens, index and, where it was preprocessed here, the side file."""
FORMAT = 1
MASK_KEY = "sft_mask"
"""Among the `keys` of datasets of examples: that of the mask."""
_LIMIT = 64 << 20
_SHA256 = re.compile("[0-9a-f]{64}")

SAMPLED_BYTES = 64 << 20  # of a token file are looked at for ids outside the vocabulary when it is opened
_BLOCK_BYTES = 1 << 20


def side_file_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


def encode_side_file(facts: Mapping[str, Any]) -> bytes:
    """The content of a side file; `format` comes first."""
    return (json.dumps({"format": FORMAT, **facts}, indent=2) + "\n").encode("ascii")


def read_side_file(prefix: str | Path) -> dict[str, Any] | None:
    """The facts in `<prefix>.json`, or None if there is none, or one of another program. Raises ConfigError: it is ours
    and damaged, of a newer version, or cannot be read; names the file and what is wrong."""
    path = side_file_path(prefix)
    try:
        # A .json may be anybody's, and of any size: ours are short.
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
            f"{path}: written by a newer megalite (format {str(version)[:40]}, this one reads {FORMAT}); use that one, "
            "or move the file away"
        )
    fault = _side_fault(facts)
    if fault is not None:
        raise ConfigError(f"{path}: {fault}; move it away, or write the dataset again with megalite preprocess")
    return dict(facts)


def side_digests(facts: Mapping[str, Any]) -> dict[str, str]:
    """The sha256 of .bin and .idx, as far as the side file has them."""
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
    """Opens and checks each token file once, for all splits that read it. `tokenizer`: of the run, if it has one: token
    files that record another are refused; without one, those that record different ones."""

    def __init__(self, vocab_size: int, tokenizer: Tokenizer | None = None) -> None:
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self._open: dict[str, IndexedDataset] = {}
        self._first: tuple[str, str, str] | None = None
        """The first that records its tokenizer, with kind and sha256 of that."""

    def open(self, prefix: str) -> IndexedDataset:
        """The token file `prefix`.bin with its .idx. Raises ConfigError: it is missing, is damaged, or holds a token id
        outside the vocabulary."""
        if prefix not in self._open:
            _check_exists(prefix)
            indexed = IndexedDataset(prefix)
            if not indexed.num_tokens:
                raise ConfigError(
                    f"data path {prefix}: {prefix}.bin holds no tokens; leave it out, or write it again from text"
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
        first, *theirs = self._first = self._first or (prefix, *recorded)
        if recorded[1] != theirs[1]:
            raise ConfigError(
                f"{prefix}.bin was made with {recorded[0]} (sha256 {recorded[1][:12]}...), and {first}.bin with {theirs[0]} (sha256 "
                f"{theirs[1][:12]}...): the same id means different text; preprocess one of them again with the other's tokenizer, "
                f"or move {side_file_path(prefix)} away if the two are known to give the same ids"
            )

    def open_mask(self, prefix: str) -> IndexedDataset:
        """What says which tokens of `prefix` are the model's to say: `name_mask_document` beside `name_document`.
        Raises ConfigError: there is none, or it is not in step with the tokens."""
        place = mask_prefix(prefix)
        if not (_exists(f"{place}.bin") and _exists(f"{place}.idx")):
            raise ConfigError(
                f"data path {prefix}: sft needs {place}.bin and .idx, which say where the responses are; give the "
                "examples themselves (a .jsonl file), or what megalite preprocess --sft writes"
            )
        mask = IndexedDataset(place)
        if not np.array_equal(mask.sizes, self.open(prefix).sizes):
            raise ConfigError(f"{place} is not in step with {prefix}; write both again with megalite preprocess --sft")
        return mask


def refuse_examples(prefix: str) -> None:
    """Raise ConfigError where a run without sft would learn the prompts of examples too: the side file or a mask beside the
    tokens says what they are."""
    mask, keys = Path(f"{mask_prefix(prefix)}.idx"), _recorded(prefix, "keys")
    signs = [side_file_path(prefix)] if isinstance(keys, list) and MASK_KEY in keys else []
    signs += [mask] if _exists(str(mask)) else []
    if signs:
        raise ConfigError(
            f"data path {prefix} holds examples to fine-tune on, as {' and '.join(map(str, signs))} show{'s' * (len(signs) == 1)}, "
            "and without sft their prompts are learned too; add --sft to learn the responses alone, or move "
            f"{'these' if len(signs) > 1 else 'that'} away to learn all tokens"
        )


def mask_prefix(prefix: str) -> str:
    """The dataset beside the tokens of examples that says which of them are responses."""
    return f"{prefix.removesuffix('_document')}_mask_document"


def require_recorded_tokenizer(prefix: str, tokenizer: Tokenizer | str) -> None:
    """The tokenizer must be the one that the side file names, if there is a sound one that does. `tokenizer`: or the
    fingerprint of a model's. Raises ConfigError: it is another; names both."""
    if isinstance(tokenizer, str):
        own, has, give = tokenizer, "the model has its own", "token files of that one"
    else:
        own, has, give = tokenizer.fingerprint(), f"this run has {tokenizer.name}", "that one"
    recorded = _recorded_tokenizer(prefix)
    if recorded is not None and recorded[1] != own:
        raise ConfigError(
            f"{prefix}.bin was made with another tokenizer: {recorded[0]} (sha256 {recorded[1][:12]}...), and {has} (sha256 "
            f"{own[:12]}...); give {give}, or move {side_file_path(prefix)} away if the two are known to give the same ids"
        )


def _recorded(prefix: str, name: str) -> Any:
    """A fact of the side file; None where there is no sound one that has it."""
    try:
        return (read_side_file(prefix) or {}).get(name)
    except ConfigError:
        return None


def _recorded_tokenizer(prefix: str) -> tuple[str, str] | None:
    """Kind and sha256 of the tokenizer that the side file names; None where there is no sound one that does."""
    recorded = _recorded(prefix, "tokenizer")
    if not isinstance(recorded, dict) or not isinstance(sha256 := recorded.get("sha256"), str):
        return None
    return str(recorded.get("kind", "a tokenizer"))[:40], sha256


def _check_exists(prefix: str) -> None:
    """Name what is missing, and existing names that are like it."""
    folder = Path(prefix).parent
    try:
        missing = [f"{prefix}{suffix}" for suffix in (".bin", ".idx") if not _exists(f"{prefix}{suffix}")]
        if not missing:
            return
        there = sorted({path.stem for path in folder.iterdir() if path.suffix == ".idx"}) if folder.is_dir() else []
    except OSError as error:
        raise ConfigError(
            f"data path {prefix}: {error.strerror}; a prefix is a path without .bin in a folder that can be read"
        ) from None
    near = difflib.get_close_matches(Path(prefix).name, there, n=3, cutoff=0.4) or there[:5]
    has = (
        "has " + " or ".join(str(folder / name) for name in near) if near else "has no .idx file (megalite preprocess)"
    )
    if Path(prefix).is_dir():
        has += f"; the text files in a folder are {prefix}/"
    verb = "do" if len(missing) == 2 else "does"
    raise ConfigError(
        f"data path {prefix}: {' and '.join(missing)} {verb} not exist; give a path without .bin: {folder} {has}"
    )


def _exists(path: str) -> bool:
    """Raises OSError where that is unknown."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _check_token_ids(indexed: IndexedDataset, vocab_size: int, tokenizer: Tokenizer | None) -> None:
    """Every id of a small file, evenly spread blocks of a large one; what these miss fails when it is read."""
    tokens = indexed.tokens
    if tokens.dtype.kind == "u" and np.iinfo(tokens.dtype).max < vocab_size:
        return
    block = _BLOCK_BYTES // tokens.dtype.itemsize
    blocks, looked_at = -(-len(tokens) // block), max(2, SAMPLED_BYTES // _BLOCK_BYTES)
    chosen = [i * (blocks - 1) // (looked_at - 1) for i in range(looked_at)]
    lowest, highest = 0, 0
    for number in range(blocks) if blocks <= looked_at else chosen:
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
            f"{indexed.bin_path}: holds token id {highest}, but vocab_size is {vocab_size}{made}; give the tokenizer that wrote "
            f"the file, or set vocab_size to at least {highest + 1}"
        )
