"""Plain files cut by looking only at where each stretch ends."""

import os
import re
from collections.abc import Iterator
from typing import BinaryIO

from megalite.data.inputs.opening import changed, unreadable
from megalite.data.inputs.places import Limits, Stretch

LINE_END = re.compile(rb"\n")
PARAGRAPH_END = re.compile(rb"\n\r?\n")
SEPARATOR_BYTES = 3
"""The longest of them."""
SLACK = 8
"""More than the line ends around a document; with them it may be longer than max_document_bytes by that much."""
_FIRST_LOOK, _LOOK = 1 << 13, 1 << 20


def cut_plain(
    path: str, file: BinaryIO, size: int, separator: re.Pattern[bytes], limits: Limits, start: int
) -> Iterator[Stretch]:
    """Stretches of an open file from byte `start` on, each to the first separator that ends `piece_bytes` behind its
    start or later: a separator that ends sooner is inside the stretch, none is cut in two. Which bytes are looked at depends on nothing else, so that cutting can go on at any stretch.

    Where that is more than `max_document_bytes` further, the document there is too long: the stretch covers it, but only
    its beginning is kept.

    Raises:
        ConfigError: the file cannot be read, or has become shorter.
    """
    while start < size:
        nominal = min(start + limits.piece_bytes, size)
        stop = nominal if nominal == size else _next_end(path, file, size, separator, start, nominal)
        kept = stop
        lines = 0
        if stop - nominal > limits.max_document_bytes + SLACK:
            kept = nominal + SLACK
            # Only of a paragraph is it not plain how many lines the part has that is not kept.
            lines = _count_lines(path, file, kept, stop) if separator is PARAGRAPH_END else 0
        yield Stretch(start=start, stop=stop, kept=kept - start, dropped_lines=lines, disk_bytes=stop)
        start = stop


def find_end(
    separator: re.Pattern[bytes], content: bytes | bytearray, look_from: int, least: int
) -> int | None:
    """Where the first separator ends that starts at `look_from` or later and ends at `least` or later."""
    while found := separator.search(content, look_from):
        if found.end() >= least:
            return found.end()
        look_from = found.start() + 1
    return None


def _next_end(
    path: str, file: BinaryIO, size: int, separator: re.Pattern[bytes], start: int, nominal: int
) -> int:
    """Where the first separator behind `start` ends that ends at byte `nominal` or later; the size of the file if there
    is none."""
    at, look = max(start, nominal - SEPARATOR_BYTES), _FIRST_LOOK
    while at < size:
        block = read_at(path, file, at, min(look, size - at))
        end = find_end(separator, block, 0, nominal - at)
        if end is not None:
            return at + end
        # What is at the end may be the beginning of a separator, unless the file ends there.
        at += len(block)
        at -= 0 if at == size else SEPARATOR_BYTES - 1
        look = _LOOK
    return size


def _count_lines(path: str, file: BinaryIO, start: int, stop: int) -> int:
    return sum(
        read_at(path, file, at, min(_LOOK, stop - at)).count(b"\n") for at in range(start, stop, _LOOK)
    )


def read_at(path: str, file: BinaryIO, start: int, count: int) -> bytes:
    """`count` bytes from `start` on.

    Raises:
        ConfigError: they cannot be read, or the file ends before.
    """
    parts = []
    while count:
        try:
            part = os.pread(file.fileno(), count, start)
        except OSError as error:
            raise unreadable(path, error) from None
        if not part:
            raise changed(path, f"it ends at byte {start}, {count} bytes earlier than expected")
        parts.append(part)
        start += len(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
