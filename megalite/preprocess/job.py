"""Define a preprocessing job, its progress and its shard of the input, and check its settings and output paths."""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path

from megalite.checkpoint.files import not_writable
from megalite.config.data import DataConfig, local_path
from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import SUFFIXES
from megalite.data.token_files import MASK_KEY
from megalite.preprocess.inputs import UNFINISHED, Input, find_inputs, open_regular
from megalite.preprocess.pieces import Limits, TextDocuments, check_keys
from megalite.preprocess.workers import MAX_WORKERS
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.build import build_tokenizer

MAX_FAULTS = 10  # bad lines that are stored and shown, with place and reason
SFT_KEYS = ("sft", MASK_KEY)  # datasets of fine-tuning examples: tokens, and a mask with 1 for each token in the loss
_REMEDY = "use another --output-prefix"

Border = tuple[int, int]  # a position between two documents: number of the input, and byte offset in it


@dataclass(frozen=True, kw_only=True)
class PreprocessJob:
    inputs: tuple[str, ...]  # files (.jsonl, .txt, .parquet; .gz, .zst), folders, globs; `-` is stdin
    output_prefix: str  # output is {output_prefix}_{key}_document.bin, .idx and .json for each key
    tokenizer: DataConfig  # tokenizer_type, tokenizer_model, vocab_file, merge_file and tiktoken_pattern are read
    vocab_size: int | None = None  # for NullTokenizer
    json_keys: tuple[str, ...] = ("text",)  # keys of the texts in a JSON object; each becomes a dataset
    sft: bool = False  # lines are examples of prompt and response or messages; json_keys are SFT_KEYS
    shard: tuple[int, int] | None = None  # (i, n): part i of n of the input
    append_eod: bool = False  # end each document with the tokenizer's end-of-document token
    max_document_bytes: int = Limits.max_document_bytes
    text_documents: TextDocuments = "file"
    workers: int = 1  # processes that tokenize, this one included. The output does not depend on it.
    strict: bool = False  # stop at the first bad line
    restart: bool = False  # drop the work of an unfinished run, and replace finished files
    piece_bytes: int = Limits.piece_bytes
    checkpoint_seconds: float = 5.0  # interval between saves of the work; 0: after every piece

    def __post_init__(self) -> None:
        if isinstance(self.inputs, str):  # its characters would be searched, / among them
            object.__setattr__(self, "inputs", (self.inputs,))
        if self.sft:
            object.__setattr__(self, "json_keys", SFT_KEYS)

    @property
    def limits(self) -> Limits:
        return Limits(self.max_document_bytes, self.piece_bytes, self.text_documents)

    @property
    def prefixes(self) -> list[str]:
        return [f"{self.output_prefix}_{key}_document" for key in self.json_keys]

    @property
    def unfinished(self) -> Path:
        """Folder of the job's files until it is done."""
        return Path(f"{self.output_prefix}{UNFINISHED}")


@dataclass
class Progress:
    documents: int = 0
    tokens: int = 0  # over all keys
    input_bytes: int = 0  # bytes of text read, after decompression
    disk_bytes: int = 0  # bytes of the input files that have been read
    disk_total: int | None = None  # bytes of all input files; None if stdin is among them
    bad: dict[str, int] = field(default_factory=dict)  # bad lines, by kind
    faults: list[str] = field(default_factory=list)  # the first of them (at most MAX_FAULTS), `file:line: reason`
    kept_documents: int = 0  # documents of an earlier run, included in `documents`
    kept_tokens: int = 0
    kept_bytes: int = 0
    notice: str = ""  # whether the work of an earlier run was resumed; empty without one
    outputs: list[str] = field(default_factory=list)  # prefixes of the finished datasets
    output_bytes: int = 0

    @property
    def bad_lines(self) -> int:
        return sum(self.bad.values())


def require_tokenizer(job: PreprocessJob) -> Tokenizer:
    """Build the job's tokenizer. Raises ConfigError if none is set or its files are bad."""
    tokenizer = build_tokenizer(job.tokenizer, job.vocab_size)
    if tokenizer is None:
        raise ConfigError("no tokenizer: give --tokenizer-model FILE, or --vocab-file and --merge-file")
    return tokenizer


def check_settings(job: PreprocessJob) -> None:
    if not 1 <= job.workers <= MAX_WORKERS:
        raise ConfigError(f"workers {job.workers} is not from 1 to {MAX_WORKERS}; try the number of cores")
    if job.max_document_bytes < 1:
        raise ConfigError(f"max_document_bytes {job.max_document_bytes} is below 1; try {Limits.max_document_bytes}")
    check_keys(job.json_keys)
    for key in job.json_keys:
        if "/" in key or "\0" in key:
            raise ConfigError(f"json_keys: {key!r} cannot be part of a file's name; rename the key in the input")


def check_output_prefix(prefix: str | Path, *, example: str) -> None:
    """Raise ConfigError if a prefix is an address, or has no name, such as `folder/`: its files would be hidden. The
    message suggests a prefix that ends in `example`."""
    if not Path(prefix).name or local_path(str(prefix)).endswith(("/", "/.", "/..")) or "\0" in str(prefix):
        raise ConfigError(f"output_prefix {prefix} has no name; use one such as {Path(prefix) / example}")


def check_target(job: PreprocessJob, inputs: Sequence[Input]) -> None:
    """Raise ConfigError if --output-prefix cannot work or would overwrite the input. Writes nothing."""
    prefix, unfinished = job.output_prefix, job.unfinished
    other = next((item for item in inputs if item.kind != "jsonl"), None) if job.sft else None
    if other is not None:
        raise ConfigError(f"input {other.path}: fine-tuning examples must be lines of JSON; use .jsonl files")
    check_output_prefix(prefix, example="corpus")
    targets = [Path(f"{name}{suffix}") for name in job.prefixes for suffix in SUFFIXES]
    if (fault := not_writable(unfinished.parent)) is not None:
        raise ConfigError(f"the output cannot be written at {fault[0]}: {fault[1]}; {_REMEDY}")
    for target in targets:
        if target.is_dir() and not target.is_symlink():
            raise ConfigError(f"{target} is a folder, but the output needs that name; {_REMEDY}")
    if unfinished.is_symlink():
        raise ConfigError(f"{unfinished} is a link; remove it, or {_REMEDY}")
    outputs, folder = {os.path.realpath(target) for target in targets}, os.path.realpath(unfinished)
    for item in inputs:
        path = os.path.realpath(item.path)
        if item.size is not None and path in outputs:
            raise ConfigError(f"input {item.path} would be overwritten by the output; {_REMEDY}")
        if item.size is not None and path.startswith(folder + os.sep):
            raise ConfigError(f"input {item.path} is in {unfinished}, the folder of the output; {_REMEDY}")


def require_free(job: PreprocessJob) -> None:
    """Raise ConfigError if the output exists and must not be replaced."""
    for prefix in [] if job.restart else job.prefixes:
        for suffix in SUFFIXES:
            if os.path.lexists(f"{prefix}{suffix}"):
                raise ConfigError(f"{prefix}{suffix} exists; {_REMEDY}, or --restart to replace it")


def parse_shard(text: str) -> tuple[int, int]:
    """Parse I/N: `2/8` is the third shard of eight. Raises ConfigError if it is malformed or I is not below N."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ConfigError(f"--shard {text} is not I/N with I from 0 to N - 1; the first of eight is 0/8")
    return int(index), int(count)


def shard_name(prefix: str, shard: tuple[int, int]) -> str:
    """Return the prefix of a shard's output. Sorting by name gives the order of shards."""
    return f"{prefix}-{shard[0]:05d}-of-{shard[1]:05d}"


def job_inputs(job: PreprocessJob) -> tuple[list[Input], list[int] | None]:
    """Return the inputs of a job and, for a shard, [its number, number of shards] without counting empty shards.

    Shards have about equally many bytes. Plain jsonl (and text with a document per line) is cut between lines; a
    compressed or parquet file belongs to one shard. Cuts depend on the files and n alone, so machines need not
    communicate. The list of an empty shard is empty.

    Raises ConfigError as `find_inputs`, and if standard input is among the inputs of a shard."""
    inputs = find_inputs(job.inputs)
    if job.shard is None:
        return inputs, None
    if any(item.size is None for item in inputs):
        raise ConfigError("--shard cannot cut standard input; give files")
    index, count = job.shard
    borders = [(0, 0), *(_border(job, inputs, part, count) for part in range(1, count)), (len(inputs), 0)]
    full = [part for part, (start, stop) in enumerate(pairwise(borders)) if start < stop]
    if index not in full:
        return [], [len(full), len(full)]
    return _between(inputs, borders[index], borders[index + 1]), [full.index(index), len(full)]


def _between(inputs: Sequence[Input], start: Border, stop: Border) -> list[Input]:
    found = []
    for number in range(start[0], min(stop[0] + 1, len(inputs))):
        first = start[1] if number == start[0] else 0
        end = stop[1] if number == stop[0] else None
        if end != 0:
            found.append(replace(inputs[number], start=first, stop=end))
    return found


def _border(job: PreprocessJob, inputs: Sequence[Input], part: int, count: int) -> Border:
    ends = list(accumulate(item.size or 0 for item in inputs))
    target = ends[-1] * part // count
    number = next(number for number, end in enumerate(ends) if target < end)
    item, size = inputs[number], inputs[number].size or 0
    offset = target - (ends[number] - size)
    lines = item.kind == "jsonl" or (item.kind == "text" and job.text_documents == "line")
    if lines and item.compression is None and offset:
        with open_regular(item.path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end_of_line = content.find(b"\n", offset - 1)
        offset = size if end_of_line < 0 else end_of_line + 1
    else:
        offset = size if 2 * offset >= size else 0
    return (number + 1, 0) if offset == size else (number, offset)
