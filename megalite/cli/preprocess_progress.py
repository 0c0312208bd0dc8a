"""Progress of preprocessing on stderr."""

import shutil
import sys
import time
from collections import deque

from megalite.cli.byte_progress import decimal_bytes
from megalite.cli.output import tell
from megalite.preprocess.job import Progress

_TTY_SECONDS = 0.2
_LOG_SECONDS = 5.0
_WINDOW_SECONDS = 15.0
_CLEAR_REST = "\x1b[K"


class ProgressLine:
    """Totals and rates: one line rewritten on a terminal, a line every few seconds elsewhere.

    Rates are those of the last seconds, and never count what an earlier run had done.
    """

    def __init__(self) -> None:
        self._start = self._shown = time.monotonic()
        self._is_tty = _stderr_is_terminal()
        self._is_open = False
        self._recent: deque[tuple[float, int, int, int, int]] = deque()
        self._has_noticed = False

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def update(self, progress: Progress) -> None:
        """Show the totals if it is time to."""
        now = time.monotonic()
        self.notice(progress)
        if self._recent and now - self._shown < (_TTY_SECONDS if self._is_tty else _LOG_SECONDS):
            return
        done = (progress.documents, progress.tokens, progress.input_bytes, progress.disk_bytes)
        self._recent.append((now, *done))
        while len(self._recent) > 2 and now - self._recent[0][0] > _WINDOW_SECONDS:
            self._recent.popleft()
        if len(self._recent) > 1:
            self._shown = now
            self._show(progress)

    def notice(self, progress: Progress) -> None:
        """Say, once, what became of an earlier run's work."""
        if progress.notice and not self._has_noticed:
            tell(progress.notice)
        self._has_noticed = True

    def text(self, progress: Progress, width: int | None = None) -> str:
        """` 45 %, 1,200 documents (300/s), 90,000 tokens (20,000/s), 1.2 GB (3.1 MB/s), 2 bad lines, 0:12 left`, of at most `width` characters.

        Where they do not fit, the rates go first, then the bytes, then what is last.
        """
        seconds = max(self._recent[-1][0] - self._recent[0][0], 1e-9)
        documents, tokens, text, disk = (
            (new - old) / seconds for new, old in zip(self._recent[-1][1:], self._recent[0][1:], strict=True)
        )
        totals = [
            (f"{progress.documents:,} documents", f" ({documents:,.0f}/s)"),
            (f"{progress.tokens:,} tokens", f" ({tokens:,.0f}/s)"),
            (decimal_bytes(progress.input_bytes), f" ({text / 1e6:.1f} MB/s)"),
        ]
        before, after = [], []
        if progress.bad_lines:
            after.append(f"{progress.bad_lines:,} bad lines")
        if progress.disk_total:
            before.append(f"{min(100 * progress.disk_bytes // progress.disk_total, 100):3d} %")
            if disk > 0:
                after.append(f"{_clock(max(progress.disk_total - progress.disk_bytes, 0) / disk)} left")
        bare = [total for total, _ in totals]
        for middle in ([total + rate for total, rate in totals], bare, bare[:-1]):
            line = ", ".join([*before, *middle, *after])
            if width is None or len(line) <= width:
                break
        return line[:width]

    def end(self) -> None:
        """Leave the line."""
        if self._is_open:
            tell("")
        self._is_open = False

    def _show(self, progress: Progress) -> None:
        if self._is_tty:
            # A terminal that is full to its last column goes to the next line.
            width = max(shutil.get_terminal_size().columns - 1, 1)
            tell(f"\r{self.text(progress, width)}{_CLEAR_REST}", end="")
            self._is_open = True
        else:
            tell(self.text(progress))


def _stderr_is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False


def summary(progress: Progress, seconds: float) -> str:
    """What a finished run did; rates are of this run alone."""
    documents, tokens = progress.documents - progress.kept_documents, progress.tokens - progress.kept_tokens
    text, seconds = progress.input_bytes - progress.kept_bytes, max(seconds, 1e-9)
    return (
        f"{progress.documents:,} documents, {progress.tokens:,} tokens "
        f"({progress.tokens / max(progress.documents, 1):,.1f} a document) from {decimal_bytes(progress.input_bytes)} of text "
        f"in {seconds:.1f} s: {documents / seconds:,.0f} documents/s, {tokens / seconds:,.0f} tokens/s, "
        f"{text / 1e6 / seconds:.1f} MB/s; {decimal_bytes(progress.output_bytes)} written"
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
