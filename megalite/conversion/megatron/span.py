"""A part of a file as a file of its own."""

import io
from pathlib import Path
from typing import BinaryIO


def open_span(path: Path, start: int = 0, length: int | None = None) -> BinaryIO:
    """Open the bytes [start, start + length) of a file for reading; all of it by default."""
    if length is None:
        return path.open("rb")
    return io.BufferedReader(_Span(path, start, length))


class _Span(io.RawIOBase):
    def __init__(self, path: Path, start: int, length: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._start, self._length, self._place = start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), max(0, self._length - self._place))
        self._file.seek(self._start + self._place)
        count = self._file.readinto(memoryview(buffer)[:wanted])
        self._place += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
