"""Read and write files of `torch.save` one tensor at a time, without running code in them.

torch.load checks no checksums and reads whole storages; torch.save needs all tensors in memory. This module loads a file
under a FakeTensorMode (`weights_only=True`, listed classes), and reads and writes elements at their file offsets."""

import argparse
import contextlib
import io
import os
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megalite.checkpoint.files import BackgroundWork, sync_file, write_at
from megalite.checkpoint.safetensors_file import DTYPE_NAMES, bytes_of
from megalite.config.reading import Span
from megalite.conversion.output import stored_blocks
from megalite.conversion.weights import BLOCK, ConversionError, Read, WeightPiece, Weights


class Inert:
    """Placeholder for objects in a checkpoint that a conversion does not need. It ignores its arguments and state."""

    def __new__(cls, *_args: object) -> "Inert":
        return super().__new__(cls)

    def __setstate__(self, _state: object) -> None: ...


_NUMPY = ("numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType") + tuple(
    f"numpy.{package}.multiarray.{name}" for package in ("core", "_core") for name in ("_reconstruct", "scalar")
)
_PYTHON = (
    *("types.SimpleNamespace", "pathlib.PosixPath", "pathlib.Path", "_io.BytesIO", "io.BytesIO"),
    *("signal.Signals", "signal.SIGTERM", "signal.SIGINT", "signal.SIGUSR1", "signal.SIGUSR2"),
    *("datetime.timedelta", "datetime.datetime"),
)
_ENUMS = "AttnBackend AttnMaskType CudaGraphModule CudaGraphScope InferenceCudaGraphScope ModelType"
_RECIPES = "DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling NVFP4BlockScaling"
_MEGATRON = (
    *(f"megatron.{place}.ModelType" for place in ("core.enums", "model.enums", "legacy.model.enums")),
    *(f"megatron.core.transformer.enums.{name}" for name in _ENUMS.split()),
    *("megatron.core.enums.Fp8Recipe", "megatron.core.enums.Fp4Recipe"),
    *("megatron.core.optimizer.OptimizerConfig", "megatron.core.optimizer.optimizer_config.OptimizerConfig"),
    *(f"megatron.core.rerun_state_machine.{name}" for name in ("RerunDiagnostic", "RerunMode", "RerunState")),
    *("megatron.fp16.loss_scaler.DynamicLossScaler", "megatron.fp16.loss_scaler.LossScaler"),
    *(f"transformer_engine.common.recipe.{name}" for name in (*_RECIPES.split(), "Format", "MMParams", "QParams")),
)

ALLOWED: list[Any] = [argparse.Namespace, *((Inert, name) for name in (*_NUMPY, *_PYTHON, *_MEGATRON))]
"""Classes for `torch.serialization.safe_globals`, in addition to torch's own (tensors, dtypes, OrderedDict).

Only `argparse.Namespace`, which only stores attributes, is created. The others (random states, enumerations, loss scalers)
become `Inert`: their code need not be installed and is never run."""


def require_readable(path: Path, piece: WeightPiece, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise for a weight of another shape, of integers, or of a quantized dtype (such as fp8): its scales are elsewhere."""
    name = piece.name
    if tuple(shape) != piece.shape:
        raise ConversionError(f"{path}: {name} is {list(shape)}; its args require {list(piece.shape)}")
    if not dtype.is_floating_point:
        raise ConversionError(f"{path}: {name} has dtype {dtype}, which is not floating-point")
    if dtype not in DTYPE_NAMES:
        known = ", ".join(str(kind) for kind in DTYPE_NAMES if kind.is_floating_point)
        raise ConversionError(f"{path}: {name} has the quantized dtype {dtype}, which is not read; save it as {known}")


_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, then lengths of name and extra field

LARGEST_ENTRY = 1 << 30  # maximum bytes of an entry that is not a tensor; settings and names need far less

_DIRECTORY_ENTRY = 46  # bytes of an entry in the zip directory, without name, extra field and comment


@dataclass(frozen=True)
class Record:
    """The location of one storage in the file. `entry`: offset of its entry in the zip directory."""

    name: str
    start: int
    length: int
    crc: int
    entry: int


class TorchFile:
    """A file of `torch.save`: `content` has tensors with dtype and shape only, and `read` reads their elements.

    torch's unpickler with `weights_only=True` builds the content from `ALLOWED` and torch's own classes. Under a
    FakeTensorMode it reads no storage, but records each storage's offset in the file. Elements are read from there and
    checked against the zip archive's CRC-32, which `torch.load` does not check.

    The file is reopened for each call, because a checkpoint has hundreds of files."""

    def __init__(self, path: Path, start: int = 0, length: int | None = None) -> None:
        """Open bytes [start, start + length) of a file; default: all."""
        self.name = str(path) if length is None else f"{path} (bytes {start} to {start + length})"
        self._span = (path, start, length)
        self._sound: set[int] = set()
        with self._opened() as stream:
            self._records = _read_directory(self.name, stream)
            self.content: Any = self._load(stream)

    def reader(self, tensor: torch.Tensor, count: int) -> Read:
        """Return a function that reads the first `count` elements of a tensor. If they are a whole storage and are read
        in order, the checksum is computed on the way and compared after the last element, so that the storage is read
        once."""
        record, crc, position = self.record(tensor), 0, 0

        def in_order(start: int, length: int, room: torch.Tensor | None = None) -> torch.Tensor:
            nonlocal crc, position
            if start != position or record.start in self._sound or count * tensor.element_size() != record.length:
                return self.read(tensor, start, length, room)
            values = self._elements(tensor, start, length, room)
            crc, position = zlib.crc32(bytes_of(values), crc), start + length
            if position == count:
                self._require_sound(record, crc)
            return values

        return in_order

    def read(self, tensor: torch.Tensor, start: int, count: int, room: torch.Tensor | None = None) -> torch.Tensor:
        """Read elements [start, start + count) of a tensor in `content`, flat; into `room` if it has their dtype. The
        first read of a storage checks the checksum of the whole storage."""
        record = self.record(tensor)
        if count and record.start not in self._sound:
            self._require_sound(record)
        return self._elements(tensor, start, count, room)

    def _require_sound(self, record: Record, crc: int | None = None) -> None:
        """Raise if a storage's checksum is wrong. `crc`: the checksum of its bytes, if already computed."""
        if crc is None:
            with self._opened() as stream:
                crc = _crc(stream, record)
        # 0: the storage was reserved by torch.serialization.skip_data and filled later.
        if record.crc not in (0, crc):
            raise ConversionError(f"{self.name} is damaged: checksum {crc:08x}, not {record.crc:08x}")
        self._sound.add(record.start)

    def _elements(self, tensor: torch.Tensor, start: int, count: int, room: torch.Tensor | None) -> torch.Tensor:
        size = tensor.element_size()
        output = room if room is not None and room.dtype == tensor.dtype else torch.empty(count, dtype=tensor.dtype)
        if count == 0:
            return output
        record, first = self.record(tensor), int(tensor.storage_offset()) * size
        if first + tensor.numel() * size > record.length:
            raise ConversionError(f"{self.name} is damaged: a tensor is longer than its bytes")
        if not tensor.is_contiguous():
            raise ConversionError(f"{self.name} has a tensor of strides {tensor.stride()}; save contiguous tensors")
        buffer = bytes_of(output)
        with self._opened() as stream:
            stream.seek(record.start + first + start * size)
            if stream.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
                raise ConversionError(f"{self.name} ends in the middle of a tensor")
        return output

    @contextlib.contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        path, start, length = self._span
        try:
            with path.open("rb") as file:
                yield file if length is None else io.BufferedReader(Span(file, start, start + length))
        except OSError as error:
            raise ConversionError(f"{self.name} cannot be read: {error}") from None

    def record(self, tensor: torch.Tensor) -> Record:
        """Return the location of a tensor's storage."""
        storage = tensor.untyped_storage()
        record = self._records.get(getattr(storage, "_checkpoint_offset", -1))
        if record is None or record.length != storage.nbytes():
            raise ConversionError(f"{self.name} is damaged: a tensor has the wrong offset or length")
        return record

    def _load(self, stream: BinaryIO) -> Any:
        stream.seek(0)
        try:
            with warnings.catch_warnings(), FakeTensorMode(), torch.serialization.safe_globals(ALLOWED):
                warnings.simplefilter("ignore")
                return torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:  # the type depends on the content
            raise ConversionError(refusal(self.name, str(error))) from None


def _read_directory(name: str, stream: BinaryIO) -> dict[int, Record]:
    """Return the entries of the archive by the offset of their data. Check the entries that are not tensors."""
    try:
        size = stream.seek(0, 2)
        stream.seek(0)
        with zipfile.ZipFile(stream) as archive:
            entries, place = archive.infolist(), archive.start_dir
            for entry in entries:
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ConversionError(f"{name} is a compressed archive, which torch.save never writes")
                if "/data/" not in entry.filename:
                    if entry.file_size > LARGEST_ENTRY:
                        size_fault = f"{entry.file_size} bytes; settings and names have at most {LARGEST_ENTRY}"
                        raise ConversionError(f"{name}: {entry.filename} has {size_fault}")
                    data = archive.read(entry)  # checks the CRC-32
                    if entry.filename.endswith("/byteorder") and data != b"little":
                        raise ConversionError(f"{name} was written on a big-endian machine")
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, struct.error) as error:
        raise ConversionError(f"{name} is not a whole file of torch.save (torch 1.6 or later): {error}") from None
    records = {}
    for entry in entries:
        stream.seek(entry.header_offset)
        header = stream.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
            raise ConversionError(f"{name} is damaged: {entry.filename} is not at its offset")
        _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        start = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if start + entry.file_size > size:
            raise ConversionError(f"{name} is cut off: it has {size} bytes of {start + entry.file_size}")
        records[start] = Record(entry.filename, start, entry.file_size, entry.CRC, place)
        place += _DIRECTORY_ENTRY + len(entry.filename.encode()) + len(entry.extra) + len(entry.comment)
    return records


def _crc(stream: BinaryIO, record: Record) -> int:
    crc, left = 0, record.length
    stream.seek(record.start)
    while left and (block := stream.read(min(left, BLOCK))):
        crc, left = zlib.crc32(block, crc), left - len(block)
    return crc


def refusal(name: str, fault: str) -> str:
    """Return the error message for a rejected pickle, with the name of the class or function if that is the reason."""
    found = re.search(r"GLOBAL ([\w.]+)", fault)
    if found:
        return (
            f"{name} contains {found[1]}, which is not in the list of harmless classes; nothing in the file was run. "
            "Save the checkpoint again without it (weights as plain tensors, args as an argparse.Namespace)"
        )
    lines = [line for line in fault.splitlines() if line.strip()]
    reason = next((line.split("message:", 1)[1] for line in lines if "message:" in line), lines[0] if lines else "")
    return f"{name} cannot be read as a file of tensors and settings: {reason.strip()}"


Reserve = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]  # returns a tensor; its elements are written later

_DESCRIPTOR = b"PK\7\x08"  # signature after the data of an entry without a checksum in its header; the checksum follows
_CHECKSUM_IN_ENTRY = 16  # offset of the checksum in an entry of the zip directory


class TorchFileWriter:
    """Write a file for `torch.load`: plain content, and tensors that are filled later, in order, with `fill`.

    `torch.save` under `skip_data` leaves space for the elements. The checksums of the zip archive are written at the end,
    so that the file is a valid archive.

    `path`: replaced if it exists. `content`: called to build the content. Its tensors must all come from the `Reserve`
    argument and have at least one element. A thread computes checksums and writes."""

    def __init__(self, path: Path, content: Callable[[Reserve], Mapping[str, Any]]) -> None:
        dtypes: list[torch.dtype] = []

        def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            dtypes.append(dtype)
            return torch.empty(shape, dtype=dtype)

        with FakeTensorMode():
            saved = content(reserve)
        try:
            # Given a path, torch would report a full disk as a RuntimeError.
            with torch.serialization.skip_data(materialize_fake_tensors=True), path.open("wb") as stream:
                torch.save(dict(saved), stream)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        self._path, self._behind = path, BackgroundWork[None](threads=1, most=2)
        self._file = path.open("r+b", buffering=0)
        with path.open("rb") as written:
            stored = [record for record in _read_directory(str(path), written).values() if "/data/" in record.name]
        # torch numbers storages in the order of saving.
        stored.sort(key=lambda record: int(record.name.rpartition("/")[2]))
        self._left = iter(zip(stored, dtypes, strict=True))
        self._checksums: dict[Record, int] = {}

    def fill(self, weights: Weights, piece: WeightPiece, advance: Callable[[int], None]) -> None:
        """Write the elements of the next reserved tensor, converted to its dtype block by block."""
        record, dtype = next(self._left)
        start = record.start
        for stored in stored_blocks(weights, piece, dtype):
            data = bytes_of(stored)
            self._behind.run(self._write, record, data, start)
            start += len(data)
            advance(len(data))
        assert start == record.start + record.length, (record, start)

    def finish(self) -> None:
        """Write the checksums and sync the file to the disk."""
        self._behind.results()
        for record, crc in self._checksums.items():
            end = record.start + record.length
            assert os.pread(self._file.fileno(), len(_DESCRIPTOR), end) == _DESCRIPTOR
            for place in (end + len(_DESCRIPTOR), record.entry + _CHECKSUM_IN_ENTRY):
                write_at(self._path, self._file.fileno(), memoryview(struct.pack("<I", crc)), place)
        sync_file(self._path, self._file.fileno())

    def _write(self, record: Record, data: memoryview, start: int) -> None:
        write_at(self._path, self._file.fileno(), data, start)
        self._checksums[record] = zlib.crc32(data, self._checksums.get(record, 0))

    def close(self) -> None:
        self._behind.close()
        self._file.close()
