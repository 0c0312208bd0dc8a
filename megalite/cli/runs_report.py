"""Runs side by side: a table for the terminal, one HTML page that needs nothing else."""

import math
import time
from collections.abc import Sequence
from html import escape

from megalite.cli.curves import Line, draw_curves, style_of
from megalite.cli.run_folders import RunFolder

_HEADS = ("run", "status", "layout", "ranks", "step", "loss", "valid loss", "tokens/s", "goodput", "starts", "started")
_TEXTS = {"run", "status", "layout", "started"}
"""Columns that are no numbers."""

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:84em;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}
td,th{font-variant-numeric:tabular-nums}td.text,th.text{text-align:left}.failed,.killed{color:#a33}.running{color:#2c8c47}
.grid{stroke:#e4e4e4;fill:none}.curve{fill:none;stroke-width:1.8}.curve:hover{stroke-width:3.5}
svg text{font:11px system-ui,sans-serif;fill:#444}.middle{text-anchor:middle}.end{text-anchor:end}
figure{display:inline-block;margin:1em 2em 1em 0}figcaption{font-weight:600}.key{vertical-align:middle;margin-right:.5em}
"""


def cells(run: RunFolder) -> tuple[str, ...]:
    """A row of the table, column by column."""
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


def format_runs(runs: Sequence[RunFolder]) -> str:
    """The table as text."""
    rows = [_HEADS, *(cells(run) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    lines = []
    for row in rows:
        padded = [
            cell.ljust(width) if head in _TEXTS else cell.rjust(width) for head, cell, width in zip(_HEADS, row, widths)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def runs_page(runs: Sequence[RunFolder], title: str) -> str:
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
    def tag(name: str, head: str, text: str, more: str = "") -> str:
        kind = ' class="text"' if head in _TEXTS else ""
        return f"<{name}{kind}>{more}{escape(text)}</{name}>"

    rows = ["<table><thead><tr>", *(tag("th", head, head) for head in _HEADS), "</tr></thead><tbody>"]
    for number, run in enumerate(runs):
        color, dashes = style_of(number)
        key = (
            '<svg class="key" width="26" height="8"><path class="curve" d="M0 4H26" '
            f'stroke="{color}" stroke-dasharray="{dashes}"/></svg>'
        )
        rows.append(f'<tr class="{escape(run.status.split()[0])}">')
        rows += [tag("td", head, cell, key if head == "run" else "") for head, cell in zip(_HEADS, cells(run))]
        rows.append("</tr>")
    return "".join([*rows, "</tbody></table>"])
