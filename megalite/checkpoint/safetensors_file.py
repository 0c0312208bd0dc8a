"""Safetensors files: a writer that takes one tensor at a time, a reader that touches only the bytes asked for.

The format: 8 bytes with the header's length, the header (JSON: name -> dtype, shape, offsets), then the data. Sizes
are known before the data, so the header goes first and the tensors follow as they come; the hash runs along.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megalite.checkpoint.files import CHUNK, create, write_all
from megalite.checkpoint.manifest import ITEM_SIZES, CheckpointError, FileEntry

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Record:
    """A tensor that a file will hold: its key there, dtype (a key of `ITEM_SIZES`) and shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class SafetensorsWriter:
    """Writes one file, its tensors in the order of `records`; holds one of them in memory at a time.

    Args:
        path: a file that does not exist yet.
        records: what will come, in this order.

    Raises:
        OSError: here and from `write` and `finish`: disk full, no permission, the file exists, ...
    """

    def __init__(self, path: Path, records: Sequence[Record]) -> None:
        self._path = path
        self._pending = list(reversed(records))
        self._hash = hashlib.sha256()
        self._length = 0
        self._descriptor: int | None = create(path)
        try:
            self._append(memoryview(_header(records)))
        except BaseException:
            self.close()
            raise

    def write(self, tensor: torch.Tensor) -> None:
        """Append the next tensor; it may lie on any device and have any strides."""
        record = self._pending.pop()
        if tuple(tensor.shape) != record.shape or DTYPE_NAMES.get(tensor.dtype) != record.dtype:
            raise CheckpointError(
                f"{record.key}: the plan says {record.dtype} {list(record.shape)}, "
                f"the tensor given is {tensor.dtype} {list(tensor.shape)}"
            )
        flat = tensor.detach().to("cpu").contiguous().view(-1)
        self._append(flat.view(torch.uint8).numpy().data)

    def finish(self) -> FileEntry:
        """Put the file on the disk and return its length and hash."""
        assert not self._pending and self._descriptor is not None, (self._path, len(self._pending))
        os.fsync(self._descriptor)
        self.close()
        return FileEntry(self._length, self._hash.hexdigest())

    def close(self) -> None:
        """Close the file, finished or not."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _append(self, data: memoryview) -> None:
        assert self._descriptor is not None
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            self._hash.update(chunk)
            write_all(self._descriptor, chunk)
        self._length += len(data)


def file_bytes(records: Sequence[Record]) -> int:
    """Size of the file that these records make."""
    return len(_header(records)) + sum(record.nbytes for record in records)


def _header(records: Sequence[Record]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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


class SafetensorsReader:
    """A memory-mapped file; checks each tensor's header against what the manifest says of it before reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from None

    def read_into(self, output: torch.Tensor, record: Record, index: tuple[slice, ...]) -> None:
        """Copy `record`'s elements at `index` into `output`, which converts them to its dtype and device.

        Raises:
            CheckpointError: the file's tensor is not there or has another dtype or shape than `record`.
        """
        try:
            stored = self._file.get_slice(record.key)
            found = Record(record.key, stored.get_dtype(), tuple(stored.get_shape()))
            if found != record:
                raise CheckpointError(
                    f"{self._path}: {record.key} is {found.dtype} {list(found.shape)}, "
                    f"the manifest says {record.dtype} {list(record.shape)}"
                )
            output.copy_(stored[index])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path}: {record.key}: {error}") from None
