"""A file of `torch.save`, opened without running anything in it and read a tensor at a time."""

import re
import struct
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megalite.conversion.megatron.safe_globals import ALLOWED
from megalite.conversion.megatron.span import open_span
from megalite.conversion.weights import ConversionError

BLOCK = 1 << 24
"""Bytes checked or written at a time."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of a zip entry: signature, then the lengths of name and extra field, behind which the data start."""

LARGEST_ENTRY = 1 << 30
"""Bytes of an entry of the archive that is no tensor: what torch.save makes of the settings and names is far less."""

_DIRECTORY_ENTRY = 46
"""Bytes of an entry in the archive's directory, without name, extra field and comment."""


@dataclass(frozen=True)
class Record:
    """The bytes of one storage in the file, and its entry in the archive's directory."""

    start: int
    length: int
    crc: int
    entry: int


class TorchFile:
    """What `torch.save` wrote: `content` with tensors that have type and shape, and `read` for their elements.

    torch's unpickler with `weights_only=True` builds the content, of `ALLOWED` names and torch's own; under a
    FakeTensorMode it reads no storage, and each tells where in the file it is. Elements are read from there and
    compared with the zip archive's CRC-32, which `torch.load` leaves unread.

    The file is opened for each call and closed again: a checkpoint has hundreds of them.

    Args:
        start, length: the bytes of the file that are meant; default all.

    Raises:
        ConversionError: not a file of `torch.save`, cut off, damaged, or one that holds an object of another class
            than tensors and settings are made of; it is named.
    """

    def __init__(self, path: Path, start: int = 0, length: int | None = None) -> None:
        self.name = str(path) if length is None else f"{path} (bytes {start} to {start + length})"
        self._span = (path, start, length)
        self._sound: set[int] = set()
        try:
            with open_span(*self._span) as stream:
                self._records = self._read_directory(stream)
                self.content: Any = self._load(stream)
        except OSError as error:
            raise ConversionError(f"{self.name} cannot be read: {error}") from None

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor in `content`: a new contiguous one on the CPU.

        Raises:
            ConversionError: its bytes lie outside of the file, are damaged, or not in one piece.
        """
        length = tensor.numel() * tensor.element_size()
        if length == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        record, first = self.record(tensor), int(tensor.storage_offset()) * tensor.element_size()
        if first + length > record.length:
            raise ConversionError(f"{self.name} is damaged: a tensor is longer than its bytes")
        if not tensor.is_contiguous():
            raise ConversionError(
                f"{self.name} holds a tensor {list(tensor.shape)} with strides {list(tensor.stride())}; save it "
                "again with contiguous() tensors"
            )
        output = torch.empty(tensor.shape, dtype=tensor.dtype)
        buffer = output.view(-1).view(torch.uint8).numpy().data
        try:
            with open_span(*self._span) as stream:
                stream.seek(record.start + first)
                if stream.readinto(buffer) != length:  # type: ignore[attr-defined]
                    raise ConversionError(f"{self.name} ends in the middle of a tensor")
                if length == record.length:
                    self._compare(record, zlib.crc32(buffer))
                elif record.start not in self._sound:  # one of many views of a buffer: all of it once
                    self._compare(record, _crc(stream, record))
        except OSError as error:
            raise ConversionError(f"{self.name} cannot be read: {error}") from None
        self._sound.add(record.start)
        return output

    def record(self, tensor: torch.Tensor) -> Record:
        """Where the storage of a tensor in `content` is.

        Raises:
            ConversionError: nowhere.
        """
        storage = tensor.untyped_storage()
        record = self._records.get(getattr(storage, "_checkpoint_offset", -1))
        if record is None or record.length != storage.nbytes():
            raise ConversionError(f"{self.name} is damaged: a tensor's bytes are not where it says")
        return record

    def _compare(self, record: Record, crc: int) -> None:
        # 0: space that torch.serialization.skip_data reserved and somebody filled later.
        if record.crc not in (0, crc):
            raise ConversionError(
                f"{self.name} is damaged: the checksum of the {record.length} bytes from {record.start} on is "
                f"{crc:08x} and not {record.crc:08x}; take another copy of the file"
            )

    def _read_directory(self, stream: BinaryIO) -> dict[int, Record]:
        """Every entry of the archive by where its data start; the small ones are checked here."""
        try:
            size = stream.seek(0, 2)
            stream.seek(0)
            with zipfile.ZipFile(stream) as archive:
                entries, place = archive.infolist(), archive.start_dir
                for entry in entries:
                    if entry.compress_type != zipfile.ZIP_STORED:
                        raise ConversionError(
                            f"{self.name} is a compressed archive, which torch.save never writes"
                        )
                    if "/data/" not in entry.filename:
                        if entry.file_size > LARGEST_ENTRY:
                            raise ConversionError(
                                f"{self.name}: {entry.filename} has {entry.file_size} bytes; settings and names have at "
                                f"most {LARGEST_ENTRY}"
                            )
                        data = archive.read(entry)  # compared with its CRC-32
                        if entry.filename.endswith("/byteorder") and data != b"little":
                            raise ConversionError(f"{self.name} was written on a big-endian machine")
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, struct.error) as error:
            raise ConversionError(
                f"{self.name} is not a whole file of torch.save ({error}); files of torch before 1.6 must be loaded "
                "and saved again by a newer torch first"
            ) from None
        records = {}
        for entry in entries:
            stream.seek(entry.header_offset)
            header = stream.read(_LOCAL_HEADER.size)
            if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
                raise ConversionError(
                    f"{self.name} is damaged: no entry of the archive where {entry.filename} should be"
                )
            _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
            start = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            if start + entry.file_size > size:
                raise ConversionError(
                    f"{self.name} is cut off: it has {size} bytes of {start + entry.file_size}"
                )
            records[start] = Record(start, entry.file_size, entry.CRC, place)
            place += _DIRECTORY_ENTRY + len(entry.filename.encode()) + len(entry.extra) + len(entry.comment)
        return records

    def _load(self, stream: BinaryIO) -> Any:
        stream.seek(0)
        try:
            with warnings.catch_warnings(), FakeTensorMode(), torch.serialization.safe_globals(ALLOWED):
                warnings.simplefilter("ignore")
                return torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:  # of any type: the content decides what the unpickler stumbles over
            raise ConversionError(refusal(self.name, str(error))) from None


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
    reason = next(
        (line.split("message:", 1)[1] for line in lines if "message:" in line), lines[0] if lines else ""
    )
    return f"{name} cannot be read as a file of tensors and settings: {reason.strip()}"
