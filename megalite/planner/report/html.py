"""The report as one HTML page that needs nothing from outside."""

from collections.abc import Sequence
from html import escape
from typing import Any

from megalite.config.byte_size import format_bytes
from megalite.pipeline.ir.simulate import Timeline
from megalite.pipeline.ir.svg import Panel, draw_svg
from megalite.planner.report.chart import draw_frontier
from megalite.planner.report.data import PARTS, count_in_words, seconds_in_words
from megalite.planner.report.text import COLUMNS, cells

_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 2em auto; max-width: 1300px; padding: 0 1em; color: #1f2328; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: 3px 8px; text-align: right; }
tr:nth-child(2) { background: #e6f2ff; } th { border-bottom: 1px solid #8c959f; }
td.why { text-align: left; } .wide { overflow-x: auto; } .quiet { color: #57606a; }
@media (prefers-color-scheme: dark) {
  body { background: #0d1117; color: #e6edf3; } tr:nth-child(2) { background: #12304f; } .quiet { color: #9da7b3; }
}
"""


def html_page(data: dict[str, Any], timeline: Timeline) -> str:
    """The dict of `plan_data` with its frontier drawn, and the step of the best layout on a clock."""
    model, cluster, space = data["model"], data["cluster"], data["space"]
    title = f"{count_in_words(model['parameters'])} on {cluster['ranks']} ranks of {cluster['name']}"
    about = (
        f"Sequence {model['seq_length']}, batch {model['global_batch_size']}, {model['precision']}, stack "
        f"{cluster['stack']}. {space['layouts']:,} layouts are legal, {space['fitting']:,} fit into "
        f"{format_bytes(cluster['memory_limit_bytes'])} a rank. Time is that of {count_in_words(data['tokens'])} tokens."
    )
    best = data["layouts"][0]
    sections = [
        f"<h1>{escape(title)}</h1><p>{escape(about)}</p>",
        f"<h2>Layouts</h2><div class='wide'>{_table(data['layouts'])}</div>",
        "<h2>Speed against memory</h2><p class='quiet'>The line: the fastest layout for each amount of memory, in closed "
        f"form. The dots: the layouts above, simulated.</p>{draw_frontier(data)}",
        f"<h2>The step of the best layout</h2><p>{escape(best['words'])}</p>{_parts(best)}",
        f"<div class='wide'>{timeline_svg(timeline, best)}</div>",
        f"<h2>Where the figures are from</h2>{_provenance(cluster['provenance'])}",
    ]
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def timeline_svg(timeline: Timeline, layout: dict[str, Any]) -> str:
    """The pipeline's step to scale."""
    peaks = tuple(str(peak) for peak in timeline.peak_activations)
    count = timeline.schedule.num_microbatches
    shown = (
        ""
        if count == layout["microbatches"]
        else f", the first {count} of {layout['microbatches']} microbatches"
    )
    panel = Panel(timeline, peaks, f"bubble {layout['bubble']:.1%}{shown}")
    return draw_svg([panel], unit="s", peak="activations alive, in microbatches x stages")


def _table(layouts: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in (*COLUMNS, "why it loses"))
    rows = []
    for layout in layouts:
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells(layout))
        rows.append(f"<tr>{row}<td class='why'>{escape(layout['why'])}</td></tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _parts(layout: dict[str, Any]) -> str:
    rows = [
        f"<tr><td>{escape(PARTS.get(name, name))}</td><td>{seconds_in_words(value)}</td>"
        f"<td>{value / layout['step_seconds']:.1%}</td></tr>"
        for name, value in sorted(layout["parts"].items(), key=lambda part: -part[1])
        if value > 0
    ]
    return f"<table><tr><th>part</th><th>seconds</th><th>share</th></tr>{''.join(rows)}</table>"


def _provenance(sources: dict[str, str]) -> str:
    rows = [
        f"<tr><td>{escape(name)}</td><td class='why'>{escape(text)}</td></tr>"
        for name, text in sources.items()
    ]
    return f"<table><tr><th>figure</th><th>source</th></tr>{''.join(rows)}</table>"
