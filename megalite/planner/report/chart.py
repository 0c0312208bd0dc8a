"""Speed against memory as SVG."""

from collections.abc import Sequence
from html import escape
from math import floor, log10
from typing import Any

from megalite.config.byte_size import format_bytes
from megalite.planner.report.data import count_in_words

_WIDTH, _HEIGHT = 760.0, 360.0
_LEFT, _TOP, _RIGHT, _BOTTOM = 70.0, 16.0, 20.0, 44.0
_GIB = 1024.0**3
_STYLE = """
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
    dots = [
        (layout["memory"]["total_bytes"] / _GIB, layout["tokens_per_second"]) for layout in data["layouts"]
    ]
    widest = max(x for x, _ in (*frontier, *dots)) * 1.05
    highest = max(y for _, y in (*frontier, *dots)) * 1.08

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + x / widest * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y / highest * (_HEIGHT - _TOP - _BOTTOM),
        )

    body = [*_axes(widest, highest, place), f'<path class="line" d="{_steps(frontier, widest, place)}"/>']
    for rank, (dot, layout) in reversed(list(enumerate(zip(dots, data["layouts"], strict=True)))):
        x, y = place(*dot)
        style = "dot" if rank else "best"
        title = f"{rank + 1}: {layout['words']}, {format_bytes(layout['memory']['total_bytes'])}"
        body.append(
            f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(title)}</title></circle>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{_HEIGHT:.0f}" role="img">'
        f"<title>Tokens a second against memory</title><style>{_STYLE}</style>{''.join(body)}</svg>"
    )


def _steps(points: Sequence[tuple[float, float]], widest: float, place: Any) -> str:
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
    found.append(
        f'<text x="{middle:.1f}" y="{bottom + 36:.1f}" text-anchor="middle">GiB on the fullest rank</text>'
    )
    found.append(f'<text x="{left + 6:.1f}" y="{top + 10:.1f}">tokens/s</text>')
    return found


def _ticks(highest: float) -> list[float]:
    """Round numbers up to the highest, about six."""
    power = 10.0 ** floor(log10(highest / 6))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= highest / 6)
    return [index * step for index in range(int(highest / step) + 1)]
