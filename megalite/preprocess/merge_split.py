"""Datasets merged end to end, and a dataset split into several: whole documents, in order, with their sequences."""

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
    token_blocks,
)
from megalite.data.indexed_writer import new_files, require_fit, write_index
from megalite.data.token_files import encode_side_file, read_side_file, side_digests
from megalite.preprocess.output import LengthStatistics, make_folder, refuse_existing

Side = dict[str, Any]  # the facts of a side file


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
    lengths: LengthStatistics | None  # of its documents; None if there is no side file
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # if there is one: what it says of .bin and .idx


def merge(
    prefixes: Sequence[str],
    output: str,
    *,
    dtype: str | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Written:
    """Write the documents of all datasets, in this order, as one; its bytes are those of preprocessing all inputs.

    If all have side files that agree on the vocabulary, the new one has one too. The sha256 that side files have are
    compared on the way.

    `dtype`: type of the new tokens; needed if the datasets' types differ. `on_bytes`: called with the number of bytes
    of .bin files just read. Raises ConfigError: a dataset is damaged, their types or tokenizers differ, an id does not
    fit, or the output exists."""
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
                f"{first.prefix} holds {first.dtype.name} tokens, {part.prefix} {part.dtype.name}; give --dtype "
                f"{wide.name} to store all of them as that"
            )
    return first.dtype


def split_dataset(
    prefix: str, outputs: Sequence[tuple[str, range]], *, on_bytes: Callable[[int], None] = lambda count: None
) -> list[Written]:
    """Write documents of a dataset as separate datasets, one for each of `outputs`; all of them or none. If the dataset
    has a side file, each part gets one. `outputs`: (prefix, documents) of each part. `on_bytes`: called with the number
    of bytes of .bin just read. Raises ConfigError: the dataset is damaged, or an output exists."""
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
    """Documents of each of `parts` parts, each with a document at least, about as many tokens in one as in another.
    Part k ends at the document border nearest to token (k + 1) / parts of all. Raises ConfigError: more parts than
    documents, or none."""
    documents, tokens = dataset.num_documents, dataset.num_tokens
    if not 1 <= parts <= documents:
        raise ConfigError(f"parts {parts}: {dataset.prefix} has {documents} documents; give 1 to {documents}")
    ends: list[int] = []
    for part in range(1, parts):
        target = tokens * part / parts
        above = bisect_left(range(documents), target, key=lambda i: first_token(dataset, i))
        before = above and target - first_token(dataset, above - 1) <= first_token(dataset, above) - target
        near = above - 1 if before else above
        ends.append(min(max(near, ends[-1] + 1 if ends else 1), documents - (parts - part)))
    return [range(start, stop) for start, stop in pairwise([0, *ends, documents])]


def parts_of_split(dataset: IndexedDataset, split: str) -> list[range]:
    """Documents of train, valid and test, cut exactly where a run with this --split cuts. Raises ConfigError: the split
    is bad, or a run would cut between two sequences of one document."""
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
    # Documents without a sequence, behind the last that has one, belong to the last part that has any.
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
    """Write `stem.bin` and `.idx` for `prefix`: the documents of all parts, in order. Memory does not grow with the files.

    `dtype`: type of the new dataset's tokens; ids of another type are converted. `vocab_size`: if there is to be a side
    file: every id is below it; ids are counted and the files hashed. `digests`: sha256 by prefix and suffix, of datasets
    that are copied as a whole: they are compared on the way. `on_bytes`: called with the number of bytes of .bin files
    just read. Raises ConfigError: an id does not fit; the disk has not enough room; a dataset is damaged, or not what
    `digests` says."""
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
        raise ConfigError(f"{folder} has {free} bytes free, {needed} are needed for {prefix}; use another disk")
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
                if vocab_size is not None:
                    low, high, most = int(stored.min()), int(stored.max()), vocab_size - 1
                    if low < 0 or high > most:
                        bad = low if low < 0 else high
                        raise ConfigError(f"{dataset.bin_path}: token id {bad}, expected 0 to {most}")
                    sha256.update(stored.data)
                file.write(stored.data)
                on_bytes(tokens.nbytes)
            if ".bin" in expected:
                _compare(dataset.bin_path, seen.hexdigest(), expected[".bin"])
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
    """Datasets must not be merged if their side files name different tokenizers. Raises ConfigError: names the first
    two that differ, and their tokenizers."""
    named = [(prefix, _tokenizer(side)) for prefix, side in zip(prefixes, sides, strict=True)]
    known = [(prefix, tokenizer) for prefix, tokenizer in named if tokenizer is not None]
    for prefix, tokenizer in known[1:]:
        if tokenizer != known[0][1]:
            raise ConfigError(
                f"{known[0][0]} was made with {_name(known[0][1])}, {prefix} with {_name(tokenizer)}: the same id means "
                "different text; preprocess one of them again with the other's tokenizer"
            )


def _check_shards(prefixes: Sequence[str], sides: Sequence[Side | None]) -> None:
    """Parts that `--shard` wrote must be all there are, in order. Raises ConfigError: one is missing or out of place."""
    shards = [(side or {}).get("shard") for side in sides]
    first = next((shard for shard in shards if shard is not None), None)
    if first is None:
        return
    for number, prefix in enumerate(prefixes):
        if (shard := shards[number]) != [number, first[1]]:
            found = "no part" if shard is None else f"part {shard[0]} of {shard[1]}"
            raise ConfigError(
                f"{prefix} is {found}, where part {number} of {first[1]} belongs; give all parts, in order"
            )
    if len(prefixes) < first[1]:
        raise ConfigError(f"{prefixes[-1]} is part {len(prefixes) - 1} of {first[1]}; give the parts after it too")


def _name(tokenizer: Side) -> str:
    name = str(tokenizer.get("kind", tokenizer.get("name", "a tokenizer")))
    return f"{name} {str(tokenizer['sha256'])[:12]}" if "sha256" in tokenizer else name


def _vocab_size_of(sides: Sequence[Side | None]) -> int | None:
    """The vocabulary that all side files name; None if one names none or is missing: the output then has no side file."""
    sizes = {(_tokenizer(side) or {}).get("vocab_size") for side in sides}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if type(size) is int and size > 0 else None


def _merged_side(sides: Sequence[Side], written: Written) -> Side:
    """The side file of merged datasets: as preprocessing all their inputs at once would give it."""
    bad = [side.get("bad_lines") for side in sides]
    known = [counts for counts in bad if isinstance(counts, dict) and all(type(n) is int for n in counts.values())]
    total: Counter[str] = Counter()
    for counts in known:
        total.update(counts)
    return _side(sides, written, **({"bad_lines": dict(sorted(total.items()))} if len(known) == len(bad) else {}))


def _part_side(side: Side, part: Part, written: Written) -> Side:
    """The side file of some documents of a dataset; which bad lines were theirs is unknown."""
    of = {
        "documents": side["documents"],
        "tokens": side["tokens"],
        "first_document": part.documents.start,
        "bin_sha256": side_digests(side).get(".bin"),
    }
    return _side([side], written, part_of=of)


def _side(sides: Sequence[Side], written: Written, **more: Any) -> Side:
    """What the new dataset holds, and what all the side files say alike."""
    assert written.lengths is not None
    first, *others = sides
    names = ("key", "keys", "append_eod")
    alike = {name: first[name] for name in names if name in first and all(o.get(name) == first[name] for o in others)}
    return {
        "documents": written.documents,
        "tokens": written.tokens,
        "dtype": written.dtype.name,
        **alike,
        **more,
        "tokenizer": first["tokenizer"],
        "files": written.files,
        "document_lengths": written.lengths.facts(),
    }
