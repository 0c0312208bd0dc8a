"""Raw text to token files: read, tokenize in worker processes, write in the order of the input."""

import json
import multiprocessing
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.data.documents import (
    JSON_SUFFIXES,
    BadDocument,
    DocumentBatch,
    find_inputs,
    parse_document,
    read_batches,
)
from megalite.data.indexed_dataset import token_dtype
from megalite.data.indexed_writer import IndexedDatasetWriter, sync_folder
from megalite.data.tokenizers.base import Tokenizer
from megalite.data.tokenizers.build import build_tokenizer

_SHOWN_FAULTS = 3
_IN_FLIGHT_PER_WORKER = 3


@dataclass(frozen=True, kw_only=True)
class PreprocessJob:
    """What to tokenize and how."""

    inputs: tuple[str, ...]
    """Files (.jsonl, .jsonl.gz, .txt), folders and globs of them."""
    output_prefix: str
    """Output is {output_prefix}_{key}_document.bin, .idx and .json for each key."""
    tokenizer: DataConfig
    """tokenizer_type, tokenizer_model, vocab_file and merge_file are read."""
    vocab_size: int | None = None
    """For NullTokenizer."""
    json_keys: tuple[str, ...] = ("text",)
    """Which values of a JSON object are text; each makes a dataset of its own."""
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document token."""
    workers: int = 1
    """Processes that tokenize; 1 works in this process. The output does not depend on it."""
    strict: bool = False
    """Stop at the first bad line."""


@dataclass
class Progress:
    """How far the job is, and in the end what it did."""

    documents: int = 0
    """Documents written."""
    tokens: int = 0
    """Tokens written, over all keys."""
    input_bytes: int = 0
    """Bytes read, after decompression."""
    bad_lines: int = 0
    """Lines left out."""
    faults: list[str] = field(default_factory=list)
    """The first few of them, `file:line: reason`."""
    outputs: list[str] = field(default_factory=list)
    """Prefixes of the datasets, once they are there."""


@dataclass(frozen=True)
class _Tokenized:
    """One batch after tokenizing: for each key all tokens and the length of each document."""

    tokens: list[NDArray]
    lengths: list[list[int]]
    faults: list[tuple[int, str]]
    """(line, reason) of what was left out."""


class BatchTokenizer:
    """Tokenizes batches; built once in each worker process."""

    def __init__(self, job: PreprocessJob) -> None:
        self.job = job
        self.tokenizer = require_tokenizer(job)
        self.dtype = token_dtype(self.tokenizer.vocab_size)

    def __call__(self, batch: DocumentBatch) -> _Tokenized:
        """All good documents of the batch. A document is left out whole, so that all keys keep in step."""
        keys = self.job.json_keys
        ids: list[list[int]] = [[] for _ in keys]
        lengths: list[list[int]] = [[] for _ in keys]
        faults = []
        for line, raw in enumerate(batch.documents, batch.first_line):
            try:
                encoded = [self._encode(text) for text in parse_document(raw, keys, is_json=batch.is_json)]
            except BadDocument as error:
                faults.append((line, str(error)))
                continue
            for i, document in enumerate(encoded):
                ids[i].extend(document)
                lengths[i].append(len(document))
        return _Tokenized([np.array(key_ids, dtype=self.dtype) for key_ids in ids], lengths, faults)

    def _encode(self, text: str) -> list[int]:
        try:
            ids = self.tokenizer.encode(text)
        except ConfigError as error:
            raise BadDocument(str(error)) from None
        if not ids:
            raise BadDocument("no tokens")
        return [*ids, self.tokenizer.eod] if self.job.append_eod else ids


def require_tokenizer(job: PreprocessJob) -> Tokenizer:
    """The job's tokenizer.

    Raises:
        ConfigError: none is given, or its files are bad.
    """
    tokenizer = build_tokenizer(job.tokenizer, job.vocab_size)
    if tokenizer is None:
        raise ConfigError("no tokenizer: give --tokenizer-model FILE, or --vocab-file and --merge-file")
    return tokenizer


def preprocess(
    job: PreprocessJob, on_progress: Callable[[Progress], None] = lambda progress: None
) -> Progress:
    """Run the job; `on_progress` is called after each batch with the running totals.

    Memory is bounded: some batches in flight for each worker, and 12 bytes a document for the index. Outputs appear
    under their names when all is done; a failed or killed run leaves earlier outputs as they were.

    Raises:
        ConfigError: inputs, keys or tokenizer are bad, no document is good, or (strict) any line is bad.
    """
    paths = find_inputs(job.inputs)
    if job.workers < 1:
        raise ConfigError(f"workers {job.workers} must be at least 1")
    if not job.json_keys or len(set(job.json_keys)) != len(job.json_keys):
        raise ConfigError(
            f"json_keys {' '.join(job.json_keys)!r} must name one or more different keys; try text"
        )
    plain = [path for path in paths if not path.name.endswith(JSON_SUFFIXES)]
    if plain and len(job.json_keys) > 1:
        raise ConfigError(
            f"json_keys {' '.join(job.json_keys)!r}: {plain[0]} is plain text and has no keys; give one key"
        )
    tokenizer = require_tokenizer(job)
    progress = Progress()
    prefixes = [f"{job.output_prefix}_{key}_document" for key in job.json_keys]
    dtype = token_dtype(tokenizer.vocab_size)
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, dtype)) for prefix in prefixes]
        for batch, result in _tokenize(job, read_batches(paths)):
            for line, reason in result.faults:
                _note_fault(progress, f"{batch.path}:{line}: {reason}", strict=job.strict)
            for writer, tokens, lengths in zip(writers, result.tokens, result.lengths, strict=True):
                writer.add_documents(tokens, lengths)
                progress.tokens += len(tokens)
            progress.documents += len(result.lengths[0])
            progress.input_bytes += batch.num_bytes
            on_progress(progress)
        if not progress.documents:
            first = (
                f"; the first of {progress.bad_lines} bad lines: {progress.faults[0]}"
                if progress.faults
                else ""
            )
            raise ConfigError(f"no document in {len(paths)} input files{first}")
        # A side file speaks of one .bin; it must not outlive it.
        for prefix in prefixes:
            Path(f"{prefix}.json").unlink(missing_ok=True)
    for prefix, writer in zip(prefixes, writers, strict=True):
        _write_side_file(prefix, job, tokenizer, writer, progress)
    progress.outputs = prefixes
    return progress


def _tokenize(
    job: PreprocessJob, batches: Iterator[DocumentBatch]
) -> Iterator[tuple[DocumentBatch, _Tokenized]]:
    """Batches with their tokens, in the order given, whoever did the work."""
    if job.workers == 1:
        tokenize = BatchTokenizer(job)
        for batch in batches:
            yield batch, tokenize(batch)
        return
    # spawn: a fork of a process that runs threads (OpenMP, a progress bar) may hang.
    pool = ProcessPoolExecutor(
        job.workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(job,),
    )
    pending: deque[tuple[DocumentBatch, Future[_Tokenized]]] = deque()
    try:
        for batch in batches:
            pending.append((batch, pool.submit(_work, batch)))
            if len(pending) >= _IN_FLIGHT_PER_WORKER * job.workers:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    except BrokenProcessPool:
        raise ConfigError(
            f"a tokenizer process died (out of memory?) with {job.workers} workers; try fewer, --workers 1 shows more"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: list[BatchTokenizer] = []
"""The tokenizer of this worker process: a pool's initializer has no other place to leave it."""


def _start_worker(job: PreprocessJob) -> None:
    _worker[:] = [BatchTokenizer(job)]


def _work(batch: DocumentBatch) -> _Tokenized:
    return _worker[0](batch)


def _note_fault(progress: Progress, fault: str, *, strict: bool) -> None:
    if strict:
        raise ConfigError(f"{fault} (stopped by --strict)")
    progress.bad_lines += 1
    if len(progress.faults) < _SHOWN_FAULTS:
        progress.faults.append(fault)


def _write_side_file(
    prefix: str, job: PreprocessJob, tokenizer: Tokenizer, writer: IndexedDatasetWriter, progress: Progress
) -> None:
    """What the dataset is made of, beside it, for people and for checks; nothing in it depends on time or workers."""
    facts = {
        "documents": writer.num_documents,
        "tokens": writer.num_tokens,
        "bad_lines": progress.bad_lines,
        "dtype": writer.dtype.name,
        "append_eod": job.append_eod,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.fingerprint(),
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "bin_sha256": writer.sha256,
    }
    path = Path(f"{prefix}.json")
    partial = Path(f"{path}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with partial.open("x", encoding="utf-8") as file:
        file.write(json.dumps(facts, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)
