"""`megalite runs DIR`: the runs below a folder, how they stand, and their curves side by side."""

import dataclasses
import math
import time
from argparse import Namespace
from collections.abc import Sequence

from megalite.checkpoint.files import replace_durably
from megalite.cli.display import table
from megalite.cli.output import json_text, show
from megalite.cli.plot import plot_runs, save
from megalite.cli.run_folders import RunFolder, find_runs
from megalite.cli.tool_commands import RUNS
from megalite.config.errors import ConfigError
from megalite.planner.page import Line, Row, Section, Table, draw_curves, key, page

_HEADS = ("run", "status", "layout", "ranks", "step", "loss", "valid loss", "tokens/s", "goodput", "starts", "started")
_NUMBERS = range(3, 10)  # columns of numbers

main = RUNS


def run(flags: Namespace) -> int:
    runs = find_runs(flags.folder)
    title = f"Runs in {flags.folder}"
    if flags.html is not None:
        try:
            replace_durably(flags.html, _page(runs, title).encode())
        except OSError as error:
            reason = f"{error.strerror}; give --html a file in a folder that exists"
            raise ConfigError(f"cannot write {flags.html}: {reason}") from None
    if flags.png is not None:
        save(plot_runs(runs, title), flags.png, "--png")
    if flags.json:
        show(json_text([dataclasses.asdict(run) for run in runs]))
        return 0
    written = [f"wrote {path}" for path in (flags.html, flags.png) if path is not None]
    show("\n".join([*table([_HEADS, *map(_cells, runs)], right=_NUMBERS), *written]))
    return 0


def _cells(run: RunFolder) -> tuple[str, ...]:
    started = "" if run.started is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
    return (
        run.name,
        run.status,
        run.layout,
        "" if run.ranks is None else str(run.ranks),
        f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step),
        _number(run.loss, ".4f"),
        _number(run.valid_loss, ".4f"),
        _number(run.tokens_per_second, ".0f"),
        _number(run.goodput, ".1%"),
        str(run.starts or ""),
        started,
    )


def _number(value: float | None, how: str) -> str:
    if value is None:
        return ""
    return format(value, how) if math.isfinite(value) else str(value)


def _page(runs: Sequence[RunFolder], title: str) -> str:
    """HTML: the curves of all runs in one picture each, and a row for each run."""
    figures = [
        _figure("Training loss", runs, "losses", "loss (nats a token)"),
        _figure("Validation loss", runs, "valid_losses", "loss (nats a token)"),
        _figure("Speed", runs, "speeds", "tokens/s"),
    ]
    rows = [Row(_cells(run), status=run.status.split()[0], mark=key(number)) for number, run in enumerate(runs)]
    columns = Table(_HEADS, rows, left=[column for column in range(len(_HEADS)) if column not in _NUMBERS], marked=1)
    return page(title, [Section(table=columns), Section(figures=[figure for figure in figures if figure[0]])])


def _figure(caption: str, runs: Sequence[RunFolder], name: str, y_label: str) -> tuple[str, str]:
    lines = [Line(run.name, getattr(run, name), number) for number, run in enumerate(runs)]
    return draw_curves([line for line in lines if line.points], x_label="step", y_label=y_label), caption
