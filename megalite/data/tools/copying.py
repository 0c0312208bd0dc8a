"""Write a dataset that is made of stretches of others: what merging and splitting have in common."""

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.files import free_bytes, sync_folder, write_durably
from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset, open_for_reading, read_into
from megalite.data.output_prefix import make_folder
from megalite.data.preprocess.statistics import DatasetStatistics
from megalite.data.side_file import encode_side_file
from megalite.data.tools.documents import first_token, lengths_in_blocks
from megalite.data.tools.index_file import IndexFile, sync

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Stretch:
    """Consecutive whole documents of a dataset. It keeps no file open: a thousand datasets can be merged."""

    prefix: str
    dtype: np.dtype
    documents: range
    sequences: range
    tokens: range

    @classmethod
    def of(cls, dataset: IndexedDataset, documents: range | None = None) -> "Stretch":
        """Some documents of a dataset, or all."""
        if documents is None:
            documents = range(dataset.num_documents)
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
        """Bytes of its tokens in .bin."""
        return len(self.tokens) * self.dtype.itemsize

    def open(self) -> IndexedDataset:
        """The dataset.

        Raises:
            ConfigError: it is no longer what it was.
        """
        dataset = IndexedDataset(self.prefix)
        if dataset.num_documents < self.documents.stop or Stretch.of(dataset, self.documents) != self:
            raise ConfigError(f"{self.prefix} changed while it was read; try again when nobody writes it")
        return dataset


@dataclass(frozen=True)
class Written:
    """A new dataset."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: np.dtype
    files: dict[str, dict[str, Any]]
    """Length and sha256 of .bin and .idx, as in a side file; empty without statistics."""
    statistics: DatasetStatistics | None
    """What the side file says of the tokens and documents; None if it was not asked for."""
    no_side_file: str | None = None
    """Why there is none, where somebody may have expected one."""


@dataclass(frozen=True)
class SideFile:
    """The side file to write."""

    vocab_size: int
    """Of the tokenizer: every id is below it."""
    facts: Callable[[Written], Mapping[str, Any]]
    """What it says of the new dataset."""


def write_stretches(
    prefix: str,
    stretches: Sequence[Stretch],
    *,
    dtype: np.dtype,
    side_file: SideFile | None = None,
    digests: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Written:
    """Write `<prefix>.bin` and `.idx`: the documents of all stretches, in order, with their sequences as they are.

    The files get their names when all is on the disk, .bin first; a failure leaves nothing behind. No files of these
    names may be there. Memory does not grow with the files.

    Args:
        prefix: of the new dataset; its folder is made if need be.
        stretches: where the documents come from.
        dtype: type of the new dataset's tokens; ids of another type are converted.
        side_file: if there is to be one: ids are then counted and the files hashed.
        digests: sha256 by prefix and suffix, of datasets whose stretch is all of them: they are compared on the way.
        on_bytes: called with the number of bytes of .bin files just read.

    Raises:
        ConfigError: an id does not fit `dtype`, or is not below the side file's `vocab_size`; the folder cannot be
            written to, or the disk has not enough room; a dataset is damaged, or not what `digests` says.
    """
    folder = make_folder(prefix)
    written = Written(
        prefix,
        sum(len(stretch.documents) for stretch in stretches),
        sum(len(stretch.sequences) for stretch in stretches),
        sum(len(stretch.tokens) for stretch in stretches),
        dtype,
        {},
        None if side_file is None else DatasetStatistics(side_file.vocab_size),
    )
    _check_room(folder, written)
    unique = f"{os.getpid()}-{secrets.token_hex(4)}.tmp"
    suffixes = (".bin", ".idx") if side_file is None else (".bin", ".idx", ".json")
    partial = {suffix: Path(f"{prefix}{suffix}.{unique}") for suffix in suffixes}
    is_named = False
    try:
        sha256 = _copy(partial, stretches, written, side_file, digests, on_bytes)
        if side_file is not None:
            new = {".bin": sha256, ".idx": _sha256_of(partial[".idx"])}
            for suffix, digest in new.items():
                written.files[suffix] = {"bytes": partial[suffix].stat().st_size, "sha256": digest}
            write_durably(partial[".json"], encode_side_file(side_file.facts(written)))
        is_named = True
        for suffix, path in partial.items():
            path.replace(f"{prefix}{suffix}")
        sync_folder(folder)
    except BaseException:
        for suffix, path in partial.items():
            # What is no longer there has its name already; what was never there has none.
            if is_named and not path.exists():
                Path(f"{prefix}{suffix}").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        raise
    return written


def _copy(
    partial: Mapping[str, Path],
    stretches: Sequence[Stretch],
    written: Written,
    side_file: SideFile | None,
    digests: Mapping[str, Mapping[str, str]],
    on_bytes: Callable[[int], None],
) -> str:
    """Write .bin and .idx and put them on the disk; returns the sha256 of .bin, if there is to be a side file."""
    sha256 = hashlib.sha256()
    index_file = IndexFile(
        partial[".idx"], dtype=written.dtype, sequences=written.sequences, documents=written.documents
    )
    with index_file as index, partial[".bin"].open("xb") as bin_file:
        for stretch in stretches:
            dataset = stretch.open()
            for tokens in _tokens(dataset, stretch, written.dtype, digests.get(stretch.prefix, {}), on_bytes):
                if side_file is not None and written.statistics is not None:
                    _check_ids(dataset, tokens, side_file.vocab_size)
                    written.statistics.add_tokens(tokens)
                    sha256.update(tokens.data)
                bin_file.write(tokens.data)
            index.add(
                dataset, documents=stretch.documents, sequences=stretch.sequences, tokens=stretch.tokens
            )
            if written.statistics is not None:
                for lengths in lengths_in_blocks(dataset, stretch.documents):
                    written.statistics.add_lengths(lengths)
        sync(bin_file)
    return sha256.hexdigest()


def _check_room(folder: Path, written: Written) -> None:
    needed = written.tokens * written.dtype.itemsize + 12 * written.sequences + 8 * written.documents
    free = free_bytes(folder)
    if free is not None and free < needed:
        raise ConfigError(
            f"{folder} has {free} bytes free, {needed} are needed for {written.prefix}; free some, or give an "
            "--output-prefix on another disk"
        )


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _compare(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise ConfigError(
            f"{path}: sha256 is {found[:16]}..., expected {expected[:16]}... as in its side file: it is damaged; "
            "copy it again from where it is whole"
        )


def _tokens(
    dataset: IndexedDataset,
    stretch: Stretch,
    dtype: np.dtype,
    digests: Mapping[str, str],
    on_bytes: Callable[[int], None],
) -> Iterator[NDArray]:
    """The stretch's tokens as `dtype`, chunk after chunk, each gone with the next; both files must be as `digests` say."""
    if ".idx" in digests:
        _compare(dataset.idx_path, _sha256_of(dataset.idx_path), digests[".idx"])
    sha256 = hashlib.sha256()
    buffer = np.empty(_CHUNK_BYTES // dataset.dtype.itemsize, dtype=dataset.dtype)
    descriptor = open_for_reading(dataset.bin_path)
    try:
        for first in range(stretch.tokens.start, stretch.tokens.stop, len(buffer)):
            tokens = buffer[: min(len(buffer), stretch.tokens.stop - first)]
            read_into(dataset.bin_path, descriptor, tokens, first * dataset.dtype.itemsize)
            if ".bin" in digests:
                sha256.update(tokens.data)
            if dtype != dataset.dtype:
                _check_fit(dataset, tokens, np.iinfo(dtype))
            yield tokens.astype(dtype, copy=False)
            on_bytes(tokens.nbytes)
    finally:
        os.close(descriptor)
    if ".bin" in digests:
        _compare(dataset.bin_path, sha256.hexdigest(), digests[".bin"])


def _check_fit(dataset: IndexedDataset, tokens: NDArray, limits: np.iinfo) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < limits.min or high > limits.max:
        raise ConfigError(
            f"{dataset.bin_path}: token id {low if low < limits.min else high} does not fit {limits.dtype.name} "
            f"({limits.min} to {limits.max}); give --dtype {dataset.dtype.name}"
        )


def _check_ids(dataset: IndexedDataset, tokens: NDArray, vocab_size: int) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"{dataset.bin_path}: token id {low if low < 0 else high}, expected 0 to {vocab_size - 1} by its side "
            "file: it is damaged, or the side file is another dataset's; megalite data verify says where"
        )
