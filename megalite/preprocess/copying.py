"""Write a dataset that is made of parts of others (what merging and splitting share), and the names of datasets."""

import hashlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.files import free_bytes, sync_folder, write_durably
from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset, token_blocks
from megalite.data.indexed_writer import require_fit, write_index
from megalite.data.token_files import SUFFIXES, encode_side_file
from megalite.preprocess.output import DatasetStatistics

BLOCK = 1 << 17  # documents that are looked at together: a file may have a billion of them


def token_ends(dataset: IndexedDataset, documents: range) -> NDArray[np.int64]:
    """The token after the last one of each document, counted from the start of .bin."""
    following = np.array(dataset.document_indices[documents.start + 1 : documents.stop + 1])
    ends = np.full(len(following), dataset.num_tokens, dtype=np.int64)
    # Indices rise: those of the last documents, behind which no sequence starts, are at the end.
    within = int(np.searchsorted(following, len(dataset)))
    ends[:within] = dataset.pointers[following[:within]] // dataset.dtype.itemsize
    return ends


def first_token(dataset: IndexedDataset, document: int) -> int:
    """First token of a document; of the one after the last, the number of tokens."""
    return 0 if not document else int(token_ends(dataset, range(document - 1, document))[0])


def lengths_in_blocks(dataset: IndexedDataset, documents: range) -> Iterator[NDArray[np.int64]]:
    """Tokens of each of `documents`, block after block."""
    before = first_token(dataset, documents.start)
    for first in range(documents.start, documents.stop, BLOCK):
        ends = token_ends(dataset, range(first, min(first + BLOCK, documents.stop)))
        yield np.diff(ends, prepend=before)
        before = int(ends[-1])


@dataclass(frozen=True)
class Part:
    """Consecutive whole documents of a dataset. It keeps no file open: a thousand datasets can be merged."""

    prefix: str
    dtype: np.dtype
    documents: range
    sequences: range
    tokens: range

    @classmethod
    def of(cls, dataset: IndexedDataset, documents: range | None = None) -> "Part":
        documents = range(dataset.num_documents) if documents is None else documents
        start, stop = documents.start, documents.stop
        indices = dataset.document_indices
        return cls(
            dataset.prefix,
            dataset.dtype,
            documents,
            range(int(indices[start]), int(indices[stop])),
            range(first_token(dataset, start), first_token(dataset, stop)),
        )

    @property
    def num_bytes(self) -> int:
        return len(self.tokens) * self.dtype.itemsize

    def open(self) -> IndexedDataset:
        """The dataset. Raises ConfigError: it is no longer what it was."""
        dataset = IndexedDataset(self.prefix)
        if dataset.num_documents < self.documents.stop or Part.of(dataset, self.documents) != self:
            raise ConfigError(f"{self.prefix} changed while it was read; try again when nothing writes to it")
        return dataset


@dataclass(frozen=True)
class Written:
    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: np.dtype
    statistics: DatasetStatistics | None  # of its tokens and documents; None if there is no side file
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # of .bin and .idx, as in the side file


@dataclass(frozen=True)
class SideFile:
    vocab_size: int  # every id is below it
    facts: Callable[[Written], Mapping[str, Any]]  # what it says of the new dataset


def write_parts(
    prefix: str,
    parts: Sequence[Part],
    *,
    dtype: np.dtype,
    side_file: SideFile | None = None,
    digests: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Written:
    """Write `<prefix>.bin` and `.idx`: the documents of all parts, in order, with their sequences as they are.

    The files get their names when all is on the disk, .bin first; a failure leaves nothing behind. No files of these
    names may exist. Memory does not grow with the files.

    `dtype`: type of the new dataset's tokens; ids of another type are converted. `side_file`: if there is to be one:
    ids are then counted and the files hashed. `digests`: sha256 by prefix and suffix, of datasets that are copied as a
    whole: they are compared on the way. `on_bytes`: called with the number of bytes of .bin files just read. Raises
    ConfigError: an id does not fit `dtype`, or is not below the side file's `vocab_size`; the folder cannot be written
    to, or the disk has not enough room; a dataset is damaged, or not what `digests` says."""
    folder = make_folder(prefix)
    written = Written(
        prefix,
        sum(len(part.documents) for part in parts),
        sum(len(part.sequences) for part in parts),
        sum(len(part.tokens) for part in parts),
        dtype,
        None if side_file is None else DatasetStatistics(side_file.vocab_size),
    )
    needed = written.tokens * dtype.itemsize + 12 * written.sequences + 8 * written.documents
    free = free_bytes(folder)
    if free is not None and free < needed:
        raise ConfigError(f"{folder} has {free} bytes free, {needed} are needed for {prefix}; use another disk")
    unique = f"{os.getpid()}-{secrets.token_hex(4)}.tmp"
    suffixes = SUFFIXES if side_file is not None else SUFFIXES[:2]
    partial = {suffix: Path(f"{prefix}{suffix}.{unique}") for suffix in suffixes}
    is_complete = False
    try:
        sha256 = _copy_tokens(partial[".bin"], parts, written, side_file, digests, on_bytes)
        length, index_sha256 = _write_index(partial[".idx"], parts, written)
        if side_file is not None:
            written.files[".bin"] = {"bytes": partial[".bin"].stat().st_size, "sha256": sha256}
            written.files[".idx"] = {"bytes": length, "sha256": index_sha256}
            write_durably(partial[".json"], encode_side_file(side_file.facts(written)))
        is_complete = True
        for suffix, path in partial.items():
            path.replace(f"{prefix}{suffix}")
        sync_folder(folder)
    except BaseException:
        for suffix, path in partial.items():
            # What is no longer there has its name already.
            if is_complete and not path.exists():
                Path(f"{prefix}{suffix}").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        raise
    return written


def _copy_tokens(
    path: Path,
    parts: Sequence[Part],
    written: Written,
    side_file: SideFile | None,
    digests: Mapping[str, Mapping[str, str]],
    on_bytes: Callable[[int], None],
) -> str:
    """Write .bin and put it on the disk; returns its sha256, if there is to be a side file."""
    sha256 = hashlib.sha256()
    with path.open("xb") as file:
        for part in parts:
            dataset, expected, seen = part.open(), digests.get(part.prefix, {}), hashlib.sha256()
            if ".idx" in expected:
                with dataset.idx_path.open("rb") as index:
                    found = hashlib.file_digest(index, "sha256").hexdigest()
                _compare(dataset.idx_path, found, expected[".idx"])
            for _, tokens in token_blocks(dataset, part.tokens):
                if ".bin" in expected:
                    seen.update(tokens.data)
                if written.dtype != dataset.dtype:
                    require_fit(str(dataset.bin_path), tokens, written.dtype, f"give --dtype {dataset.dtype.name}")
                stored = tokens.astype(written.dtype, copy=False)
                if side_file is not None and written.statistics is not None:
                    _check_ids(dataset, stored, side_file.vocab_size)
                    written.statistics.add_tokens(stored)
                    sha256.update(stored.data)
                file.write(stored.data)
                on_bytes(tokens.nbytes)
            if ".bin" in expected:
                _compare(dataset.bin_path, seen.hexdigest(), expected[".bin"])
            if written.statistics is not None:
                for lengths in lengths_in_blocks(dataset, part.documents):
                    written.statistics.add_lengths(lengths)
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest()


def _write_index(path: Path, parts: Sequence[Part], written: Written) -> tuple[int, str]:
    def sizes() -> Iterator[NDArray]:
        for part in parts:
            dataset = part.open()
            for first in range(part.sequences.start, part.sequences.stop, BLOCK):
                yield dataset.sizes[first : min(first + BLOCK, part.sequences.stop)]

    def ends() -> Iterator[NDArray]:
        before = 0
        for part in parts:
            dataset = part.open()
            for first in range(part.documents.start + 1, part.documents.stop + 1, BLOCK):
                indices = dataset.document_indices[first : min(first + BLOCK, part.documents.stop + 1)]
                yield indices + (before - part.sequences.start)
            before += len(part.sequences)

    return write_index(
        path,
        written.dtype,
        sequences=written.sequences,
        documents=written.documents,
        tokens=written.tokens,
        sizes=sizes,
        ends=ends,
    )


def _compare(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise ConfigError(f"{path} is damaged: sha256 is {found[:16]}..., expected {expected[:16]}...; copy it again")


def _check_ids(dataset: IndexedDataset, tokens: NDArray, vocab_size: int) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ConfigError(f"{dataset.bin_path}: token id {low if low < 0 else high}, expected 0 to {vocab_size - 1}")


def check_output_prefix(prefix: str | Path, *, example: str) -> None:
    """A prefix ends in a name: files of `folder/` would be hidden ones. Raises ConfigError: it does not; shows a prefix
    that ends in `example`."""
    if not Path(prefix).name or str(prefix).endswith(("/", "/.", "/..")):
        raise ConfigError(f"output_prefix {prefix} has no name; give one such as {Path(prefix) / example}")


def refuse_existing(prefixes: Sequence[str]) -> None:
    """Raise a ConfigError if a new dataset would replace a file, or has no name."""
    for prefix in prefixes:
        check_output_prefix(prefix, example="whole")
        for suffix in SUFFIXES:
            if Path(f"{prefix}{suffix}").exists():
                raise ConfigError(f"{prefix}{suffix} exists; give another --output-prefix or move it away")


def make_folder(prefix: str | Path) -> Path:
    """The folder of the files of a prefix, made if need be; a file can be written there. Raises ConfigError: none can;
    names the prefix, the folder and the reason."""
    folder = Path(f"{prefix}.new").parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Asking for permission is not enough: the superuser has it on a read-only disk, too.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"output_prefix {prefix}: cannot write to {folder}: {error.strerror}") from None
    return folder
