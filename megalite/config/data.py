"""Where tokens come from: the settings, splits, and the files and blends that `data_path` names."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from megalite.config.errors import ConfigError, shortened
from megalite.config.option import option
from megalite.config.reading import read_input, read_json
from megalite.config.registry import Registry

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of train, valid and test, which sum to 1; missing ones are 0.
    Raises ConfigError: not one to three numbers that are at least 0 and not all 0."""
    example = f"give up to three numbers for train, valid and test, as in {DEFAULT_SPLIT}"
    try:
        shares = [] if "_" in split else [float(part) for part in split.split(",")]  # float() takes 9_0 for 90
    except ValueError:
        shares = []
    if not shares:
        raise ConfigError(f"split {split!r} is not a list of numbers; {example}")
    if len(shares) > len(SPLITS):
        raise ConfigError(f"split {split!r} has {len(shares)} numbers; {example}")
    if not all(math.isfinite(share) and share >= 0 for share in shares) or sum(shares) == 0:
        raise ConfigError(f"split {split!r} must have numbers of at least 0, not all of them 0; {example}")
    train, valid, test = [share / sum(shares) for share in shares] + [0.0] * (len(SPLITS) - len(shares))
    return train, valid, test


PATH_SETTINGS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
"""Settings that name token files or text: prefixes (files), or weights and prefixes by turns."""

HUB = "hf://"
"""Before the name of a dataset of Hugging Face, or before `datasets/` and a file there."""

UNSAVED = ("http://", "https://", HUB, "memory://")
"""Beginnings of addresses at which nothing can be saved: they are read alone, or gone with the process."""

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://")

TEXT_SUFFIXES = (
    *(f"{plain}{packed}" for plain in (".jsonl", ".ndjson", ".json", ".txt") for packed in ("", ".gz", ".zst")),
    ".parquet",
)
"""Of files of text, which are tokenized before training."""


def is_address(text: str) -> bool:
    """`s3://bucket/name`, `https://host/name`: not a path of this machine."""
    return _ADDRESS.match(text) is not None


def names_text(entry: str) -> bool:
    """A data path that names files of text by its form: a suffix of theirs, a glob, a folder with a slash at its end, or a
    dataset of Hugging Face."""
    return (
        entry.startswith(HUB)
        or entry.lower().endswith((*TEXT_SUFFIXES, "/"))
        or any(letter in entry for letter in "*?[")
    )


_SPLITS = {"train": "train_data_path", "valid": "valid_data_path", "test": "test_data_path"}
_FORMS = "[a, b], [0.3, a, 0.7, b], {a: 0.3, b: 0.7} or '0.3 a 0.7 b'"


def parse_data_path(entries: Sequence[str], name: str = "data_path") -> list[tuple[float | None, str]]:
    """(weight or None, prefix) of each dataset: `a b`, or weight/prefix pairs `0.3 a 0.7 b` (Megatron's rule).

    What reads as a number is a weight, whatever files there are; but in pairs the second may be a number too.
    Raises ConfigError: a number that is no weight of a pair, or a weight that is not a finite number above 0."""
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
    """The number that a word spells; None for 1_0, which float() takes for 10."""
    try:
        return None if "_" in entry else float(entry)
    except ValueError:
        return None


def words_of(name: str, value: Any, where: str) -> list[str]:
    """The words of a command line for what YAML or JSON gives.

    A list is taken as it is, its numbers as they are written; a mapping has a weight for each prefix; text is cut at
    white space.
    Raises ConfigError: nothing of this; the message starts with `where`."""
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
        return repr(value)  # of floats the shortest text with this value: 0.3 stays 0.3
    raise ConfigError(
        f"{where}: {name} takes weights and prefixes such as {_FORMS}, got the {type(value).__name__} "
        f"{shortened(value)} among them"
    )


def read_args_file(path: str, where: str) -> dict[str, list[str]]:
    """`--data-args-path FILE`: what --data-path would be given, on any number of lines.
    Raises ConfigError: the file cannot be read or is empty; the message starts with `where`."""
    words = read_input(path, where).split()
    if not words:
        raise ConfigError(f"{where} {path} is empty; it holds what --data-path takes, e.g. 0.3 a 0.7 b")
    return {"data_path": words}


def read_split_file(path: str, where: str) -> dict[str, list[str]]:
    """`--per-split-data-args-path FILE`: JSON with what each split's --..-data-path would be given.
    Raises ConfigError: the file cannot be read or holds something else; the message starts with `where`."""
    example = '{"train": ["0.3", "a", "0.7", "b"], "valid": ["c"]}'
    tree = read_json(path, where, example)
    if not isinstance(tree, dict) or not tree or set(tree) - set(_SPLITS):
        raise ConfigError(
            f"{where} {path} must hold paths for train, valid and test, e.g. {example}; found {shortened(tree)}"
        )
    found = {}
    for split, value in tree.items():
        if value is not None:  # Megatron-LM's way to leave a split out
            found[_SPLITS[split]] = words_of(split, value, f"{where} {path}")
    return found


DATA_FILES: Mapping[str, Callable[[str, str], dict[str, list[str]]]] = MappingProxyType(
    {"--data-args-path": read_args_file, "--per-split-data-args-path": read_split_file}
)
"""Megatron-LM's flag -> (its FILE, the flag) -> the settings in it."""


DATASETS: Registry[Any] = Registry("dataset")
"""Functions of (split, config, tokenizer) that give a dataset as `data.dataset.as_source` takes it, or None."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token files (`<prefix>.bin`/`<prefix>.idx`) or text, their split, and the tokenizer that made them."""

    data_path: list[str] = option([], basic=True)
    """Prefixes of token files, or weight/prefix pairs: `--data-path 0.3 a 0.7 b`. A .jsonl, .parquet or .txt file, a
    glob or a `folder/` is tokenized first."""
    text_field: str = option("text")
    """Key (jsonl) or column (parquet) of the text, where data_path names text."""
    sft: bool = option(False)
    """Fine-tune on prompt and response or chat messages; the loss is on responses alone."""
    train_data_path: list[str] = option([])
    """As data_path, for training alone, without split."""
    valid_data_path: list[str] = option([])
    """As data_path, for validation alone."""
    test_data_path: list[str] = option([])
    """As data_path, for testing alone."""
    split: str | None = option(None, basic=True)
    """Train, valid and test shares of data_path's documents; default 969,30,1."""
    mock_data: bool = option(False)
    """Train on made-up tokens (for timing); needs vocab_size."""
    dataset: str | None = option(None, choices=DATASETS)
    """A dataset that one of `imports` has registered, instead of token files."""
    tokenizer_type: str | None = option(
        None,
        choices=(
            *("SentencePieceTokenizer", "GPT2BPETokenizer", "HuggingFaceTokenizer", "TikTokenizer"),
            *("ByteLevelTokenizer", "NullTokenizer"),
        ),
    )
    """Kind of tokenizer; default: inferred from the files given."""
    tokenizer_model: str | None = option(None, flags=("--tokenizer-name-or-path",), basic=True)
    """SentencePiece .model, Hugging Face tokenizer.json or tiktoken file, or a folder that holds one."""
    vocab_file: str | None = option(None)
    """GPT-2 BPE vocab.json."""
    merge_file: str | None = option(None)
    """GPT-2 BPE merges.txt."""
    tiktoken_pattern: str | None = option(None)
    """How a tiktoken file cuts text into words: gpt2, r50k_base, p50k_base, cl100k_base, o200k_base, llama3, v1, v2, or
    a regular expression; default: inferred."""
    data_order: str = option("megalite", choices=("megalite", "megatron"))
    """Order of samples: a function of (seed, sample) alone, or Megatron-LM's, bit for bit."""
    data_cache_path: str | None = option(None)
    """Folder for indices, text's tokens and fetched files; default: `cache` beside each data path, ~/.cache/megalite
    for addresses."""
    packing: str = option("stream", choices=("stream", "best-fit"))
    """Samples are cut from one stream of documents, or hold whole documents that see only themselves."""
    num_workers: int = option(1, at_least=0, at_most=64)
    """Threads per rank that read the next batch during a step; 0: between steps."""
    eod_mask_loss: bool = option(False)
    """Leave the prediction after an end-of-document token out of the loss."""
    reset_attention_mask: bool = option(False)
    """Tokens see no other document than their own."""
    reset_position_ids: bool = option(False)
    """Positions start from 0 in each document."""

    @property
    def packs_documents(self) -> bool:
        """Samples are of whole documents, which see only themselves."""
        return self.sft or self.packing == "best-fit"

    @property
    def texts(self) -> list[str]:
        """What the data paths name that is text by its form, each once; none where a registered dataset reads them."""
        words = (word for name in PATH_SETTINGS if self.dataset is None for word in getattr(self, name))
        return list(
            dict.fromkeys(word for word in words if names_text(word.partition("?")[0] if is_address(word) else word))
        )

    def with_paths(self, places: Mapping[str, str]) -> "DataConfig":
        """The same with some data paths in the place of others."""
        changed: dict[str, Any] = {
            name: [places.get(word, word) for word in getattr(self, name)] for name in PATH_SETTINGS
        }
        return replace(self, **changed)
