"""The growing files of one key in the folder of an unfinished run, and what an earlier run left of them."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalite.data.indexed_writer import LENGTH, TokenCounts, TokenStream
from megalite.data.preprocess.journal import Mark, OutputState
from megalite.data.preprocess.statistics import DatasetStatistics

_BLOCK = 1 << 22


@dataclass(frozen=True)
class OutputFiles:
    """Where the files of one key are while they grow."""

    folder: Path
    number: int

    def path(self, suffix: str) -> Path:
        """`.bin`, `.lengths`, `.idx` or `.json`."""
        return self.folder / f"{self.number}{suffix}"


@dataclass
class Kept:
    """What of earlier files is as the journal says."""

    marks: int
    """Leading marks that the files bear out."""
    counts: TokenCounts
    """Of what the last of them covers."""
    statistics: DatasetStatistics


class Output:
    """Documents of one key: appended, counted, and made safe when asked."""

    def __init__(self, files: OutputFiles, kept: Kept, *, name: str) -> None:
        self.files = files
        self.counts, self.statistics = kept.counts, kept.statistics
        for suffix, size in ((".bin", self.counts.dtype.itemsize), (".lengths", LENGTH.itemsize)):
            path = files.path(suffix)
            if path.exists():
                units = self.counts.tokens if suffix == ".bin" else self.counts.documents
                os.truncate(path, units * size)
        self._stream = TokenStream(files.path(".bin"), files.path(".lengths"), self.counts, name=name)

    def append(self, tokens: NDArray, lengths: NDArray[np.int64]) -> None:
        """Add documents `[sum(lengths)]`."""
        self._stream.append(tokens, lengths)
        self.statistics.add_tokens(tokens)
        self.statistics.add_lengths(lengths)

    def state(self) -> OutputState:
        """What the files hold once `sync` has returned; hands everything to the system."""
        self._stream.flush()
        return _state_of(self.counts)

    def sync(self) -> None:
        """Put what `state` spoke of on the disk."""
        self._stream.sync()

    def close(self) -> None:
        """Let go of the files."""
        self._stream.close()


def fresh(dtype: np.dtype, vocab_size: int) -> Kept:
    """Nothing yet."""
    return Kept(0, TokenCounts(dtype), DatasetStatistics(vocab_size))


def verify_kept(
    files: Sequence[OutputFiles], marks: Sequence[Mark], dtype: np.dtype, vocab_size: int
) -> list[Kept]:
    """Read what an earlier run left and compare it with its marks; for every output the same number of marks holds.

    Returns:
        For each output the state at the last mark that all of them bear out.
    """
    limit = len(marks)
    while True:
        kept = [
            _read_kept(own, [mark.outputs[own.number] for mark in marks[:limit]], dtype, vocab_size)
            for own in files
        ]
        good = min(one.marks for one in kept)
        if all(one.marks == good for one in kept) and good == limit:
            return kept
        # A stretch is damaged: counts have gone past what is good, so they are made again up to there.
        limit = good


def _read_kept(files: OutputFiles, states: Sequence[OutputState], dtype: np.dtype, vocab_size: int) -> Kept:
    kept = fresh(dtype, vocab_size)
    counts = kept.counts
    if not states or not all(files.path(suffix).is_file() for suffix in (".bin", ".lengths")):
        return kept
    with files.path(".bin").open("rb") as bin_file, files.path(".lengths").open("rb") as lengths_file:
        for state in states:
            for tokens in _blocks(bin_file, dtype, state.tokens - counts.tokens):
                if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
                    return kept
                counts.add_tokens(tokens.view(np.uint8).data)
                kept.statistics.add_tokens(tokens)
            for lengths in _blocks(lengths_file, LENGTH, state.documents - counts.documents):
                counts.add_lengths(lengths)
                kept.statistics.add_lengths(lengths)
            if _state_of(counts) != state:
                return kept
            kept.marks += 1
    return kept


def _blocks(file: BinaryIO, dtype: np.dtype, count: int) -> Iterator[NDArray]:
    """The next `count` items of a file, or what there is of them."""
    while count > 0:
        data = file.read(min(count * dtype.itemsize, _BLOCK))
        block = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype=dtype)
        if not len(block):
            return
        count -= len(block)
        yield block


def _state_of(counts: TokenCounts) -> OutputState:
    return OutputState(
        documents=counts.documents,
        tokens=counts.tokens,
        bin_sha256=counts.bin_sha256.hexdigest(),
        lengths_sha256=counts.lengths_sha256.hexdigest(),
    )
