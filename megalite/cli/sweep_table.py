"""The table of a sweep: in place on a terminal while it runs, and as plain lines elsewhere."""

import shutil
from collections.abc import Mapping, Sequence
from typing import TextIO

from megalite.config.byte_size import format_bytes
from megalite.sweep.candidates import Run
from megalite.sweep.execute import Progress
from megalite.sweep.results import Result

_HEAD = ("configuration", "ranks", "predicted", "measured", "tokens/s", "memory", "status")
_WIDEST_LABEL, _WIDEST_STATUS = 60, 60
_ABOVE_BELOW = 4
"""Lines of a terminal that the table leaves free."""


def format_table(
    runs: Sequence[Run], results: Mapping[str, Result], progress: Sequence[Progress] = (), steps: int = 0
) -> list[str]:
    """A head and a line for each run; columns as wide as they need."""
    under_way = {each.run.key: each for each in progress}
    rows = [_HEAD] + [_row(run, results.get(run.key), under_way.get(run.key), steps) for run in runs]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return [
        "  ".join(
            cell.ljust(width) if column in (0, len(_HEAD) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def _row(run: Run, result: Result | None, progress: Progress | None, steps: int) -> tuple[str, ...]:
    """The measured memory where there is any, else the predicted one of the fullest rank, with a ~ before it."""
    predicted, memory = "", ""
    if run.predicted is not None:
        predicted = _seconds(run.predicted.step_seconds)
        memory = "~" + format_bytes(run.predicted.memory_bytes)
    if result is not None and result.memory_bytes and progress is None:
        memory = format_bytes(result.memory_bytes)
    shown = None if progress is not None else result
    return (
        _cut(run.label, _WIDEST_LABEL),
        str(run.ranks),
        predicted,
        _seconds(shown.step_seconds if shown else None),
        f"{shown.tokens_per_second:.0f}" if shown and shown.tokens_per_second else "",
        memory,
        _cut(_status(run, shown, progress, steps), _WIDEST_STATUS),
    )


def _status(run: Run, result: Result | None, progress: Progress | None, steps: int) -> str:
    if progress is not None:
        return f"step {progress.steps}/{steps}, {progress.seconds:.0f} s"
    if run.refused is not None:
        return f"refused: {run.refused}"
    if result is None:
        return "waiting"
    return result.status if result.error is None else f"{result.status}: {result.error}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g} s" if value >= 1.0 else f"{1e3 * value:.3g} ms"


class LiveTable:
    """Shows how a sweep goes on.

    Args:
        runs: all of the sweep.
        results: as they stand; whoever calls `update` has put the new ones in.
        steps: of each run.
        out: where to; a terminal gets the table itself, drawn over and over, everything else a line for each result.
    """

    def __init__(self, runs: Sequence[Run], results: Mapping[str, Result], *, steps: int, out: TextIO) -> None:
        self._runs = runs
        self._results = results
        self._steps = steps
        self._out = out
        self._shown: list[str] = []
        self._number = {run.key: number for number, run in enumerate(runs, 1)}
        self._by_key = {run.key: run for run in runs}

    def update(self, progress: Sequence[Progress], result: Result | None) -> None:
        """Show what is under way, and a new result."""
        if self._out.isatty():
            self._draw(progress)
        elif result is not None:
            self._line(result)

    def _line(self, result: Result) -> None:
        run = self._by_key[result.key]
        measured = ""
        if result.step_seconds is not None and result.tokens_per_second is not None:
            measured = f" {_seconds(result.step_seconds)} a step, {result.tokens_per_second:.0f} tokens/s"
            if run.predicted is not None and run.predicted.step_seconds is not None:
                measured += f", predicted {_seconds(run.predicted.step_seconds)}"
        why = f" ({result.error})" if result.error else ""
        number = f"{self._number[run.key]}/{len(self._runs)}"
        print(f"{number} {run.label}: {result.status}{measured}{why}", file=self._out, flush=True)

    def _draw(self, progress: Sequence[Progress]) -> None:
        columns, height = shutil.get_terminal_size()
        head, *rows = format_table(self._runs, self._results, progress, self._steps)
        active = {each.run.key for each in progress}
        # Of a sweep longer than the screen, what is around the run under way.
        at = next((index for index, run in enumerate(self._runs) if run.key in active), len(rows))
        room = max(height - _ABOVE_BELOW, 1)
        first = min(max(at - room // 2, 0), max(len(rows) - room, 0))
        lines = [line[: columns - 1] for line in (head, *rows[first : first + room])]
        if lines == self._shown:
            return
        up = f"\x1b[{len(self._shown)}A" if self._shown else ""
        print(up + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[J", end="", file=self._out, flush=True)
        self._shown = lines
