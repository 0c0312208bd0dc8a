"""Files of `torch.save`, read and written a tensor at a time; nothing in them is run.

torch.load does not compare checksums and reads whole storages; torch.save needs all tensors in memory. Here a file is
opened under a FakeTensorMode (`weights_only=True`, listed classes), and elements are read and written where they lie.
"""

import argparse
import contextlib
import io
import os
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megalite.checkpoint.files import BackgroundWork, sync_file, write_at
from megalite.checkpoint.safetensors_file import DTYPE_NAMES, bytes_of
from megalite.config.reading import Span
from megalite.conversion.output import stored_blocks
from megalite.conversion.weights import BLOCK, ConversionError, Piece, Read, Weights, fill


class Inert:
    """What stands for an object that a checkpoint holds and a conversion has no use for: it keeps and does nothing."""

    def __new__(cls, *_args: object) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *_args: object) -> None:
        """Of any arguments."""

    def __setstate__(self, _state: object) -> None:
        """Of any state."""


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
"""For `torch.serialization.safe_globals`, beside what torch allows by itself (tensors, dtypes, OrderedDict).

Only `argparse.Namespace` is real, a bag of attributes. The others (random states, enumerations, the loss scaler of an
optimizer) become `Inert`: their code need not be installed, and is not run where it is.
"""


def open_span(path: Path, start: int = 0, length: int | None = None) -> BinaryIO:
    """Open the bytes [start, start + length) of a file for reading; all of it by default."""
    if length is None:
        return path.open("rb")
    return io.BufferedReader(Span(path.open("rb", buffering=0), start, start + length))


def require_readable(path: Path, name: str, dtype: torch.dtype) -> None:
    """Refuse a weight of whole numbers, and one in a type that has scales elsewhere (fp8 and the like)."""
    if not dtype.is_floating_point:
        raise ConversionError(f"{path}: {name} is of the type {dtype}, not of floating-point numbers")
    if dtype not in DTYPE_NAMES:
        known = ", ".join(str(kind) for kind in DTYPE_NAMES if kind.is_floating_point)
        raise ConversionError(f"{path}: {name} is of the type {dtype}: quantized, not read; save it as {known}")


_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, then lengths of name and extra field

LARGEST_ENTRY = 1 << 30  # bytes of an entry that is no tensor: settings and names take far less

_DIRECTORY_ENTRY = 46  # bytes of an entry in the archive's directory, without name, extra field and comment


@dataclass(frozen=True)
class Record:
    """The bytes of one storage in the file, and its entry in the archive's directory."""

    name: str
    start: int
    length: int
    crc: int
    entry: int


class TorchFile:
    """What `torch.save` wrote: `content` with tensors that have type and shape, and `read` for their elements.

    torch's unpickler with `weights_only=True` builds the content, of `ALLOWED` names and torch's own; under a
    FakeTensorMode it reads no storage, and each says where in the file it is. Elements are read from there and
    compared with the zip archive's CRC-32, which `torch.load` leaves unread.

    The file is opened for each call and closed again: a checkpoint has hundreds of them."""

    def __init__(self, path: Path, start: int = 0, length: int | None = None) -> None:
        self.name = str(path) if length is None else f"{path} (bytes {start} to {start + length})"
        self._span = (path, start, length)
        self._sound: set[int] = set()
        with self._opened() as stream:
            self._records = _read_directory(self.name, stream)
            self.content: Any = self._load(stream)

    def fill(self, place: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy the first elements of a tensor in `content` into a view of one of ours."""
        fill(place, self.reader(tensor, place.numel()))

    def reader(self, tensor: torch.Tensor, count: int) -> Read:
        """`read` for the first `count` elements of a tensor in their order. Where these are a whole storage its checksum is
        taken on the way and compared at the last one, so that it is read once."""
        record, crc, behind = self.record(tensor), 0, 0

        def in_order(start: int, length: int, room: torch.Tensor | None = None) -> torch.Tensor:
            nonlocal crc, behind
            if start != behind or record.start in self._sound or count * tensor.element_size() != record.length:
                return self.read(tensor, start, length, room)
            values = self._elements(tensor, start, length, room)
            crc, behind = zlib.crc32(bytes_of(values), crc), start + length
            if behind == count:
                self._require_sound(record, crc)
            return values

        return in_order

    def read(self, tensor: torch.Tensor, start: int, count: int, room: torch.Tensor | None = None) -> torch.Tensor:
        """`count` elements of a tensor in `content` from the `start`-th on, of one dimension: in `room` if it is of their
        type, else a new one. The first read of a storage compares all of it with its checksum."""
        record = self.record(tensor)
        if count and record.start not in self._sound:
            self._require_sound(record)
        return self._elements(tensor, start, count, room)

    def _require_sound(self, record: Record, crc: int | None = None) -> None:
        """`crc`: of all its bytes, if they have been read already."""
        if crc is None:
            with self._opened() as stream:
                crc = _crc(stream, record)
        # 0: space that torch.serialization.skip_data reserved and somebody filled later.
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
            raise ConversionError(f"{self.name} has a tensor of strides {tensor.stride()}; save contiguous() ones")
        buffer = bytes_of(output)
        with self._opened() as stream:
            stream.seek(record.start + first + start * size)
            if stream.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
                raise ConversionError(f"{self.name} ends in the middle of a tensor")
        return output

    @contextlib.contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            with open_span(*self._span) as stream:
                yield stream
        except OSError as error:
            raise ConversionError(f"{self.name} cannot be read: {error}") from None

    def record(self, tensor: torch.Tensor) -> Record:
        storage = tensor.untyped_storage()
        record = self._records.get(getattr(storage, "_checkpoint_offset", -1))
        if record is None or record.length != storage.nbytes():
            raise ConversionError(f"{self.name} is damaged: a tensor's bytes are not where it says")
        return record

    def _load(self, stream: BinaryIO) -> Any:
        stream.seek(0)
        try:
            with warnings.catch_warnings(), FakeTensorMode(), torch.serialization.safe_globals(ALLOWED):
                warnings.simplefilter("ignore")
                return torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:  # of any type: the content decides what the unpickler stumbles over
            raise ConversionError(refusal(self.name, str(error))) from None


def _read_directory(name: str, stream: BinaryIO) -> dict[int, Record]:
    """Every entry of the archive by where its data start; the small ones are checked here."""
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
                        said = f"{entry.file_size} bytes; settings and names have at most {LARGEST_ENTRY}"
                        raise ConversionError(f"{name}: {entry.filename} has {said}")
                    data = archive.read(entry)  # compared with its CRC-32
                    if entry.filename.endswith("/byteorder") and data != b"little":
                        raise ConversionError(f"{name} was written on a big-endian machine")
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, struct.error) as error:
        raise ConversionError(f"{name} is not a whole file of torch.save (torch 1.6 on): {error}") from None
    records = {}
    for entry in entries:
        stream.seek(entry.header_offset)
        header = stream.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
            raise ConversionError(f"{name} is damaged: {entry.filename} is not where it should be")
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
    """What to say of a pickle that was not read, naming the class or function if that is the reason."""
    found = re.search(r"GLOBAL ([\w.]+)", fault)
    if found:
        return (
            f"{name} contains {found[1]}, which is none of the harmless classes that a checkpoint is made of; nothing in "
            "it was run. Save the checkpoint again without it (weights as plain tensors, args as an argparse.Namespace)"
        )
    lines = [line for line in fault.splitlines() if line.strip()]
    reason = next((line.split("message:", 1)[1] for line in lines if "message:" in line), lines[0] if lines else "")
    return f"{name} cannot be read as a file of tensors and settings: {reason.strip()}"


Reserve = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]  # without elements yet

_DESCRIPTOR = b"PK\7\x08"  # what stands behind the bytes of an entry without a checksum in its header; it comes next
_CHECKSUM_IN_ENTRY = 16  # where the checksum is in an entry of the archive's directory


class TorchFileWriter:
    """A file that `torch.load` reads, made of plain content and the tensors that `fill` brings, in its order.

    `torch.save` under `skip_data` leaves holes where the elements belong. The checksums of the zip archive, which it
    cannot know, are put in at the end, so that the file is one that every unzip finds sound.

    `path`: replaced if it exists. `content`: makes what is to be saved; of tensors only those that it reserves, each
    with elements. A thread takes checksums and writes."""

    def __init__(self, path: Path, content: Callable[[Reserve], Mapping[str, Any]]) -> None:
        dtypes: list[torch.dtype] = []

        def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            dtypes.append(dtype)
            return torch.empty(shape, dtype=dtype)

        with FakeTensorMode():
            saved = content(reserve)
        try:
            # By its path torch would write it itself, and turn a full disk into a RuntimeError.
            with torch.serialization.skip_data(materialize_fake_tensors=True), path.open("wb") as stream:
                torch.save(dict(saved), stream)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        self._path, self._behind = path, BackgroundWork[None](threads=1, most=2)
        self._file = path.open("r+b", buffering=0)
        with path.open("rb") as written:
            stored = [record for record in _read_directory(str(path), written).values() if "/data/" in record.name]
        stored.sort(key=lambda record: int(record.name.rpartition("/")[2]))  # torch counts storages as it comes to them
        self._left = iter(zip(stored, dtypes, strict=True))
        self._checksums: dict[Record, int] = {}

    def fill(self, weights: Weights, piece: Piece, advance: Callable[[int], None]) -> None:
        """Write the elements of the next tensor that was reserved, converted to its type block by block."""
        record, dtype = next(self._left)
        start = record.start
        for stored in stored_blocks(weights, piece, dtype):
            data = bytes_of(stored)
            self._behind.run(self._write, record, data, start)
            start += len(data)
            advance(len(data))
        assert start == record.start + record.length, (record, start)

    def finish(self) -> None:
        """Write the checksums and bring everything to the disk."""
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
