"""An independent writer of the .bin/.idx layout, from its description alone, and small corpora."""

import struct
from pathlib import Path

import numpy as np


def write_by_layout(prefix: Path, documents: list[list[int]], *, code: int = 8, letter: str = "H") -> None:
    """The bytes of both files, field by field; struct letters are little-endian."""
    body = [document for document in documents if document]
    itemsize = struct.calcsize(letter)
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack(f"<{len(d)}{letter}", *d) for d in body))
    idx = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    idx += struct.pack("<Q", len(body)) + struct.pack("<Q", len(documents) + 1)
    idx += b"".join(struct.pack("<i", len(d)) for d in body)
    start = 0
    for d in body:
        idx += struct.pack("<q", start)
        start += len(d) * itemsize
    seen = 0
    idx += struct.pack("<q", 0)
    for d in documents:
        seen += bool(d)
        idx += struct.pack("<q", seen)
    prefix.with_suffix(".idx").write_bytes(idx)


def distinct_documents(lengths: list[int]) -> list[list[int]]:
    """Documents in which every token of the corpus has its own id: 0, 1, 2, ..."""
    starts = np.cumsum([0, *lengths])
    return [list(range(start, start + length)) for start, length in zip(starts, lengths)]
