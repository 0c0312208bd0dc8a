"""Format tables, and show the progress of commands."""

import itertools
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from megalite.cli.output import is_terminal, notify, visible
from megalite.config.numbers import decimal_bytes

_TERMINAL_SECONDS, _LOG_SECONDS, _WINDOW_SECONDS = 0.1, 60.0, 10.0
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # a whole component of a tensor's name


def table(rows: Sequence[Sequence[str]], right: Collection[int] = (), *, indent: int = 0) -> list[str]:
    """Return lines with aligned columns. `right`: indices of right-aligned columns."""
    if not rows:
        return []
    # Not by rich: its grid takes seconds for a thousand rows.
    cells = [[visible(cell).replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in itertools.zip_longest(*cells, fillvalue="")]

    def padded(column: int, text: str) -> str:
        room = " " * (widths[column] - cell_len(text))
        return room + text if column in right else text + room

    lines = ("  ".join(itertools.starmap(padded, enumerate(row))) for row in cells)
    return [" " * indent + line.rstrip() for line in lines]


def folded(names: Iterable[str], number: re.Pattern[str] = NUMBER) -> list[tuple[str, list[str]]]:
    """Group names that differ only in numbers: return (pattern such as `layers.{0..31}.weight`, names)."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        groups.setdefault(tuple(number.split(name)), []).append(name)
    found = []
    for texts, members in groups.items():
        columns = zip(*(number.findall(name) for name in members))
        ranges = [number_ranges(sorted(set(column), key=int), "..") for column in columns]
        ranges = [span if span.isdecimal() else f"{{{span}}}" for span in ranges]
        pattern = "".join(text + span for text, span in zip(texts, [*ranges, ""], strict=True))
        found.append((pattern, members))
    return found


def number_ranges(numbers: Iterable[str], to: str) -> str:
    """Return ascending numbers as `0-3,8`, here with `to` "-"."""
    runs: list[list[str]] = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}{to}{run[-1]}" for run in runs)


def short(value: object) -> str:
    """Return a value as text, truncated to 60 characters."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def clock(seconds: float) -> str:
    """Return `0:12` or `1:02:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Redrawn:
    """Text that is redrawn in place on a terminal. Without a terminal nothing is printed."""

    def __init__(self, out: TextIO | None = None, *, stays: bool = True) -> None:
        self._shows = is_terminal(sys.stderr if out is None else out)
        self._console, self._stays = Console(file=out, stderr=out is None, highlight=False), stays
        self._live: Live | None = None

    def show(self, text: str) -> None:
        if not self._shows:
            return
        if self._live is None:  # auto_refresh starts a thread, which is unsafe with forked workers
            self._live = Live(console=self._console, auto_refresh=False, transient=not self._stays)
            self._live.start()
        self._live.update(Text(visible(text), no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show a text on a terminal while the body runs; yield a function that replaces the text."""
    with closing(Redrawn(stays=False)) as line:
        line.show(f"{text} ...")
        yield line.show


class ProgressLine:
    """Shows progress on stderr: a bar on a terminal, otherwise a line per minute.

    Rates cover the last 10 seconds and exclude the work of an earlier run."""

    def __init__(self) -> None:
        self._start = self._shown = time.monotonic()
        self._recent: deque[tuple[float, ...]] = deque()
        self._bar: Progress | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def update(
        self, done: int, total: int | None, amounts: Sequence[int], text: Callable[[Sequence[float]], str]
    ) -> None:
        """Show the progress if the interval has passed. `total`: final value of `done`, None if unknown. `amounts`:
        counters; `text` receives their rates per second."""
        now = time.monotonic()
        draws = is_terminal(sys.stderr)
        if self._recent and now - self._shown < (_TERMINAL_SECONDS if draws else _LOG_SECONDS):
            return
        self._recent.append((now, done, *amounts))
        while len(self._recent) > 2 and now - self._recent[0][0] > _WINDOW_SECONDS:
            self._recent.popleft()
        if len(self._recent) < 2:
            return
        self._shown = now
        seconds, *grown = (new - old for new, old in zip(self._recent[-1], self._recent[0], strict=True))
        speed, *rates = (each / max(seconds, 1e-9) for each in grown)
        parts = [text(rates)]
        if total and speed > 0:
            parts.append(f"{clock(max(total - done, 0) / speed)} left")
        if draws:
            self._draw(done, total, ", ".join(parts))
        else:
            share = [f"{min(100 * done // total, 100):3d} %"] if total else []
            notify(", ".join([*share, *parts]))

    def _draw(self, done: int, total: int | None, text: str) -> None:
        if self._bar is None:
            console = Console(stderr=True, highlight=False)
            columns = (BarColumn(20), TaskProgressColumn(), TextColumn("{task.description}", markup=False))
            self._bar = Progress(*columns, console=console, auto_refresh=False)
            self._bar.start()
            self._bar.add_task("")
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, description=text)
        self._bar.refresh()

    def close(self) -> None:
        """End the bar, before other output."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class ByteProgress(ProgressLine):
    """Progress in bytes. `total` may be an estimate."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self._total = max(total, 1)
        self.done = 0
        self.update(0, self._total, (0,), self._text)

    def advance(self, count: int) -> None:
        self.done += count
        self.update(self.done, self._total, (self.done,), self._text)

    def _text(self, rates: Sequence[float]) -> str:
        return (
            f"{decimal_bytes(self.done)} of {decimal_bytes(max(self._total, self.done))} ({decimal_bytes(rates[0])}/s)"
        )
