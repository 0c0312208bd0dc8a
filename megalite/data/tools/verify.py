"""Read every byte of a dataset and name the first that is not as it should be."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import (
    DatasetFault,
    IndexedDataset,
    UnsupportedDataset,
    open_for_reading,
    read_into,
)
from megalite.data.side_file import read_side_file, side_file_path
from megalite.data.tools.documents import (
    BLOCK,
    document_of_token,
    sequence_of_token,
    token_ends,
)
from megalite.data.tools.side_facts import digests_of

_BLOCK_BYTES = 1 << 20
"""Bytes that are hashed and looked at together, while they are in the processor's cache."""


@dataclass(frozen=True)
class Fault:
    """The first thing that is wrong."""

    path: str
    """The file."""
    offset: int | None
    """The byte, where one byte (or item) is it."""
    text: str
    """File, byte, what is there and what should be."""


@dataclass(frozen=True)
class Verified:
    """What was checked, and what came out."""

    prefix: str
    fault: Fault | None
    """None: sound."""
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    bytes: int = 0
    """Length of both files."""
    dtype: str = ""
    largest_id: int | None = None
    """Of the tokens; None if there are none."""
    vocab_size: int | None = None
    """What every id was compared with; None if nobody said."""
    hashed: bool = False
    """The sha256 of both files was compared with the side file's."""
    eod: int | None = None
    """The id that every document was checked to end with; None if the side file does not promise one."""
    has_side_file: bool = False
    """There is a side file that was compared with."""
    bad_side_file: str | None = None
    """Why the side file that is there could not be: the pair was checked without it."""


def verify(
    prefix: str,
    *,
    vocab_size: int | None = None,
    hashes: bool = True,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Verified:
    """Check a pair of token files against each other, the vocabulary and the side file, if there is one.

    Checked, in this order: header, counts, lengths, offsets and document indices of .idx against the sizes of the
    files; documents, tokens and dtype against the side file; the sha256 of .idx; each token id, at least 0 and below
    `vocab_size`; the end-of-document id at the end of each document that has tokens, if the side file says that it
    was appended; the sha256 of .bin. Memory does not grow with the files.

    Args:
        prefix: path without .bin and .idx.
        vocab_size: the side file's counts too, if there is one: ids must be below the smaller.
        hashes: compare sha256 with the side file.
        on_bytes: called with the number of bytes just read.

    Raises:
        ConfigError: a file is missing or cannot be read, or is of a kind that is not supported.
    """
    side, bad_side_file = _side_file(prefix)
    try:
        dataset = IndexedDataset(prefix)
    except DatasetFault as damage:
        text = str(damage)
        if isinstance(damage, UnsupportedDataset):
            if side is None:
                raise
            # No writer of side files writes such a dataset.
            text += (
                f"; {side_file_path(prefix)} is of one with {side['dtype']} tokens: bytes have changed since"
            )
        return Verified(prefix, Fault(damage.path, damage.offset, text), bad_side_file=bad_side_file)
    promise = _Promise.of(side or {})
    limit = min((size for size in (promise.vocab_size, vocab_size) if size is not None), default=None)
    digests = promise.sha256 if hashes else {}
    fault = _compare_counts(dataset, side or {}) or _check_index_hash(dataset, digests, on_bytes)
    tokens = _TokenCheck(dataset, limit, promise.eod, hashed=".bin" in digests)
    if fault is None:
        fault = tokens.run(on_bytes)
    if fault is None and tokens.sha256 is not None:
        fault = _compare_hash(str(dataset.bin_path), prefix, tokens.sha256.hexdigest(), digests[".bin"])
    return Verified(
        prefix,
        fault,
        documents=dataset.num_documents,
        sequences=len(dataset),
        tokens=dataset.num_tokens,
        bytes=dataset_bytes(prefix),
        dtype=dataset.dtype.name,
        largest_id=tokens.largest,
        vocab_size=limit,
        hashed=len(digests) == 2,
        eod=promise.eod,
        has_side_file=side is not None,
        bad_side_file=bad_side_file,
    )


def _side_file(prefix: str) -> tuple[dict[str, Any] | None, str | None]:
    """(its facts, None) or (None, what is wrong with it)."""
    try:
        return read_side_file(prefix), None
    except ConfigError as error:
        return None, str(error)


def dataset_bytes(prefix: str) -> int:
    """Length of .bin and .idx together; of a file that is missing, 0."""
    paths = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]
    return sum(path.stat().st_size for path in paths if path.exists())


@dataclass(frozen=True)
class _Promise:
    """What a side file says about content."""

    vocab_size: int | None
    eod: int | None
    sha256: dict[str, str]

    @classmethod
    def of(cls, side: dict[str, Any]) -> "_Promise":
        tokenizer = side.get("tokenizer")
        known = tokenizer if isinstance(tokenizer, dict) else {}
        vocab_size, eod = known.get("vocab_size"), known.get("eod")
        return cls(
            vocab_size if type(vocab_size) is int else None,
            eod if type(eod) is int and side.get("append_eod") is True else None,
            digests_of(side),
        )


def _compare_counts(dataset: IndexedDataset, side: dict[str, Any]) -> Fault | None:
    path = str(side_file_path(dataset.prefix))
    found = {"documents": dataset.num_documents, "tokens": dataset.num_tokens, "dtype": dataset.dtype.name}
    for name, value in found.items():
        if name in side and side[name] != value:
            text = f"{path}: {name} is {side[name]!r}, expected {value!r} as in {dataset.idx_path}"
            return Fault(path, None, f"{text}; the side file is another dataset's")
    return None


def _check_index_hash(
    dataset: IndexedDataset, digests: dict[str, str], on_bytes: Callable[[int], None]
) -> Fault | None:
    if ".idx" not in digests:
        on_bytes(dataset.idx_path.stat().st_size)
        return None
    sha256 = hashlib.sha256()
    with dataset.idx_path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            sha256.update(block)
            on_bytes(len(block))
    return _compare_hash(str(dataset.idx_path), dataset.prefix, sha256.hexdigest(), digests[".idx"])


def _compare_hash(path: str, prefix: str, found: str, expected: str) -> Fault | None:
    if found == expected:
        return None
    text = f"{path}: sha256 is {found[:16]}..., expected {expected[:16]}... as in {side_file_path(prefix)}"
    return Fault(path, None, f"{text}: bytes have changed since it was written")


class _TokenCheck:
    """One pass over .bin."""

    def __init__(
        self, dataset: IndexedDataset, vocab_size: int | None, eod: int | None, *, hashed: bool
    ) -> None:
        self.dataset = dataset
        self.vocab_size = vocab_size
        self.eod = eod
        self.sha256 = hashlib.sha256() if hashed else None
        self.largest: int | None = None
        self._ends = np.empty(0, dtype=np.int64)
        """Ends of documents that have not been read up to, and which come after `_end`."""
        self._end = 0
        """End of the last document that was read whole."""
        self._document = 0
        """The first document whose end is not in `_ends` yet."""

    def run(self, on_bytes: Callable[[int], None]) -> Fault | None:
        """The fault at the lowest offset, or None if all was read."""
        dataset = self.dataset
        buffer = np.empty(_BLOCK_BYTES // dataset.dtype.itemsize, dtype=dataset.dtype)
        descriptor = open_for_reading(dataset.bin_path)
        try:
            for first in range(0, dataset.num_tokens, len(buffer)):
                tokens = buffer[: min(len(buffer), dataset.num_tokens - first)]
                read_into(dataset.bin_path, descriptor, tokens, first * dataset.dtype.itemsize)
                if self.sha256 is not None:
                    self.sha256.update(tokens.data)
                fault = self._check(tokens, first)
                if fault is not None:
                    return fault
                on_bytes(tokens.nbytes)
        finally:
            os.close(descriptor)
        return None

    def _check(self, tokens: NDArray, first: int) -> Fault | None:
        high = int(tokens.max())
        low = int(tokens.min()) if tokens.dtype.kind == "i" else 0
        self.largest = high if self.largest is None else max(self.largest, high)
        outside = None
        if low < 0 or (self.vocab_size is not None and high >= self.vocab_size):
            bad = tokens < 0 if self.vocab_size is None else (tokens < 0) | (tokens >= self.vocab_size)
            outside = int(np.argmax(bad))
        unended = None if self.eod is None else self._first_unended(tokens, first, self.eod)
        if outside is not None and (unended is None or outside <= unended):
            expected = "at least 0" if self.vocab_size is None else f"an id from 0 to {self.vocab_size - 1}"
            return self._fault(first + outside, f"token id {tokens[outside]}", expected)
        if unended is not None:
            return self._fault(
                first + unended, f"the document ends with token id {tokens[unended]}", f"its end {self.eod}"
            )
        return None

    def _first_unended(self, tokens: NDArray, first: int, eod: int) -> int | None:
        """The first of `tokens` that is the last of its document and not the end-of-document id."""
        dataset, stop = self.dataset, first + len(tokens)
        while True:
            seen = int(np.searchsorted(self._ends, stop, side="right"))
            ends, self._ends = self._ends[:seen], self._ends[seen:]
            if seen:
                starts = np.concatenate(([self._end], ends[:-1]))
                self._end = int(ends[-1])
                last = (ends - 1 - first)[starts < ends]
                wrong = tokens[last] != eod
                if wrong.any():
                    return int(last[np.argmax(wrong)])
            if len(self._ends) or self._document == dataset.num_documents:
                return None
            documents = range(self._document, min(self._document + BLOCK, dataset.num_documents))
            self._ends, self._document = token_ends(dataset, documents), documents.stop

    def _fault(self, token: int, found: str, expected: str) -> Fault:
        dataset = self.dataset
        sequence, document = sequence_of_token(dataset, token), document_of_token(dataset, token)
        offset = token * dataset.dtype.itemsize
        place = f"document {document}"
        if len(dataset) != dataset.num_documents:
            place += f", sequence {sequence}"
        within = token - int(dataset.pointers[sequence]) // dataset.dtype.itemsize
        text = f"{dataset.bin_path}: byte {offset}: {found} ({place}, token {within}), expected {expected}"
        return Fault(str(dataset.bin_path), offset, text)
