"""Bytes of files and of standard input, decompressed a bounded block at a time."""

import os
import select
import zlib
from collections.abc import Callable, Generator
from threading import Event
from typing import BinaryIO, Literal, Protocol

from megalite.config.errors import ConfigError
from megalite.data.inputs.opening import STDIN, unreadable

Compression = Literal["gz", "zst"]
Blocks = Generator[tuple[bytes, int], None, None]
"""(bytes, how much has been read from the disk so far)"""

_READ_BYTES = 1 << 18
_GZIP_INPUT = 1 << 15
"""deflate makes at most 1032 bytes of one: 32 MiB."""
_ZSTD_INPUT = 1 << 10
"""A zstd block of 4 bytes may stand for 128 KiB: 32 MiB."""
_ZSTD_WINDOW = 1 << 27
_POLL_SECONDS = 0.1


class Stopped(Exception):
    """The reader of these bytes has gone."""


class _Damage(Exception):
    """The compressed bytes are not what they should be."""


class _Member(Protocol):
    """A decoder of one gzip member or zstd frame, as zlib and zstandard have it."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def file_blocks(path: str, file: BinaryIO, compression: Compression | None, stop: Event) -> Blocks:
    """The (decompressed) content of an open file.

    Several gzip members or zstd frames one after the other are one content. Memory is bounded, also for content that
    is compressed many thousandfold.

    Raises:
        ConfigError: the file cannot be read, is damaged, ends early, or zstandard is not installed.
        Stopped: `stop` is set.
    """
    raw = _raw_blocks(file, stop)
    try:
        if compression is None:
            yield from raw
        elif compression == "gz":
            yield from _gzip_blocks(raw)
        else:
            yield from _zstd_blocks(path, raw)
    except (OSError, _Damage) as error:
        raise unreadable(path, error) from None


def pipe_blocks(number: int, stop: Event) -> Blocks:
    """What comes out of a pipe, without ever waiting in a call that cannot be stopped.

    Raises:
        ConfigError: it cannot be read.
        Stopped: `stop` is set.
    """
    total = 0
    try:
        while True:
            while not select.select([number], [], [], _POLL_SECONDS)[0]:
                _go_on(stop)
            _go_on(stop)
            block = os.read(number, _READ_BYTES)
            if not block:
                return
            total += len(block)
            yield block, total
    except OSError as error:
        raise unreadable(STDIN, error) from None


def _go_on(stop: Event) -> None:
    if stop.is_set():
        raise Stopped


def _raw_blocks(file: BinaryIO, stop: Event) -> Blocks:
    total = 0
    while block := file.read(_READ_BYTES):
        _go_on(stop)
        total += len(block)
        yield block, total


def _gzip_blocks(raw: Blocks) -> Blocks:
    try:
        yield from _member_blocks(raw, lambda: zlib.decompressobj(wbits=31), _GZIP_INPUT)
    except zlib.error as error:
        reason = str(error).rpartition(": ")[2]
        raise _Damage(f"as gzip it is damaged ({reason})") from None


def _zstd_blocks(path: str, raw: Blocks) -> Blocks:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            f"{path} needs the package zstandard, which is not installed: pip install 'megalite[data]'"
        ) from None
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    try:
        yield from _member_blocks(raw, lambda: decoder.decompressobj(), _ZSTD_INPUT)
    except zstandard.ZstdError as error:
        if "too much memory" in str(error):
            raise _Damage(
                f"it was compressed with a window above {_ZSTD_WINDOW >> 20} MiB; compress it again with "
                "zstd --long=27 or without --long"
            ) from None
        reason = str(error).rpartition(": ")[2]
        raise _Damage(f"as zstd it is damaged ({reason})") from None


def _member_blocks(raw: Blocks, start_member: Callable[[], _Member], input_bytes: int) -> Blocks:
    """Member after member; `input_bytes` of compressed content at a time."""
    member: _Member | None = None
    one_was_whole = False
    for block, disk in raw:
        for at in range(0, len(block), input_bytes):
            data = block[at : at + input_bytes]
            while data:
                if member is None:
                    # Tools that write whole sectors pad with zeros.
                    data = data.lstrip(b"\0") if one_was_whole else data
                    if not data:
                        break
                    member = start_member()
                content = member.decompress(data)
                if content:
                    yield content, disk
                data = member.unused_data if member.eof else b""
                if member.eof:
                    member, one_was_whole = None, True
    if member is not None:
        raise _Damage("it ends in the middle of its compressed content (a download that broke off?)")
