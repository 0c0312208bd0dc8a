"""What is to be preprocessed and how, and how far it is."""

import os
from dataclasses import dataclass, field

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.data.inputs.places import Limits, TextDocuments
from megalite.data.tokenizers.base import Tokenizer
from megalite.data.tokenizers.build import build_tokenizer

MAX_FAULTS = 100
"""Bad lines whose place and reason are kept."""


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class PreprocessJob:
    """What to tokenize and how."""

    inputs: tuple[str, ...]
    """Files (.jsonl, .txt, .parquet; .gz and .zst of them), folders and globs of them; `-` is stdin."""
    output_prefix: str
    """Output is {output_prefix}_{key}_document.bin, .idx and .json for each key."""
    tokenizer: DataConfig
    """tokenizer_type, tokenizer_model, vocab_file, merge_file and tiktoken_pattern are read."""
    vocab_size: int | None = None
    """For NullTokenizer."""
    json_keys: tuple[str, ...] = ("text",)
    """Which values of a JSON object are text; each makes a dataset of its own."""
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document token."""
    max_document_bytes: int = Limits.max_document_bytes
    """A longer line or file is left out as bad; a tokenizer may need 70 times its size in memory."""
    text_documents: TextDocuments = "file"
    """What a document is in a text file."""
    workers: int = 1
    """Processes that tokenize; 1 works in this process. The output does not depend on it."""
    strict: bool = False
    """Stop at the first bad line."""
    restart: bool = False
    """Drop what an unfinished run has left, and replace finished files."""
    piece_bytes: int = 1 << 18
    """About how much input a worker is given at a time. The output does not depend on it."""
    checkpoint_seconds: float = 5.0
    """How often what is done is made safe against a kill; 0 is after every piece."""

    @property
    def limits(self) -> Limits:
        """How the input is cut."""
        return Limits(
            max_document_bytes=self.max_document_bytes,
            piece_bytes=self.piece_bytes,
            text_documents=self.text_documents,
        )

    @property
    def prefixes(self) -> list[str]:
        """Of the datasets, in the order of the keys."""
        return [f"{self.output_prefix}_{key}_document" for key in self.json_keys]


@dataclass
class Progress:
    """How far the job is, and in the end what it did."""

    documents: int = 0
    """Documents written."""
    tokens: int = 0
    """Tokens written, over all keys."""
    input_bytes: int = 0
    """Bytes of text read, after decompression."""
    disk_bytes: int = 0
    """Bytes of the input files that are behind."""
    disk_total: int | None = None
    """Bytes of all input files; None if stdin is among them."""
    bad: dict[str, int] = field(default_factory=dict)
    """Lines left out, by kind."""
    faults: list[str] = field(default_factory=list)
    """The first of them (at most MAX_FAULTS), `file:line: reason`."""
    kept_documents: int = 0
    """Documents that an earlier run had done already."""
    kept_tokens: int = 0
    """Their tokens."""
    kept_bytes: int = 0
    """The text that an earlier run had read."""
    kept_disk_bytes: int = 0
    """Bytes of the input files behind them."""
    notice: str = ""
    """What became of an earlier run's work; empty if there was none."""
    outputs: list[str] = field(default_factory=list)
    """Prefixes of the datasets, once they are there."""
    output_bytes: int = 0
    """Bytes of their files."""

    @property
    def bad_lines(self) -> int:
        """Lines left out."""
        return sum(self.bad.values())


def require_tokenizer(job: PreprocessJob) -> Tokenizer:
    """The job's tokenizer.

    Raises:
        ConfigError: none is given, or its files are bad.
    """
    tokenizer = build_tokenizer(job.tokenizer, job.vocab_size)
    if tokenizer is None:
        raise ConfigError("no tokenizer: give --tokenizer-model FILE, or --vocab-file and --merge-file")
    return tokenizer


def check_settings(job: PreprocessJob) -> None:
    """Raise a ConfigError for settings that cannot work."""
    if job.workers < 1:
        raise ConfigError(f"workers {job.workers} must be at least 1")
    if job.max_document_bytes < 1:
        raise ConfigError(
            f"max_document_bytes {job.max_document_bytes} must be at least 1; try {Limits.max_document_bytes}"
        )
    keys = job.json_keys
    if not keys or len(set(keys)) != len(keys):
        raise ConfigError(f"json_keys {' '.join(keys)!r} must name one or more different keys; try text")
    for key in keys:
        if "/" in key or "\0" in key:
            raise ConfigError(
                f"json_keys: {key!r} cannot be part of a file's name, which {job.output_prefix}_KEY_document is; "
                "rename the key in the input"
            )
