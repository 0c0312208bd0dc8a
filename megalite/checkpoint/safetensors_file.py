"""Write safetensors files one tensor at a time, and read only the requested bytes of them.

The safetensors library needs all tensors in memory to write, computes no hashes, maps whole files and follows links.
This writer writes the header first, because all sizes are known, then streams the tensors and hashes them on the way.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from megalite.checkpoint.files import (
    BLOCK,
    CHUNK,
    BackgroundWork,
    FileEntry,
    RunningDigest,
    create,
    open_plain,
    sync_file,
    write_at,
)
from megalite.checkpoint.safetensors_header import HeaderFault, Record, header_bytes, read_header
from megalite.config.errors import CheckpointError

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
"""Dtypes that can be read and written, by safetensors' names."""
_READABLE = {**TORCH_DTYPES, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}  # the caller applies the scales
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_PAGE = 4096
_SYNC_BYTES = 1 << 30
"""Number of written bytes after which the file is synced."""


class SafetensorsWriter:
    """Write one file, with its tensors in the order of `records`. Only a few tensors are in memory at a time.

    Args:
        digest: compute the file's hash, on separate threads.
        progress: called after each chunk on the writing thread, to report to a watchdog while a large file is written.
    """

    def __init__(
        self, path: Path, records: Sequence[Record], *, digest: bool = True, progress: Callable[[], None] = lambda: None
    ) -> None:
        self._path, self._progress = path, progress
        self._pending = list(reversed(records))
        self._length = 0
        self._descriptor: int | None = create(path)
        self._behind = BackgroundWork[None](threads=1, most=2)
        self._digest = RunningDigest() if digest else None
        try:
            self._append(memoryview(header_bytes(records)))
        except BaseException:
            self.close()
            raise

    def write(self, tensor: torch.Tensor) -> None:
        """Append the next tensor, on any device and of any strides. It must not change before `finish` returns."""
        require_planned(self._pending.pop(), tensor)
        self._append(bytes_of(tensor.detach().to("cpu").contiguous()))

    def write_blocks(self, blocks: Iterable[torch.Tensor]) -> None:
        """Append the next tensor as contiguous CPU blocks of its dtype, in the order of its elements."""
        record, before = self._pending.pop(), self._length
        for block in blocks:
            assert DTYPE_NAMES[block.dtype] == record.dtype, (record, block.dtype)
            self._append(bytes_of(block))
        assert self._length - before == record.nbytes, (record, self._length - before)

    def finish(self) -> FileEntry:
        """Sync the file to the disk and return its length and hash (empty without `digest`)."""
        assert not self._pending and self._descriptor is not None, (self._path, len(self._pending))
        self._behind.results()
        sync_file(self._path, self._descriptor)
        sha256 = "" if self._digest is None else self._digest.hexdigest()
        self.close()
        return FileEntry(self._length, sha256, BLOCK)

    def close(self) -> None:
        self._behind.close()
        if self._digest is not None:
            self._digest.close()
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _append(self, data: memoryview) -> None:
        assert self._descriptor is not None
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            if self._digest is not None:
                self._digest.update(chunk)
            self._behind.run(self._write, self._descriptor, chunk, self._length)
            self._length += len(chunk)

    def _write(self, descriptor: int, chunk: memoryview, start: int) -> None:
        write_at(self._path, descriptor, chunk, start)
        # A single sync at the end could exceed the watchdog's timeout.
        if (start + len(chunk)) // _SYNC_BYTES > start // _SYNC_BYTES:
            sync_file(self._path, descriptor)
        self._progress()


def require_planned(record: Record, tensor: torch.Tensor) -> None:
    """Raise CheckpointError unless the tensor has the dtype and shape of the record."""
    if tuple(tensor.shape) != record.shape or DTYPE_NAMES.get(tensor.dtype) != record.dtype:
        raise CheckpointError(
            f"{record.key}: the plan says {record.dtype} {list(record.shape)}, "
            f"the tensor given is {tensor.dtype} {list(tensor.shape)}"
        )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class _Descriptor(int):
    """Descriptor of an open file, closed when the last reference to it is dropped, so that no reading thread loses it."""

    def __del__(self) -> None:
        os.close(self)


class SafetensorsReader:
    """An open file with a checked header. Reads are positioned (`pread`), so several threads may read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: _Descriptor | None = _Descriptor(open_plain(path))
        try:
            self.records, self._offsets = read_header(self._descriptor, os.fstat(self._descriptor).st_size)
        except HeaderFault as fault:
            raise CheckpointError(f"{path}: {fault}") from None
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None

    def open(self) -> None:
        """Reopen the file if it is closed."""
        if self._descriptor is None:
            self._descriptor = _Descriptor(open_plain(self._path))

    def close(self) -> None:
        """Drop the descriptor; it is closed after the running reads of other threads."""
        self._descriptor = None

    def read_elements(self, key: str, start: int, count: int, room: torch.Tensor | None = None) -> torch.Tensor:
        """Return elements [start, start + count) of a tensor as a flat tensor, in the order of the file. They are read
        into `room` (contiguous, `count` elements) if it has their dtype, else into a new tensor."""
        dtype = _READABLE[self.records[key].dtype]
        output = room if room is not None and room.dtype == dtype else torch.empty(count, dtype=dtype)
        try:
            self._read_exactly(bytes_of(output), self._offsets[key] + start * dtype.itemsize)
        except OSError as error:
            raise CheckpointError(f"{self._path}: {key}: {error.strerror}") from None
        return output

    def read_into(self, output: torch.Tensor, record: Record, index: tuple[slice, ...]) -> None:
        """Copy `record`'s elements at `index` into `output`, converted to its dtype and device."""
        found = self.records.get(record.key)
        if found is None:
            raise CheckpointError(f"{self._path}: {record.key}: there is no such tensor")
        if found != record:
            raise CheckpointError(
                f"{self._path}: {record.key} is {found.dtype} {list(found.shape)}, "
                f"the manifest says {record.dtype} {list(record.shape)}"
            )
        if 0 in output.shape:
            return
        try:
            start = self._offsets[record.key]
            dtype = TORCH_DTYPES[record.dtype]
            for place, offset, shape, part in _runs(output.detach(), start, record.shape, index, dtype):
                self._read_run(place, offset, shape, part, dtype)
        except OSError as error:
            raise CheckpointError(f"{self._path}: {record.key}: {error.strerror}") from None

    def _read_run(
        self,
        place: torch.Tensor,
        offset: int,
        shape: tuple[int, ...],
        part: tuple[slice, ...] | None,
        dtype: torch.dtype,
    ) -> None:
        """Read a contiguous tensor of `shape` at `offset`, and copy its `part` (None: all) into `place`."""
        if part is None and place.is_cpu and place.dtype == dtype and place.is_contiguous():
            self._read_exactly(bytes_of(place), offset)
            return
        buffer = torch.empty(shape, dtype=dtype)
        self._read_exactly(bytes_of(buffer), offset)
        place.copy_((buffer if part is None else buffer[part]).view(place.shape))

    def _read_exactly(self, target: memoryview, offset: int) -> None:
        descriptor = self._descriptor
        if descriptor is None:  # another thread has closed it
            descriptor = _Descriptor(open_plain(self._path))
        while target:
            count = os.preadv(descriptor, [target[:CHUNK]], offset)
            if count == 0:
                raise CheckpointError(
                    f"{self._path}: the file ends before the tensor does: it was cut after it was opened"
                )
            target, offset = target[count:], offset + count


_Run = tuple[torch.Tensor, int, tuple[int, ...], tuple[slice, ...] | None]


def _runs(
    output: torch.Tensor, offset: int, shape: tuple[int, ...], index: tuple[slice, ...], dtype: torch.dtype
) -> Iterator[_Run]:
    """Split a read of `index` of a stored tensor into reads of contiguous bytes, none much larger than `CHUNK`.

    Each is (destination, byte offset, shape of the bytes read, part of them to keep; None for all). If the wanted part
    of a row is shorter than a page, whole rows are read, because the disk reads whole pages anyway."""
    if not shape:
        yield output, offset, (1,), None
        return
    row = dtype.itemsize * math.prod(shape[1:])
    first, last = index[0].start, index[0].stop
    rest = index[1:]
    whole = all(part.start == 0 and part.stop == size for part, size in zip(rest, shape[1:], strict=True))
    kept = dtype.itemsize * math.prod(part.stop - part.start for part in rest)
    if whole or kept < _PAGE:
        # A contiguous CPU tensor of the stored dtype is read into directly, in one piece; others through a buffer.
        direct = whole and output.is_cpu and output.dtype == dtype and output.is_contiguous()
        step = last - first if direct else max(1, CHUNK // row)
        for start in range(first, last, step):
            stop = min(start + step, last)
            part = None if whole else (slice(0, stop - start), *rest)
            yield output[start - first : stop - first], offset + start * row, (stop - start, *shape[1:]), part
        return
    for i in range(first, last):
        yield from _runs(output[i - first], offset + i * row, shape[1:], rest, dtype)
