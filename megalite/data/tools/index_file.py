"""Write an .idx whose documents come from other datasets, a block at a time."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megalite.data.indexed_dataset import HEADER, MAGIC, TOKEN_DTYPES, VERSION, IndexedDataset
from megalite.data.tools.documents import BLOCK


class IndexFile:
    """An .idx that grows in its three arrays at once: their lengths are known beforehand.

    Args:
        path: the file; it must be new.
        dtype: type of the tokens.
        sequences: how many will be added in all.
        documents: how many will be added in all.
    """

    def __init__(self, path: Path, *, dtype: np.dtype, sequences: int, documents: int) -> None:
        self._itemsize = dtype.itemsize
        self._sequences = self._tokens = 0
        code = next(code for code, known in TOKEN_DTYPES.items() if known == dtype)
        header = HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1)
        pointers_at = len(header) + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        with ExitStack() as stack:
            self._sizes_file = stack.enter_context(path.open("xb"))
            self._pointers_file = stack.enter_context(path.open("r+b"))
            self._documents_file = stack.enter_context(path.open("r+b"))
            self._sizes_file.write(header)
            self._pointers_file.seek(pointers_at)
            self._documents_file.seek(documents_at)
            self._documents_file.write(np.zeros(1, "<i8").data)
            self._stack = stack.pop_all()

    def __enter__(self) -> "IndexFile":
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack:
            if error[0] is None:
                for file in (self._sizes_file, self._pointers_file, self._documents_file):
                    sync(file)

    def add(self, dataset: IndexedDataset, *, documents: range, sequences: range, tokens: range) -> None:
        """Append some documents of a dataset, which are these sequences and tokens of it."""
        for first in range(sequences.start, sequences.stop, BLOCK):
            last = min(first + BLOCK, sequences.stop)
            self._sizes_file.write(dataset.sizes[first:last].tobytes())
            starts = dataset.pointers[first:last] // dataset.dtype.itemsize
            starts += self._tokens - tokens.start
            self._pointers_file.write((starts * self._itemsize).astype("<i8", copy=False).data)
        for first in range(documents.start + 1, documents.stop + 1, BLOCK):
            last = min(first + BLOCK, documents.stop + 1)
            indices = dataset.document_indices[first:last] + (self._sequences - sequences.start)
            self._documents_file.write(indices.astype("<i8", copy=False).data)
        self._sequences += len(sequences)
        self._tokens += len(tokens)


def sync(file: BinaryIO) -> None:
    """Put a file on the disk."""
    file.flush()
    os.fsync(file.fileno())
