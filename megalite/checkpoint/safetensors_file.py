"""Safetensors files: a writer that takes one tensor at a time, a reader that touches only the bytes asked for.

Not the safetensors library: it writes from tensors that are all in memory and hashes nothing, and it maps whole files,
following links. Sizes are known before the data, so the header goes first and the tensors follow; the hash runs along.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megalite.checkpoint.digests import BLOCK, RunningDigest
from megalite.checkpoint.files import CHUNK, BackgroundWork, create, open_plain, sync_file, write_at
from megalite.checkpoint.manifest import FileEntry
from megalite.checkpoint.safetensors_header import FORMAT_PT, HeaderFault, Record, header_bytes, read_header
from megalite.config.errors import CheckpointError

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
"""What can be read and written."""
_ALSO_READ = {**TORCH_DTYPES, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}  # of which the reader knows the scales
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_PAGE = 4096
_SYNC_BYTES = 1 << 30
"""After so many bytes what has been written is put on the disk."""


class SafetensorsWriter:
    """Writes one file, its tensors in the order of `records`; holds a few of them in memory at a time.

    Args:
        metadata: text by text, kept in the header.
        digest: hash what is written, on separate threads.
        progress: called after each chunk, on the thread that writes: a large file takes long, and a watchdog must see
            that it grows.
    """

    def __init__(
        self,
        path: Path,
        records: Sequence[Record],
        *,
        metadata: Mapping[str, str] = FORMAT_PT,
        digest: bool = True,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._path, self._progress = path, progress
        self._pending = list(reversed(records))
        self._length = 0
        self._descriptor: int | None = create(path)
        self._behind = BackgroundWork[None](threads=1, most=2)
        self._digest = RunningDigest() if digest else None
        try:
            self._append(memoryview(header_bytes(records, metadata)))
        except BaseException:
            self.close()
            raise

    def write(self, tensor: torch.Tensor) -> None:
        """Append the next tensor, of any device and strides; it must not change before `finish` has returned."""
        require_planned(self._pending.pop(), tensor)
        self._append(bytes_of(tensor.detach().to("cpu").contiguous()))

    def write_blocks(self, blocks: Iterable[torch.Tensor]) -> None:
        """Append the next tensor from blocks of its type, contiguous and on the CPU, in the order of its elements."""
        record, before = self._pending.pop(), self._length
        for block in blocks:
            assert DTYPE_NAMES[block.dtype] == record.dtype, (record, block.dtype)
            self._append(bytes_of(block))
        assert self._length - before == record.nbytes, (record, self._length - before)

    def finish(self) -> FileEntry:
        """Put the file on the disk and return its length and hash (empty without `digest`)."""
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
        # All of it at the end could take longer than anybody who watches waits for.
        if (start + len(chunk)) // _SYNC_BYTES > start // _SYNC_BYTES:
            sync_file(self._path, descriptor)
        self._progress()


def require_planned(record: Record, tensor: torch.Tensor) -> None:
    """Raise CheckpointError unless the tensor is what the file's header says."""
    if tuple(tensor.shape) != record.shape or DTYPE_NAMES.get(tensor.dtype) != record.dtype:
        raise CheckpointError(
            f"{record.key}: the plan says {record.dtype} {list(record.shape)}, "
            f"the tensor given is {tensor.dtype} {list(tensor.shape)}"
        )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class _Descriptor(int):
    """Of an open file, which is closed when no thread reads from it any more."""

    def __del__(self) -> None:
        os.close(self)


class SafetensorsReader:
    """An open file, its header checked. Reads are positioned: memory does not grow with what has been read, and several
    threads may read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: _Descriptor | None = _Descriptor(open_plain(path))
        try:
            header = read_header(self._descriptor, os.fstat(self._descriptor).st_size)
        except HeaderFault as fault:
            raise CheckpointError(f"{path}: {fault}") from None
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        self.records, self.metadata, self._offsets = header.records, header.metadata, header.offsets

    def open(self) -> None:
        """Open the file again, if it was closed."""
        if self._descriptor is None:
            self._descriptor = _Descriptor(open_plain(self._path))

    def close(self) -> None:
        """Give the open file back."""
        self._descriptor = None

    def read_elements(self, key: str, start: int, count: int, room: torch.Tensor | None = None) -> torch.Tensor:
        """`count` elements of a tensor from the `start`-th on, in the order of the file, of one dimension: in `room` (as
        many, contiguous) if it is of their type, else a new one."""
        dtype = _ALSO_READ[self.records[key].dtype]
        output = room if room is not None and room.dtype == dtype else torch.empty(count, dtype=dtype)
        try:
            self._read_exactly(bytes_of(output), self._offsets[key] + start * dtype.itemsize)
        except OSError as error:
            raise CheckpointError(f"{self._path}: {key}: {error.strerror}") from None
        return output

    def read_into(self, output: torch.Tensor, record: Record, index: tuple[slice, ...]) -> None:
        """Copy `record`'s elements at `index` into `output`, which converts them to its dtype and device."""
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
        """Read contiguous bytes from `offset`: of a tensor of `shape`, of which `place` gets the `part`."""
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
    """Cut a read of `index` of a stored tensor into reads of contiguous bytes, none much larger than `CHUNK`.

    Each is (where it goes, byte offset, shape of what is read, the part of that to be kept; None: all of it). Parts of
    rows shorter than a page are picked out of whole rows: the disk gives no less than a page anyway.
    """
    if not shape:
        yield output, offset, (1,), None
        return
    row = dtype.itemsize * math.prod(shape[1:])
    first, last = index[0].start, index[0].stop
    rest = index[1:]
    whole = all(part.start == 0 and part.stop == size for part, size in zip(rest, shape[1:], strict=True))
    kept = dtype.itemsize * math.prod(part.stop - part.start for part in rest)
    if whole or kept < _PAGE:
        # Into memory of the stored type the bytes go directly, however many; else through a buffer.
        direct = whole and output.is_cpu and output.dtype == dtype and output.is_contiguous()
        step = last - first if direct else max(1, CHUNK // row)
        for start in range(first, last, step):
            stop = min(start + step, last)
            part = None if whole else (slice(0, stop - start), *rest)
            yield output[start - first : stop - first], offset + start * row, (stop - start, *shape[1:]), part
        return
    for i in range(first, last):
        yield from _runs(output[i - first], offset + i * row, shape[1:], rest, dtype)
