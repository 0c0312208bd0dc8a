"""Find datasets for the command line, describe their contents, and verify every byte."""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import (
    SUFFIXES,
    DatasetFault,
    IndexedDataset,
    UnsupportedDataset,
    first_token,
    lengths_in_blocks,
    token_blocks,
    token_ends,
)
from megalite.data.token_files import read_side_file, side_digests, side_file_path
from megalite.preprocess.output import LengthStatistics


def find_prefixes(entries: Sequence[str]) -> list[str]:
    """Return the prefixes of datasets in the order of the entries, sorted by name within a folder.

    An entry is a prefix, one of a dataset's files (a shell may expand `data/*`), or a folder of datasets. A .bin or
    .idx alone counts too; opening it reports the missing file.

    Raises ConfigError if a dataset is listed twice, or an entry is neither a dataset nor a folder with one."""
    found: dict[str, tuple[str, set[str]]] = {}
    for entry in entries:
        prefixes, suffix = _of_entry(entry)
        for prefix in prefixes:
            # Two prefixes of one dataset resolve to the same file; different files of one dataset are one entry.
            first, suffixes = found.setdefault(os.path.realpath(f"{prefix}.idx"), (prefix, set()))
            if suffix in suffixes or (suffixes and (not suffix or "" in suffixes)):
                raise ConfigError(f"{first} and {prefix} are one dataset; give each dataset once")
            suffixes.add(suffix)
    return [prefix for prefix, _ in found.values()]


def _of_entry(entry: str) -> tuple[list[str], str]:
    """Return prefixes, and the suffix if the entry is one file of a dataset."""
    for suffix in ("", *SUFFIXES):
        prefix = entry.removesuffix(suffix)
        if (not suffix or prefix != entry) and any(Path(f"{prefix}{half}").exists() for half in (".idx", ".bin")):
            return [prefix], suffix
    folder = Path(entry)
    if not folder.is_dir():
        raise ConfigError(f"{entry}: neither {entry}.idx nor a folder of datasets exists; give a path without .bin")
    stems = sorted({path.name[:-4] for path in folder.iterdir() if path.suffix in (".bin", ".idx")})
    if not stems:
        raise ConfigError(f"{folder} contains no dataset, a pair of .bin and .idx; give a folder that does")
    return [str(folder / stem) for stem in stems], ""


def parse_documents(text: str, dataset: IndexedDataset) -> range:
    """Parse `3:10` (without 10), `3:`, `:10` or `3` as a range of the documents of a dataset. Raises ConfigError if it
    is malformed, empty or extends beyond the last document."""
    first, colon, last = text.partition(":")
    count = dataset.num_documents
    if not count:
        raise ConfigError(f"documents {text!r}: {dataset.prefix} has no documents; give a dataset that has")
    example = f"give a range such as 0:{min(count, 3)}"
    try:
        start = int(first) if first or not colon else 0
        stop = start + 1 if not colon else int(last) if last else count
    except ValueError:
        raise ConfigError(f"documents {text!r} is not a range of numbers; {example}") from None
    if 0 <= stop <= start <= count and last:
        how = "ends before it starts" if stop < start else "is empty"
        raise ConfigError(f"documents {text!r}: the range {how} (the end is not part of it); {example}")
    if not 0 <= start < stop <= count:
        raise ConfigError(f"documents {text!r}: {dataset.prefix} has the documents 0 to {count - 1}; {example}")
    return range(start, stop)


def inspect(dataset: IndexedDataset) -> dict[str, Any]:
    """Describe a dataset from its index and side file, in constant memory. Raises ConfigError if the side file is
    damaged."""
    statistics, empty = LengthStatistics(), 0
    for lengths in lengths_in_blocks(dataset, range(dataset.num_documents)):
        statistics.add(lengths)
        empty += int((lengths == 0).sum())
    return {
        "prefix": dataset.prefix,
        "dtype": dataset.dtype.name,
        "documents": dataset.num_documents,
        "empty_documents": empty,
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "bytes": {path.suffix: path.stat().st_size for path in (dataset.bin_path, dataset.idx_path)},
        "document_lengths": statistics.facts(),
        "side_file": read_side_file(dataset.prefix),
    }


def read_documents(dataset: IndexedDataset, documents: range, *, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield number, sequences, length and the first `max_tokens` tokens of documents."""
    indices = dataset.document_indices
    for number in documents:
        start, stop = first_token(dataset, number), first_token(dataset, number + 1)
        tokens = dataset.tokens[start : min(stop, start + max_tokens)].tolist()
        sequences = int(indices[number + 1] - indices[number])
        yield {"number": number, "sequences": sequences, "length": stop - start, "tokens": tokens}


@dataclass(frozen=True)
class Fault:
    path: str
    offset: int | None  # byte offset, if a single item is wrong
    text: str  # file, byte, value found and value expected


@dataclass(frozen=True)
class Verified:
    prefix: str
    fault: Fault | None  # None: valid
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    bytes: int = 0  # length of both files
    dtype: str = ""
    largest_id: int | None = None  # None if there are no tokens
    vocab_size: int | None = None  # ids were compared with it; None: not checked
    hashed: bool = False  # the sha256 of both files was compared with the side file's
    eod: int | None = None  # every document was checked to end with it; None: not checked
    has_side_file: bool = False
    bad_side_file: str | None = None  # error of a side file that was ignored


def verify(
    prefix: str,
    *,
    vocab_size: int | None = None,
    hashes: bool = True,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Verified:
    """Check a pair of token files against each other, the vocabulary and the side file, if it exists.

    Checks in this order: header, counts, lengths, offsets and document indices of .idx against the sizes of the files;
    documents, tokens and dtype against the side file; the sha256 of .idx; each token id, at least 0 and below
    `vocab_size`; the end-of-document id at the end of each non-empty document, if the side file records that it was
    appended; the sha256 of .bin. Uses constant memory.

    `vocab_size`: ids must be below it and below the side file's. `hashes`: compare sha256 with the side file.
    `on_bytes`: called with the number of bytes just read. Raises ConfigError if a file is missing, not readable or of
    an unsupported kind."""
    side: dict[str, Any] | None = None
    bad_side_file = None
    try:
        side = read_side_file(prefix)
    except ConfigError as error:
        bad_side_file = str(error)
    try:
        dataset = IndexedDataset(prefix)
    except DatasetFault as damage:
        text = str(damage)
        if isinstance(damage, UnsupportedDataset):
            if side is None:
                raise
            # megalite never writes such a dataset with a side file.
            text += f"; {side_file_path(prefix)} is of one with {side['dtype']} tokens: bytes have changed since"
        return Verified(prefix, Fault(damage.path, damage.offset, text), bad_side_file=bad_side_file)
    facts = side or {}
    tokenizer = facts.get("tokenizer")
    known = tokenizer if isinstance(tokenizer, dict) else {}
    sizes = [size for size in (known.get("vocab_size"), vocab_size) if type(size) is int]
    eod = known.get("eod") if type(known.get("eod")) is int and facts.get("append_eod") is True else None
    digests = side_digests(facts) if hashes else {}
    tokens = _TokenCheck(dataset, min(sizes, default=None), eod)
    fault = _compare_counts(dataset, facts) or _check_index_hash(dataset, digests, on_bytes)
    fault = fault or tokens.run(on_bytes, digests.get(".bin"))
    return Verified(
        prefix,
        fault,
        documents=dataset.num_documents,
        sequences=len(dataset),
        tokens=dataset.num_tokens,
        bytes=dataset_bytes(prefix),
        dtype=dataset.dtype.name,
        largest_id=tokens.largest,
        vocab_size=tokens.vocab_size,
        hashed=len(digests) == 2,
        eod=eod,
        has_side_file=side is not None,
        bad_side_file=bad_side_file,
    )


def dataset_bytes(prefix: str) -> int:
    paths = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]
    return sum(path.stat().st_size for path in paths if path.exists())


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
    on_bytes(dataset.idx_path.stat().st_size)
    if ".idx" not in digests:
        return None
    with dataset.idx_path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return _compare_hash(dataset.idx_path, dataset.prefix, found, digests[".idx"])


def _compare_hash(path: Path, prefix: str, found: str, expected: str) -> Fault | None:
    if found == expected:
        return None
    text = f"{path}: sha256 is {found[:16]}..., expected {expected[:16]}... as in {side_file_path(prefix)}"
    return Fault(str(path), None, f"{text}: bytes have changed since it was written")


class _TokenCheck:
    def __init__(self, dataset: IndexedDataset, vocab_size: int | None, eod: int | None) -> None:
        self.dataset, self.vocab_size, self.eod = dataset, vocab_size, eod
        self.largest: int | None = None

    def run(self, on_bytes: Callable[[int], None], sha256: str | None) -> Fault | None:
        """Return the fault at the lowest offset, or else that of the sha256."""
        dataset, digest = self.dataset, hashlib.sha256()
        for first, tokens in token_blocks(dataset, range(dataset.num_tokens)):
            if sha256 is not None:
                digest.update(tokens.data)
            fault = self._check(tokens, first)
            if fault is not None:
                return fault
            on_bytes(tokens.nbytes)
        if sha256 is None:
            return None
        return _compare_hash(dataset.bin_path, dataset.prefix, digest.hexdigest(), sha256)

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
            found = f"the document ends with token id {tokens[unended]}"
            return self._fault(first + unended, found, f"its end {self.eod}")
        return None

    def _first_unended(self, tokens: NDArray, first: int, eod: int) -> int | None:
        """Return the index of the first of `tokens` that ends its document but is not the end-of-document id."""
        dataset = self.dataset
        borders = range(dataset.num_documents + 1)
        low, high = (
            bisect_right(borders, position, key=lambda i: first_token(dataset, i))
            for position in (first, first + len(tokens))
        )
        # Several documents may end at the same token, if all but the first are empty.
        last = np.unique(token_ends(dataset, range(low - 1, high - 1))) - 1 - first
        wrong = last[tokens[last] != eod]
        return int(wrong[0]) if len(wrong) else None

    def _fault(self, token: int, found: str, expected: str) -> Fault:
        dataset = self.dataset
        offset = token * dataset.dtype.itemsize
        sequence = bisect_right(range(len(dataset)), offset, key=lambda i: int(dataset.pointers[i])) - 1
        documents = range(dataset.num_documents)
        document = bisect_right(documents, token, key=lambda i: first_token(dataset, i)) - 1
        place = f"document {document}"
        if len(dataset) != dataset.num_documents:
            place += f", sequence {sequence}"
        within = token - int(dataset.pointers[sequence]) // dataset.dtype.itemsize
        text = f"{dataset.bin_path}: byte {offset}: {found} ({place}, token {within}), expected {expected}"
        return Fault(str(dataset.bin_path), offset, text)
