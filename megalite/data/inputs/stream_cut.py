"""Streams of bytes cut into stretches that hold their content."""

import hashlib
import re
from collections.abc import Iterator

from megalite.data.inputs.opening import changed
from megalite.data.inputs.places import Limits, Place, Stretch
from megalite.data.inputs.plain import SEPARATOR_BYTES, SLACK, find_end
from megalite.data.inputs.streams import Blocks


class Stream:
    """A stream of bytes, cut where plain.cut_plain would cut the same content.

    At most piece_bytes + max_document_bytes and some blocks are held.

    Args:
        path: its name, for messages.
        blocks: its content from the beginning.
        digest: keep a running sha256 of the content, for a stream that cannot be told by its file.
    """

    def __init__(self, path: str, blocks: Blocks, limits: Limits, *, digest: bool) -> None:
        self._path = path
        self._blocks = blocks
        self._limits = limits
        self._running = hashlib.sha256() if digest else None
        self._held = bytearray()
        self._start = 0
        """Of the stretch whose beginning is held."""
        self._gone = 0
        """Bytes of this stretch that are no longer held: a part of a document that is too long."""
        self._gone_lines = 0
        """Line ends among these."""
        self._hashed = 0
        """Bytes of what is held that have gone into the running hash."""
        self._disk_bytes = 0

    def head(self, count: int) -> bytes:
        """The first `count` bytes, fewer if there are fewer. Nothing has been taken yet."""
        while len(self._held) < count and self._more():
            pass
        return bytes(self._held[:count])

    def skip(self, place: Place) -> None:
        """Go on at a place.

        Raises:
            ConfigError: no stretch can have ended there, or (standard input) what came before is not what it was.
        """
        last = b"\n"
        left = place.offset
        while left > len(self._held):
            left -= len(self._held)
            last = bytes(self._held[-1:]) or last
            self._drop(len(self._held))
            if not self._more():
                raise changed(self._path, f"it ends {left} bytes before the place to go on at")
        last = bytes(self._held[:left][-1:]) or last
        self._drop(left)
        if last != b"\n" and (self._held or self._more()):
            raise changed(self._path, f"byte {place.offset} is not the beginning of a line any more")
        if self._running and place.digest and self._running.hexdigest() != place.digest:
            raise changed(self._path, f"its first {place.offset} bytes are not those that were read before")

    def cut(self, separator: re.Pattern[bytes]) -> Iterator[Stretch]:
        """The rest, each stretch to the first separator that ends `piece_bytes` behind its start or later."""
        nominal = self._limits.piece_bytes
        head = nominal + SLACK
        look_from = first_look = max(0, nominal - SEPARATOR_BYTES)
        while True:
            end = find_end(separator, self._held, look_from, nominal)
            if end is not None:
                yield self._take(end)
                look_from = first_look
                continue
            look_from = max(first_look, len(self._held) - SEPARATOR_BYTES + 1)
            if len(self._held) > head + self._limits.max_document_bytes:
                self._thin_out(head, look_from)
                look_from = head
            if not self._more():
                break
        if self._held:
            yield self._take(len(self._held))

    def whole(self) -> Iterator[Stretch]:
        """All of it as one stretch; nothing of it is kept if it is too long."""
        while self._more():
            if self._gone + len(self._held) > self._limits.max_document_bytes:
                self._thin_out(0, len(self._held))
        length = self._gone + len(self._held)
        content = bytes(self._held)
        yield Stretch(start=0, stop=length, kept=len(content), content=content, disk_bytes=self._disk_bytes)

    def _more(self) -> bool:
        """Hold one more block; false at the end."""
        content, self._disk_bytes = next(self._blocks, (b"", self._disk_bytes))
        self._held += content
        return bool(content)

    def _drop(self, count: int) -> None:
        if self._running:
            self._running.update(self._held[self._hashed : count])
        del self._held[:count]
        self._start += count
        self._hashed = 0

    def _thin_out(self, start: int, stop: int) -> None:
        """Let go of bytes inside a document that is too long."""
        if self._running:
            self._running.update(self._held[self._hashed : stop])
        self._hashed = start
        self._gone += stop - start
        self._gone_lines += self._held.count(b"\n", start, stop)
        del self._held[start:stop]

    def _take(self, end: int) -> Stretch:
        head, length = self._limits.piece_bytes + SLACK, self._gone + end
        kept = head if length > head + self._limits.max_document_bytes else length
        content = bytes(self._held[:kept])
        dropped_lines = self._gone_lines + self._held.count(b"\n", len(content), end)
        start = self._start
        self._drop(end)
        self._start += self._gone
        self._gone = self._gone_lines = 0
        return Stretch(
            start=start,
            stop=start + length,
            kept=kept,
            dropped_lines=dropped_lines,
            content=content,
            disk_bytes=self._disk_bytes,
            digest=self._running.hexdigest() if self._running else "",
        )
