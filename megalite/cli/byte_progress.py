"""How far bytes have got, on stderr: a bar on a terminal, a line at each tenth elsewhere if it takes long enough."""

import sys
import time
from collections import deque

_SECONDS = 0.1
_SHORT_SECONDS = 2.0
"""What is done sooner needs no lines."""
_WINDOW_SECONDS = 10.0
_BAR = 28


class ByteProgress:
    """Progress of `total` bytes, which may be an estimate; `advance` is called with the bytes just done.

    The rate is that of the last seconds, so that what an earlier run had done does not count.
    """

    def __init__(self, total: int) -> None:
        self._total = max(total, 1)
        self._is_tty = sys.stderr.isatty()
        self._start = self._shown = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque([(self._start, 0)])
        self._tenths = self._width = 0
        self.done = 0

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def advance(self, count: int) -> None:
        """So many more bytes are done."""
        self.done += count
        now = time.monotonic()
        self._recent.append((now, self.done))
        while len(self._recent) > 2 and now - self._recent[0][0] > _WINDOW_SECONDS:
            self._recent.popleft()
        if self._is_tty:
            if now - self._shown >= _SECONDS:
                self._shown = now
                self._rewrite()
            return
        tenths = min(10 * self.done // self._total, 10)
        if tenths > self._tenths and now - self._start >= _SHORT_SECONDS:
            self._tenths = tenths
            print(self.text(), file=sys.stderr, flush=True)

    def text(self) -> str:
        """` 45 %  1.2 of 2.7 GB  310 MB/s  0:12 left`."""
        (since, before), (now, done) = self._recent[0], self._recent[-1]
        rate = (done - before) / max(now - since, 1e-9)
        left = max(self._total - done, 0) / rate if rate else 0.0
        share = min(100 * done // self._total, 100)
        clock = f"{int(left) // 60}:{int(left) % 60:02d}"
        return f"{share:3d} %  {decimal_bytes(done)} of {decimal_bytes(max(self._total, done))}  {rate / 1e6:,.0f} MB/s  {clock} left"

    def end(self) -> None:
        """Leave the line of the bar."""
        if self._is_tty:
            self._rewrite()
            print(file=sys.stderr)

    def _rewrite(self) -> None:
        filled = min(_BAR * self.done // self._total, _BAR)
        text = f"[{'#' * filled}{'.' * (_BAR - filled)}] {self.text()}"
        print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
        self._width = len(text)


def decimal_bytes(count: float) -> str:
    """`1.2 GB`, in powers of 1000 as disks are sold."""
    units = ["bytes", "KB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.0f} bytes" if units[0] == "bytes" else f"{count:.1f} {units[0]}"
