"""`megalite runs DIR`: the runs below a folder, how they stand, and their curves side by side."""

import dataclasses
import json
import math
import time
from argparse import Namespace
from collections.abc import Sequence
from html import escape

from megalite.checkpoint.files import replace_durably
from megalite.cli.display import table
from megalite.cli.output import show
from megalite.cli.plot import Line, draw_curves, plot_runs, save, style_of
from megalite.cli.run_folders import RunFolder, find_runs
from megalite.cli.tool_commands import RUNS
from megalite.config.errors import ConfigError

_HEADS = ("run", "status", "layout", "ranks", "step", "loss", "valid loss", "tokens/s", "goodput", "starts", "started")
_NUMBERS = range(3, 10)
"""Columns of numbers."""

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:84em;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}
td,th{font-variant-numeric:tabular-nums}td.text,th.text{text-align:left}.failed,.killed{color:#a33}.running{color:#2c8c47}
.grid{stroke:#e4e4e4;fill:none}.curve{fill:none;stroke-width:1.8}.curve:hover{stroke-width:3.5}
svg text{font:11px system-ui,sans-serif;fill:#444}.middle{text-anchor:middle}.end{text-anchor:end}
figure{display:inline-block;margin:1em 2em 1em 0}figcaption{font-weight:600}.key{vertical-align:middle;margin-right:.5em}
"""

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
    if flags.json:  # which has no NaN
        plain = [json.loads(json.dumps(dataclasses.asdict(run)), parse_constant=str) for run in runs]
        show(json.dumps(plain, indent=1))
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
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{_table(runs)}{''.join(figures)}</body></html>\n"
    )


def _figure(caption: str, runs: Sequence[RunFolder], name: str, y_label: str) -> str:
    lines = [Line(run.name, getattr(run, name), number) for number, run in enumerate(runs)]
    picture = draw_curves([line for line in lines if line.points], x_label="step", y_label=y_label)
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}</figure>" if picture else ""


def _table(runs: Sequence[RunFolder]) -> str:
    def tag(name: str, column: int, text: str, key: str = "") -> str:
        kind = "" if column in _NUMBERS else ' class="text"'
        return f"<{name}{kind}>{key}{escape(text)}</{name}>"

    heads = "".join(tag("th", column, head) for column, head in enumerate(_HEADS))
    rows = [f"<table><thead><tr>{heads}</tr></thead><tbody>"]
    for number, run in enumerate(runs):
        color, dashes = style_of(number)
        path = f'<path class="curve" d="M0 4H26" stroke="{color}" stroke-dasharray="{dashes}"/>'
        key = f'<svg class="key" width="26" height="8">{path}</svg>'
        cells = [tag("td", column, cell, "" if column else key) for column, cell in enumerate(_cells(run))]
        rows.append(f'<tr class="{escape(run.status.split()[0])}">{"".join(cells)}</tr>')
    return "".join([*rows, "</tbody></table>"])
