"""An independent writer of documents with several sequences, based only on the description of the layout."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}  # struct format of the token dtypes, by code
NAMES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

MIXED = [[[1, 2, 3]], [[4], [], [5, 6]], [], [[]], [[7, 8], [9]], [[10, 11, 12, 13]]]
"""Documents of one and several sequences, one without sequences, and sequences without tokens."""


def pack(documents: list[list[list[int]]], *, code: int = 8) -> tuple[bytes, bytes]:
    """Bytes of .bin and .idx for tokens [document][sequence][token]."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = b"".join(struct.pack(f"<{len(s)}{LETTERS[code]}", *s) for s in sequences)
    idx = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents) + 1)
    idx += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    start = 0
    for sequence in sequences:
        idx += struct.pack("<q", start)
        start += len(sequence) * struct.calcsize(LETTERS[code])
    seen = 0
    idx += struct.pack("<q", 0)
    for document in documents:
        seen += len(document)
        idx += struct.pack("<q", seen)
    return tokens, idx


def write(prefix: Path, documents: list[list[list[int]]], *, code: int = 8) -> str:
    """Write both files. Returns the prefix."""
    tokens, idx = pack(documents, code=code)
    Path(f"{prefix}.bin").write_bytes(tokens)
    Path(f"{prefix}.idx").write_bytes(idx)
    return str(prefix)


def write_with_side_file(prefix: Path, documents: list[list[list[int]]], /, *, code: int = 8, **facts: Any) -> str:
    """Write both files, and a side file with their hashes and `facts`."""
    write(prefix, documents, code=code)
    files = {}
    for suffix in (".bin", ".idx"):
        data = Path(f"{prefix}{suffix}").read_bytes()
        files[suffix] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    tokens = sum(len(sequence) for document in documents for sequence in document)
    side = {"format": 1, "documents": len(documents), "tokens": tokens, "dtype": NAMES[code], "files": files}
    Path(f"{prefix}.json").write_text(json.dumps(side | facts))
    return str(prefix)


def both(prefix: str | Path) -> tuple[bytes, bytes]:
    """Bytes of the existing .bin and .idx."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
