"""Read and write the header of a safetensors file: the tensors' dtypes, shapes and offsets. Imports no torch.

A file has 8 bytes for the header's length, the header (JSON: key -> dtype, shape, offsets; padded with blanks), then
the data."""

import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megalite.checkpoint.manifest import unique_keys

MAX_HEADER = 100 << 20
"""Maximum bytes of a header, as in the safetensors library."""

_NAMES = {8: "F64 I64 U64", 4: "F32 I32 U32", 2: "F16 BF16 I16 U16", 1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0"}
_ITEM_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}


@dataclass(frozen=True)
class Record:
    """A tensor in a file: key, dtype (safetensors' name) and shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_SIZES[self.dtype]


def file_bytes(records: Sequence[Record]) -> int:
    return len(header_bytes(records)) + sum(record.nbytes for record in records)


def header_bytes(records: Sequence[Record]) -> bytes:
    """Return the bytes before the data: the header's length and the header."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # as of files written from torch
    offset = 0
    for record in records:
        entries[record.key] = {
            "dtype": record.dtype,
            "shape": list(record.shape),
            "data_offsets": [offset, offset + record.nbytes],
        }
        offset += record.nbytes
    text = json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts 8-byte aligned
    return struct.pack("<Q", len(text)) + text


class HeaderFault(Exception):
    """A fault in a header; the caller adds the file's name."""


def read_header(descriptor: int, length: int) -> tuple[dict[str, Record], dict[str, int]]:
    """Read and check the header of an open file of `length` bytes. Return the records by key, in the order of their
    data, and the byte offset of each tensor's data in the file.

    Raises:
        HeaderFault: the header is malformed, or its sizes do not match the file.
        OSError: the file cannot be read."""
    header, start = _read_json(descriptor, length)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise HeaderFault("its __metadata__ does not map strings to strings")
    ordered = _parse_records(header, length - start)
    offsets = {record.key: start + offset for offset, record in ordered}
    return {record.key: record for _, record in ordered}, offsets


def _read_json(descriptor: int, length: int) -> tuple[dict[str, Any], int]:
    prefix = os.pread(descriptor, 8, 0)
    if len(prefix) < 8:
        raise HeaderFault(f"{length} bytes are too few for a safetensors file")
    (size,) = struct.unpack("<Q", prefix)
    if size > min(MAX_HEADER, length - 8):
        raise HeaderFault(f"declares a header of {size} bytes; the file has {length}, the limit is {MAX_HEADER}")
    text = os.pread(descriptor, size, 8)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise HeaderFault(f"its header is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise HeaderFault("its header is not a JSON object")
    return header, 8 + size


def _parse_records(header: dict[str, Any], data: int) -> list[tuple[int, Record]]:
    """Return (offset, record) pairs in the order of the data, which they must fill without gap or overlap."""
    found: list[tuple[int, int, Record]] = []
    for key, value in header.items():
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise HeaderFault(f"{key[:120]!r} must have dtype, shape and data_offsets")
        dtype, shape = value["dtype"], value["shape"]
        if not isinstance(dtype, str) or dtype not in _ITEM_SIZES:
            raise HeaderFault(f"{key[:120]!r} has the unknown dtype {str(dtype)[:40]!r}")
        start, stop = _sizes(value["data_offsets"], key, 2)
        record = Record(key, dtype, tuple(_sizes(shape, key)))
        if record.nbytes != stop - start:
            raise HeaderFault(f"{key[:120]!r} has {stop - start} bytes of data, its shape takes {record.nbytes}")
        found.append((start, stop, record))
    end = 0
    found.sort(key=lambda item: item[:2])
    for start, stop, record in found:
        if start != end:
            raise HeaderFault(f"the data of {record.key[:120]!r} starts at {start} instead of {end}")
        end = stop
    if end != data:
        raise HeaderFault(f"its tensors take {end} bytes, the file has {data} for them")
    return [(start, record) for start, _, record in found]


def _sizes(value: Any, key: str, count: int | None = None) -> list[int]:
    ok = isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)
    if not ok or len(value) > 64 or (count is not None and len(value) != count):
        raise HeaderFault(f"{key[:120]!r} has sizes or offsets that are not whole numbers: {str(value)[:80]}")
    return value
