"""A plan as one HTML page that needs nothing from outside."""

from collections.abc import Sequence
from html import escape
from math import floor, log10
from typing import Any

from megalite.config.byte_size import format_bytes
from megalite.pipeline.ir.simulate import Timeline
from megalite.pipeline.ir.svg import Panel, draw_svg
from megalite.planner.clock import Clock
from megalite.planner.cost.rates import links_of
from megalite.planner.cost.stage import simulator_costs
from megalite.planner.hardware import Cluster, SoftwareStack
from megalite.planner.report import COLUMNS, PARTS, cells, count_in_words, seconds_in_words
from megalite.planner.search.search import Candidate

_ACTIONS = 1200  # forwards and backwards that are still told apart


def drawn_timeline(candidate: Candidate, cluster: Cluster, stack: SoftwareStack) -> Timeline:
    """The step, or one with fewer microbatches: whole rounds of the pipeline, at least three."""
    pipeline, config = candidate.layout.pipeline, candidate.config
    rounds = max(3, _ACTIONS // (2 * pipeline.pp * pipeline.pp * pipeline.vpp))
    count = min(pipeline.microbatches, rounds * pipeline.pp)
    costs = list(candidate.prediction.stages)
    timing = simulator_costs(costs, config, links_of(config, cluster, stack))
    return Clock(config, len(costs), count).run(timing).timeline


_WIDTH, _HEIGHT = 760.0, 360.0
_LEFT, _TOP, _RIGHT, _BOTTOM = 70.0, 16.0, 20.0, 44.0
_GIB = 1024.0**3
_CHART_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328; }
  .line { fill: none; stroke: #6fa5de; stroke-width: 2; }
  .dot { fill: #ef9d4b; } .best { fill: #d1242f; }
  .axis { stroke: #8c959f; stroke-width: 1; fill: none; }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3; } }
"""


def draw_frontier(data: dict[str, Any]) -> str:
    """Tokens a second (up) against bytes of the fullest rank (right): the frontier as a line, layouts as dots."""
    batch = data["model"]["global_batch_size"] * data["model"]["seq_length"]
    frontier = [(size / _GIB, batch / seconds) for size, seconds in data["frontier"]]
    dots = [(layout["memory"]["total_bytes"] / _GIB, layout["tokens_per_second"]) for layout in data["layouts"]]
    widest = max(x for x, _ in (*frontier, *dots)) * 1.05
    highest = max(y for _, y in (*frontier, *dots)) * 1.08

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + x / widest * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y / highest * (_HEIGHT - _TOP - _BOTTOM),
        )

    body = [*_axes(widest, highest, place), f'<path class="line" d="{_staircase(frontier, widest, place)}"/>']
    for rank, (dot, layout) in reversed(list(enumerate(zip(dots, data["layouts"], strict=True)))):
        x, y = place(*dot)
        style = "dot" if rank else "best"
        title = f"{rank + 1}: {layout['words']}, {format_bytes(layout['memory']['total_bytes'])}"
        body.append(f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(title)}</title></circle>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{_HEIGHT:.0f}" role="img">'
        f"<title>Tokens a second against memory</title><style>{_CHART_STYLE}</style>{''.join(body)}</svg>"
    )


def _staircase(points: Sequence[tuple[float, float]], widest: float, place: Any) -> str:
    """A staircase: more memory is no slower."""
    path, last = "", None
    for x, y in points:
        right, up = place(x, y)
        path += f"M{right:.1f} {up:.1f}" if last is None else f"H{right:.1f}V{up:.1f}"
        last = (x, y)
    return path + (f"H{place(widest, 0.0)[0]:.1f}" if last else "")


def _axes(widest: float, highest: float, place: Any) -> list[str]:
    (left, bottom), (right, top) = place(0.0, 0.0), place(widest, highest)
    found = [f'<path class="axis" d="M{left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}"/>']
    for value in _ticks(widest):
        x, _ = place(value, 0.0)
        found.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{value:g}</text>')
    for value in _ticks(highest):
        _, y = place(0.0, value)
        label = count_in_words(value) if value else "0"
        found.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    middle = (left + right) / 2
    found.append(f'<text x="{middle:.1f}" y="{bottom + 36:.1f}" text-anchor="middle">GiB on the fullest rank</text>')
    found.append(f'<text x="{left + 6:.1f}" y="{top + 10:.1f}">tokens/s</text>')
    return found


def _ticks(highest: float) -> list[float]:
    """Round numbers up to the highest, about six."""
    power = 10.0 ** floor(log10(highest / 6))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= highest / 6)
    return [index * step for index in range(int(highest / step) + 1)]


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
    shown = "" if count == layout["microbatches"] else f", the first {count} of {layout['microbatches']} microbatches"
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
    rows = [f"<tr><td>{escape(name)}</td><td class='why'>{escape(text)}</td></tr>" for name, text in sources.items()]
    return f"<table><tr><th>figure</th><th>source</th></tr>{''.join(rows)}</table>"
