"""Merge datasets, or split a dataset, by whole documents, in order and with their sequences."""

import hashlib
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.files import free_bytes, write_durably
from megalite.config.data import SPLITS
from megalite.config.errors import ConfigError
from megalite.data.dataset import split_documents
from megalite.data.indexed_dataset import (
    BLOCK,
    TOKEN_DTYPES,
    IndexedDataset,
    first_token,
    lengths_in_blocks,
    new_files,
    require_fit,
    token_blocks,
    write_index,
)
from megalite.data.token_files import encode_side_file, read_side_file, side_digests
from megalite.preprocess.output import LengthStatistics, make_folder, refuse_existing

Side = dict[str, Any]  # the facts of a side file


@dataclass(frozen=True)
class Part:
    """Consecutive whole documents of a dataset. Holds no open file, so that a thousand datasets can be merged."""

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
        """Open the dataset. Raises ConfigError if it has changed."""
        dataset = IndexedDataset(self.prefix)
        if dataset.num_documents < self.documents.stop or Part.of(dataset, self.documents) != self:
            raise ConfigError(f"{self.prefix} changed while it was read; try again when no program writes to it")
        return dataset


@dataclass(frozen=True)
class Written:
    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: np.dtype
    lengths: LengthStatistics | None  # for the side file; None without one
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # `files` of the side file


def merge(
    prefixes: Sequence[str],
    output: str,
    *,
    dtype: str | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Written:
    """Concatenate datasets in this order. The result has the same bytes as preprocessing all inputs at once.

    If all datasets have side files with the same vocabulary, the result has one too. Each sha256 in the side files is
    verified.

    `dtype`: type of the new tokens; required if the datasets' types differ. `on_bytes`: called with the number of bytes
    of .bin files just read. Raises ConfigError if a dataset is damaged, their types or tokenizers differ, an id does
    not fit, or the output exists."""
    refuse_existing([output])
    sides = [read_side_file(prefix) for prefix in prefixes]
    _check_tokenizers(prefixes, sides)
    _check_shards(prefixes, sides)
    parts = [Part.of(IndexedDataset(prefix)) for prefix in prefixes]
    known = {prefix: side for prefix, side in zip(prefixes, sides, strict=True) if side is not None}
    vocab_size = _vocab_size_of(sides)
    make_folder(output)
    with new_files([output]) as folder:
        written = _write_parts(
            folder / "0",
            output,
            parts,
            dtype=_common_dtype(parts) if dtype is None else np.dtype(dtype).newbyteorder("<"),
            vocab_size=vocab_size,
            digests={prefix: side_digests(side) for prefix, side in known.items()},
            on_bytes=on_bytes,
        )
        if vocab_size:
            write_durably(folder / "0.json", encode_side_file(_merged_side(list(known.values()), written)))
    return written


def _common_dtype(parts: Sequence[Part]) -> np.dtype:
    first = parts[0]
    for part in parts:
        if part.dtype != first.dtype:
            wide = np.result_type(*(each.dtype for each in parts))
            assert wide.newbyteorder("<") in TOKEN_DTYPES.values(), wide
            raise ConfigError(
                f"{first.prefix} has {first.dtype.name} tokens, {part.prefix} {part.dtype.name}; add --dtype {wide.name} "
                "to store all of them in that type"
            )
    return first.dtype


def split_dataset(
    prefix: str, outputs: Sequence[tuple[str, range]], *, on_bytes: Callable[[int], None] = lambda count: None
) -> list[Written]:
    """Split a dataset into `outputs`, (prefix, documents) of each part; write all of them or none. If the dataset has a
    side file, each part gets one. `on_bytes`: called with the number of bytes of .bin just read. Raises ConfigError if
    the dataset is damaged or an output exists."""
    refuse_existing([output for output, _ in outputs])
    side = read_side_file(prefix)
    dataset = IndexedDataset(prefix)
    vocab_size = _vocab_size_of([side])
    done: list[Written] = []
    make_folder(outputs[0][0])
    with new_files([output for output, _ in outputs]) as folder:
        for number, (output, documents) in enumerate(outputs):
            part, stem = Part.of(dataset, documents), folder / str(number)
            written = _write_parts(
                stem, output, [part], dtype=part.dtype, vocab_size=vocab_size, digests={}, on_bytes=on_bytes
            )
            if side and vocab_size:
                write_durably(stem.with_suffix(".json"), encode_side_file(_part_side(side, part, written)))
            done.append(written)
    return done


def parts_of_equal_tokens(dataset: IndexedDataset, parts: int) -> list[range]:
    """Return the documents of `parts` parts with about equally many tokens, each with at least one document. Part k
    ends at the document border nearest to the fraction (k + 1) / parts of all tokens. Raises ConfigError if `parts` is
    0 or exceeds the number of documents."""
    documents, tokens = dataset.num_documents, dataset.num_tokens
    if not 1 <= parts <= documents:
        raise ConfigError(f"parts {parts}: {dataset.prefix} has {documents} documents; use 1 to {documents}")
    ends: list[int] = []
    for part in range(1, parts):
        target = tokens * part / parts
        above = bisect_left(range(documents), target, key=lambda i: first_token(dataset, i))
        before = above and target - first_token(dataset, above - 1) <= first_token(dataset, above) - target
        near = above - 1 if before else above
        ends.append(min(max(near, ends[-1] + 1 if ends else 1), documents - (parts - part)))
    return [range(start, stop) for start, stop in pairwise([0, *ends, documents])]


def parts_of_split(dataset: IndexedDataset, split: str) -> list[range]:
    """Return the documents of train, valid and test, cut exactly as in a run with this --split. Raises ConfigError if
    the split is malformed, or a run would cut between two sequences of one document."""
    indices = dataset.document_indices
    stops = [sequences.stop for sequences in split_documents(split, len(dataset))]
    above = [bisect_left(indices, stop) for stop in stops]
    for name, stop, document in zip(SPLITS, stops, above, strict=True):
        if indices[document] != stop:
            raise ConfigError(
                f"split {split}: {name} ends before sequence {stop}, within document {document - 1} (sequences "
                f"{indices[document - 1]} to {indices[document] - 1}); cut between documents with --documents"
            )
    borders = [0, *above]
    # Trailing documents without a sequence belong to the last part with a document.
    last = max(i for i in range(1, 4) if i == 1 or borders[i] > borders[i - 1])
    borders[last:] = [dataset.num_documents] * (4 - last)
    return [range(start, stop) for start, stop in pairwise(borders)]


def _write_parts(
    stem: Path,
    prefix: str,
    parts: Sequence[Part],
    *,
    dtype: np.dtype,
    vocab_size: int | None,
    digests: Mapping[str, Mapping[str, str]],
    on_bytes: Callable[[int], None],
) -> Written:
    """Write `stem.bin` and `.idx` for `prefix` with the documents of all parts, in constant memory.

    `dtype`: type of the new tokens; other types are converted. `vocab_size`: set if the output gets a side file; ids
    must be below it, and the files are hashed. `digests`: expected sha256 by prefix and suffix, for datasets that are
    copied completely. `on_bytes`: called with the number of bytes of .bin files just read. Raises ConfigError if an id
    does not fit, the disk is too full, or a dataset is damaged or does not match `digests`."""
    written = Written(
        prefix,
        sum(len(part.documents) for part in parts),
        sum(len(part.sequences) for part in parts),
        sum(len(part.tokens) for part in parts),
        dtype,
        None if vocab_size is None else LengthStatistics(),
    )
    needed = written.tokens * dtype.itemsize + 12 * written.sequences + 8 * written.documents
    folder = Path(f"{prefix}.bin").parent
    free = free_bytes(folder)
    if free < needed:
        raise ConfigError(f"{folder} has {free} bytes free, but {prefix} needs {needed}; use another disk")
    sha256 = _copy_tokens(stem.with_suffix(".bin"), parts, written, vocab_size, digests, on_bytes)
    length, index_sha256 = _write_index(stem.with_suffix(".idx"), parts, written)
    if written.lengths is not None:
        written.files[".bin"] = {"bytes": written.tokens * dtype.itemsize, "sha256": sha256}
        written.files[".idx"] = {"bytes": length, "sha256": index_sha256}
    return written


def _copy_tokens(
    path: Path,
    parts: Sequence[Part],
    written: Written,
    vocab_size: int | None,
    digests: Mapping[str, Mapping[str, str]],
    on_bytes: Callable[[int], None],
) -> str:
    """Write and sync .bin. Return its sha256, which is valid only with `vocab_size`."""
    sha256 = hashlib.sha256()
    with path.open("xb") as file:
        for part in parts:
            dataset, expected, read_sha256 = part.open(), digests.get(part.prefix, {}), hashlib.sha256()
            if ".idx" in expected:
                with dataset.idx_path.open("rb") as index:
                    found = hashlib.file_digest(index, "sha256").hexdigest()
                _compare(dataset.idx_path, found, expected[".idx"])
            for _, tokens in token_blocks(dataset, part.tokens):
                if ".bin" in expected:
                    read_sha256.update(tokens.data)
                if written.dtype != dataset.dtype:
                    require_fit(str(dataset.bin_path), tokens, written.dtype, f"use --dtype {dataset.dtype.name}")
                stored = tokens.astype(written.dtype, copy=False)
                if vocab_size is not None:
                    low, high, most = int(stored.min()), int(stored.max()), vocab_size - 1
                    if low < 0 or high > most:
                        bad = low if low < 0 else high
                        raise ConfigError(f"{dataset.bin_path}: token id {bad}, expected 0 to {most}")
                    sha256.update(stored.data)
                file.write(stored.data)
                on_bytes(tokens.nbytes)
            if ".bin" in expected:
                _compare(dataset.bin_path, read_sha256.hexdigest(), expected[".bin"])
            if written.lengths is not None:
                for lengths in lengths_in_blocks(dataset, part.documents):
                    written.lengths.add(lengths)
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


def _tokenizer(side: Side | None) -> Side | None:
    tokenizer = (side or {}).get("tokenizer")
    return tokenizer if isinstance(tokenizer, dict) else None


def _check_tokenizers(prefixes: Sequence[str], sides: Sequence[Side | None]) -> None:
    """Raise ConfigError if the side files record different tokenizers, with the first two that differ."""
    recorded = [(prefix, _tokenizer(side)) for prefix, side in zip(prefixes, sides, strict=True)]
    known = [(prefix, tokenizer) for prefix, tokenizer in recorded if tokenizer is not None]
    for prefix, tokenizer in known[1:]:
        if tokenizer != known[0][1]:
            raise ConfigError(
                f"{known[0][0]} was made with {_name(known[0][1])}, {prefix} with {_name(tokenizer)}: the same id means "
                "different text; preprocess one of them again with the other's tokenizer"
            )


def _check_shards(prefixes: Sequence[str], sides: Sequence[Side | None]) -> None:
    """Raise ConfigError if a shard written with `--shard` is missing or out of order."""
    shards = [(side or {}).get("shard") for side in sides]
    first = next((shard for shard in shards if shard is not None), None)
    if first is None:
        return
    for number, prefix in enumerate(prefixes):
        if (shard := shards[number]) != [number, first[1]]:
            found = "no part" if shard is None else f"part {shard[0]} of {shard[1]}"
            raise ConfigError(
                f"{prefix} is {found}, but part {number} of {first[1]} comes here; give all parts, in order"
            )
    if len(prefixes) < first[1]:
        raise ConfigError(f"{prefixes[-1]} is part {len(prefixes) - 1} of {first[1]}; give the parts after it too")


def _name(tokenizer: Side) -> str:
    name = str(tokenizer.get("kind", tokenizer.get("name", "a tokenizer")))
    return f"{name} {str(tokenizer['sha256'])[:12]}" if "sha256" in tokenizer else name


def _vocab_size_of(sides: Sequence[Side | None]) -> int | None:
    """Return the vocabulary size if all side files have the same, else None: then the output gets no side file."""
    sizes = {(_tokenizer(side) or {}).get("vocab_size") for side in sides}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if type(size) is int and size > 0 else None


def _merged_side(sides: Sequence[Side], written: Written) -> Side:
    """Build the side file of merged datasets, equal to that of preprocessing all their inputs at once."""
    bad = [side.get("bad_lines") for side in sides]
    known = [counts for counts in bad if isinstance(counts, dict) and all(type(n) is int for n in counts.values())]
    total: Counter[str] = Counter()
    for counts in known:
        total.update(counts)
    return _side(sides, written, **({"bad_lines": dict(sorted(total.items()))} if len(known) == len(bad) else {}))


def _part_side(side: Side, part: Part, written: Written) -> Side:
    """Build the side file of a part of a dataset, without bad lines, because their distribution is unknown."""
    of = {
        "documents": side["documents"],
        "tokens": side["tokens"],
        "first_document": part.documents.start,
        "bin_sha256": side_digests(side).get(".bin"),
    }
    return _side([side], written, part_of=of)


def _side(sides: Sequence[Side], written: Written, **more: Any) -> Side:
    """Build a side file from the new dataset and the entries that are equal in all `sides`."""
    assert written.lengths is not None
    first, *others = sides
    names = ("key", "keys", "append_eod")
    equal = {name: first[name] for name in names if name in first and all(o.get(name) == first[name] for o in others)}
    return {
        "documents": written.documents,
        "tokens": written.tokens,
        "dtype": written.dtype.name,
        **equal,
        **more,
        "tokenizer": first["tokenizer"],
        "files": written.files,
        "document_lengths": written.lengths.facts(),
    }
