"""The flags that name a tokenizer, of the commands that read or write token files."""

import argparse
from collections.abc import Sequence
from dataclasses import fields

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.config.values import nearest
from megalite.tokenizers.tiktoken_encodings import PATTERNS

KINDS: Sequence[str] = next(
    setting.metadata["choices"] for setting in fields(DataConfig) if setting.name == "tokenizer_type"
)
_OTHER_KINDS = {
    "gptsentencepiecetokenizer": "SentencePieceTokenizer",
    "llama3tokenizer": "HuggingFaceTokenizer",
    "qwentokenizer": "HuggingFaceTokenizer",
}
"""Other names that scripts have, in lower case, of kinds that give the same ids."""
_ADDS_START = "llama2tokenizer"


def add_tokenizer(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", vocab_size: str) -> None:
    """Add the flags; `vocab_size` is the help of --vocab-size."""
    for flag, metavar, text in (
        ("--tokenizer-type", "KIND", f"one of {', '.join(KINDS)}; default: by the content of the files"),
        ("--tokenizer-model", "FILE", "SentencePiece .model, tokenizer.json or tiktoken file, or their folder"),
        ("--vocab-file", "FILE", "GPT-2 BPE vocab.json"),
        ("--merge-file", "FILE", "GPT-2 BPE merges.txt"),
        ("--tiktoken-pattern", "PATTERN", f"how a tiktoken file splits text: {', '.join(PATTERNS)}, or a regex"),
    ):
        parser.add_argument(flag, metavar=metavar, help=text)
    parser.add_argument("--vocab-size", type=int, metavar="N", help=vocab_size)


def tokenizer_config(flags: argparse.Namespace) -> DataConfig:
    """The settings that the flags make.

    Raises:
        ConfigError: as `tokenizer_kind`.
    """
    names = ("tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern")
    kind = None if flags.tokenizer_type is None else tokenizer_kind(flags.tokenizer_type)
    return DataConfig(tokenizer_type=kind, **{name: getattr(flags, name) for name in names})


def tokenizer_kind(name: str) -> str:
    """The kind that a script means, in whatever case it is written.

    Raises:
        ConfigError: there is none, or its ids would differ.
    """
    known = {kind.lower(): kind for kind in KINDS} | _OTHER_KINDS
    if name.lower() in known:
        return known[name.lower()]
    if name.lower() == _ADDS_START:
        raise ConfigError(
            f"--tokenizer-type {name} would put <s> before each document; use SentencePieceTokenizer, which adds nothing"
        )
    raise ConfigError(f"--tokenizer-type {name} is unknown{nearest(name, KINDS)} (one of {', '.join(KINDS)})")
