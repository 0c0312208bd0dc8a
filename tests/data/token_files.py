"""Small corpora as token files."""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.preprocess import layout


def write_by_layout(prefix: Path, documents: list[list[int]], *, code: int = 8) -> None:
    """Write both files as documented: each document with tokens is a sequence."""
    layout.write(prefix, [[document] if document else [] for document in documents], code=code)


def distinct_documents(lengths: list[int]) -> list[list[int]]:
    """Documents with a unique id for each token of the corpus: 0, 1, 2, ..."""
    starts = np.cumsum([0, *lengths])
    return [list(range(start, start + length)) for start, length in zip(starts, lengths)]


def blocks_of(documents: Iterable[list[int]]) -> Iterator[tuple[NDArray, list[int]]]:
    """Input of `write_documents`: each document is a block."""
    return ((np.array(document, dtype=np.int64), [len(document)]) for document in documents)


def change(path: Path | str, offset: int, fmt: str, value: int) -> None:
    """Overwrite one number of a file."""
    data = bytearray(Path(path).read_bytes())
    struct.pack_into(fmt, data, offset, value)
    Path(path).write_bytes(data)
