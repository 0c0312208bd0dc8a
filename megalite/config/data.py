"""Settings of the data: token files, text, blends, splits, tokenizer."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalite.config.errors import ConfigError, shortened
from megalite.config.reading import read_input, read_json
from megalite.config.registry import Registry, option

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"


def parse_split(split: str) -> tuple[float, float, float]:
    """Parse `split` into the shares of train, valid and test, which sum to 1; missing ones are 0. Raises ConfigError:
    not one to three numbers, each at least 0 and not all 0."""
    example = f"give up to three numbers for train, valid and test, as in {DEFAULT_SPLIT}"
    # Megatron-LM's scripts pass '99,1,0' with its quotes.
    numbers = [_number(part) for part in split.strip("'").replace("/", ",").split(",")]
    shares = [number for number in numbers if number is not None]
    if len(shares) < len(numbers):
        raise ConfigError(f"split {split!r} is not a list of numbers; {example}")
    if len(shares) > len(SPLITS):
        raise ConfigError(f"split {split!r} has {len(shares)} numbers; {example}")
    if not all(math.isfinite(share) and share >= 0 for share in shares) or sum(shares) == 0:
        raise ConfigError(f"split {split!r} must have numbers of at least 0, not all of them 0; {example}")
    train, valid, test = [share / sum(shares) for share in shares] + [0.0] * (len(SPLITS) - len(shares))
    return train, valid, test


PATH_SETTINGS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
"""Settings that name token files or text: prefixes, or alternating weights and prefixes."""

HUB = "hf://"
"""Prefix of a Hugging Face dataset's name, or of `datasets/` and a file in one."""

UNSAVED = ("http://", "https://", HUB, "memory://")
"""Prefixes of addresses that cannot be saved to: they are read-only, or are lost with the process."""

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://")
_STORE = re.compile(r"(s3|gs|gcs|az|abfs):/")  # `Path` drops the second slash

LOCAL = "must be a path on this machine, such as runs/1"
"""What to answer where `is_remote`: otherwise a folder `s3:` would be written."""

TEXT_SUFFIXES = (
    *(f"{plain}{packed}" for plain in (".jsonl", ".ndjson", ".json", ".txt") for packed in ("", ".gz", ".zst")),
    ".parquet",
)
"""Suffixes of text files, which are tokenized before training."""


def is_address(text: str) -> bool:
    """Return whether the text is an address such as `s3://bucket/name`, not a path on this machine."""
    return _ADDRESS.match(text) is not None


def is_remote(path: str) -> bool:
    """Return whether a path is an address, or has been one."""
    return is_address(path) or _STORE.match(path) is not None


def local_path(path: str) -> str:
    """Return a path on this machine. Raises ConfigError: it is empty or an address."""
    if not path.strip():
        raise ConfigError("is empty; give a path")
    if is_remote(path):
        raise ConfigError(f"{path} {LOCAL}")
    return path


def names_text(entry: str) -> bool:
    """Return whether a data path names text by its form: a text suffix, a glob, a folder with a trailing slash, or a
    Hugging Face dataset."""
    return (
        entry.startswith(HUB)
        or entry.lower().endswith((*TEXT_SUFFIXES, "/"))
        or any(letter in entry for letter in "*?[")
    )


_FORMS = "[a, b], [0.3, a, 0.7, b], {a: 0.3, b: 0.7} or '0.3 a 0.7 b'"


def parse_data_path(entries: Sequence[str], name: str = "data_path") -> list[tuple[float | None, str]]:
    """Parse a data path into (weight or None, prefix) of each dataset: `a b`, or weight/prefix pairs `0.3 a 0.7 b`
    (Megatron's rule).

    A word that reads as a number is a weight, even if a file has that name; only the second word of a pair may be a
    number too. Raises ConfigError: a number that is not the weight of a pair, or a weight that is not finite and above
    0."""
    numbers = [_number(entry) for entry in entries]
    if entries and len(entries) % 2 == 0 and all(number is not None for number in numbers[::2]):
        pairs: list[tuple[float | None, str]] = []
        for weight, prefix in zip(numbers[::2], entries[1::2], strict=True):
            if weight is None or not 0 < weight < math.inf:
                raise ConfigError(
                    f"{name}: weight {weight} of {prefix} must be a finite number above 0; leave the pair out to skip "
                    f"{prefix}"
                )
            pairs.append((weight, prefix))
        return pairs
    for entry, number in zip(entries, numbers, strict=True):
        if number is not None:
            raise ConfigError(
                f"{name}: {entry!r} looks like a weight, but {' '.join(entries)!r} is not weight/prefix pairs; "
                f"give every prefix a weight, as in 0.3 a 0.7 b, or none; a token file of this name is ./{entry}"
            )
    return [(None, prefix) for prefix in entries]


def _number(entry: str) -> float | None:
    """Return the number that a word spells; None for 1_0, which float() reads as 10."""
    try:
        return None if "_" in entry else float(entry)
    except ValueError:
        return None


def words_of(name: str, value: Any, where: str) -> list[str]:
    """Return a data path from YAML or JSON as command-line words: a list as it is, a mapping as prefix -> weight, text
    split at white space. Raises ConfigError: any other value; the message starts with `where`."""
    if isinstance(value, list | tuple):
        return [_word(name, element, where) for element in value]
    if not isinstance(value, str | dict):
        raise ConfigError(f"{where}: {name} takes prefixes of token files such as {_FORMS}, got {shortened(value)}")
    words = value.split() if isinstance(value, str) else []
    for prefix, weight in value.items() if isinstance(value, dict) else ():
        if isinstance(weight, bool) or _number(str(weight)) is None:
            raise ConfigError(
                f"{where}: {name} takes a number as the weight of {prefix}, such as 0.3, got {shortened(weight)}"
            )
        words += [_word(name, weight, where), _word(name, prefix, where)]
    if not words:
        raise ConfigError(f"{where}: {name} is empty; leave it out or give it a value")
    return words


def _word(name: str, value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value)  # the shortest text of a float: 0.3 stays 0.3
    raise ConfigError(
        f"{where}: {name} takes weights and prefixes such as {_FORMS}, got the {type(value).__name__} "
        f"{shortened(value)} among them"
    )


def read_args_file(path: str, where: str) -> dict[str, list[str]]:
    """Read `--data-args-path FILE`: the words of --data-path, on any number of lines. Raises ConfigError: the file
    cannot be read or is empty; the message starts with `where`."""
    words = read_input(path, where).split()
    if not words:
        raise ConfigError(f"{where} {path} is empty; write the words of --data-path in it, e.g. 0.3 a 0.7 b")
    return {"data_path": words}


def read_split_file(path: str, where: str) -> dict[str, list[str]]:
    """Read `--per-split-data-args-path FILE`: JSON with the data path of each split. Raises ConfigError: the file
    cannot be read or is malformed; the message starts with `where`."""
    example = '{"train": ["0.3", "a", "0.7", "b"], "valid": ["c"]}'
    tree = read_json(path, where, example)
    if not isinstance(tree, dict) or not tree or set(tree) - set(SPLITS):
        raise ConfigError(
            f"{where} {path} must hold paths for train, valid and test, e.g. {example}; found {shortened(tree)}"
        )
    given = {split: value for split, value in tree.items() if value is not None}  # None: Megatron-LM leaves it out
    return {f"{split}_data_path": words_of(split, value, f"{where} {path}") for split, value in given.items()}


DATA_FILES: Mapping[str, Callable[[str, str], dict[str, list[str]]]] = {
    "--data-args-path": read_args_file,
    "--per-split-data-args-path": read_split_file,
}
"""Megatron-LM's flag -> (its FILE, the flag) -> the settings in it."""


DATASETS: Registry[Any] = Registry("dataset")
"""Functions of (split, config, tokenizer) that return a dataset for `data.dataset.as_source`, or None."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token files (`<prefix>.bin`/`<prefix>.idx`) or text, their split and their tokenizer."""

    data_path: list[str] = option([], basic=True)
    """Prefixes of token files, or weight/prefix pairs: `--data-path 0.3 a 0.7 b`. A .jsonl, .parquet or .txt file, a
    glob or a `folder/` is tokenized first."""
    text_field: str = option("text")
    """Key (jsonl) or column (parquet) of the text in text files."""
    sft: bool = option(False)
    """Fine-tune on prompt and response or on chat messages; only responses contribute to the loss."""
    train_data_path: list[str] = option([])
    """As data_path, for training only, without split."""
    valid_data_path: list[str] = option([])
    """As data_path, for validation only."""
    test_data_path: list[str] = option([])
    """As data_path, for testing only."""
    split: str | None = option(None, basic=True)
    """Train, valid and test shares of data_path's documents; default: 969,30,1."""
    mock_data: bool = option(False)
    """Train on synthetic tokens (for timing); needs vocab_size."""
    dataset: str | None = option(None, choices=DATASETS)
    """Dataset registered by --import, instead of token files."""
    tokenizer_type: str | None = option(
        None,
        choices=(
            *("SentencePieceTokenizer", "GPT2BPETokenizer", "HuggingFaceTokenizer", "TikTokenizer"),
            *("ByteLevelTokenizer", "NullTokenizer"),
        ),
    )
    """Kind of tokenizer; default: inferred from the files."""
    tokenizer_model: str | None = option(None, flags=("--tokenizer-name-or-path",), basic=True)
    """SentencePiece .model, Hugging Face tokenizer.json or tiktoken file, or a folder with one."""
    vocab_file: str | None = option(None)
    """GPT-2 BPE vocab.json."""
    merge_file: str | None = option(None)
    """GPT-2 BPE merges.txt."""
    tiktoken_pattern: str | None = option(None)
    """Word pattern of tiktoken: gpt2, r50k_base, p50k_base, cl100k_base, o200k_base, llama3, v1, v2, or a regular
    expression; default: inferred."""
    data_order: str = option("megalite", choices=("megalite", "megatron"))
    """Sample order: a function of (seed, sample) alone, or Megatron-LM's, bit for bit."""
    data_cache_path: str | None = option(None)
    """Folder for indices, tokenized text and downloads; default: `cache` beside each data path, ~/.cache/megalite for
    addresses."""
    packing: str = option("stream", choices=("stream", "best-fit"))
    """Cut samples from one stream of documents, or pack whole documents that attend only to themselves."""
    num_workers: int = option(1, at_least=0, at_most=64)
    """Threads per rank that read the next batch during a step; 0: read between steps."""
    eod_mask_loss: bool = option(False)
    """Exclude the prediction after an end-of-document token from the loss."""
    reset_attention_mask: bool = option(False)
    """Tokens attend only within their document."""
    reset_position_ids: bool = option(False)
    """Positions restart at 0 in each document."""

    @property
    def packs_documents(self) -> bool:
        """Whether samples pack whole documents, which attend only to themselves."""
        return self.sft or self.packing == "best-fit"

    @property
    def texts(self) -> list[str]:
        """Data paths that name text by their form, each once; empty if a registered dataset reads them."""
        words = (word for name in PATH_SETTINGS if self.dataset is None for word in getattr(self, name))
        return list(
            dict.fromkeys(word for word in words if names_text(word.partition("?")[0] if is_address(word) else word))
        )

    def with_paths(self, places: Mapping[str, str]) -> "DataConfig":
        """Return a copy with data paths replaced."""
        changed: dict[str, Any] = {
            name: [places.get(word, word) for word in getattr(self, name)] for name in PATH_SETTINGS
        }
        return replace(self, **changed)
