"""A file of `torch.save`, written a tensor at a time: space is reserved first and filled in any order."""

import os
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megalite.conversion.megatron.torch_file import BLOCK, Record, TorchFile
from megalite.conversion.stream import refuse_overflow

Reserve = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""A tensor of a shape and type that has no elements yet."""

_DESCRIPTOR = b"PK\7\x08"
"""What stands behind the bytes of an entry whose header has no checksum; it comes next."""
_CHECKSUM_IN_ENTRY = 16
"""Where the checksum is in an entry of the archive's directory."""


class TorchFileWriter:
    """A file that `torch.load` reads, made of plain content and the tensors that `fill` brings one after the other.

    `torch.save` under `skip_data` leaves holes where the elements belong. The checksums of the zip archive, which it
    cannot know, are put in at the end, so that the file is one that every unzip finds sound.

    Args:
        path: replaced if it exists.
        content: makes what is to be saved; of tensors only those that it reserves, each with elements.

    Raises:
        OSError: here and from `fill` and `finish`: disk full, no permission, ...
    """

    def __init__(self, path: Path, content: Callable[[Reserve], Mapping[str, Any]]) -> None:
        with FakeTensorMode():
            saved = content(lambda shape, dtype: torch.empty(shape, dtype=dtype))
        try:
            # By its path torch would write it itself, and turn a full disk into a RuntimeError.
            with torch.serialization.skip_data(materialize_fake_tensors=True), path.open("wb") as stream:
                torch.save(dict(saved), stream)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        self._file: BinaryIO = path.open("r+b")
        self._reserved = TorchFile(path)
        self.content: Any = self._reserved.content
        """What a reader will find; `fill` takes its tensors."""
        self._checksums: list[tuple[Record, int]] = []

    def fill(
        self, name: str, place: torch.Tensor, values: torch.Tensor, advance: Callable[[int], None]
    ) -> None:
        """Write the elements of a tensor in `content`, converted to its type block by block.

        Args:
            name: of the tensor of ours that they come from, for messages.

        Raises:
            ConversionError: a value is too large for that type.
        """
        assert values.shape == place.shape, (values.shape, place.shape)
        record = self._reserved.record(place)
        self._file.seek(record.start)
        flat, crc = values.reshape(-1), 0
        for block in flat.split(BLOCK // place.element_size()):
            stored = block.to(place.dtype).contiguous()
            refuse_overflow(name, block, stored)
            data = stored.view(torch.uint8).numpy().data
            crc = zlib.crc32(data, crc)
            self._file.write(data)
            advance(len(data))
        self._checksums.append((record, crc))

    def finish(self) -> None:
        """Write the checksums and bring everything to the disk."""
        for record, crc in self._checksums:
            end = record.start + record.length
            self._file.seek(end)
            assert self._file.read(len(_DESCRIPTOR)) == _DESCRIPTOR
            for place in (end + len(_DESCRIPTOR), record.entry + _CHECKSUM_IN_ENTRY):
                self._file.seek(place)
                self._file.write(struct.pack("<I", crc))
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> "TorchFileWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
