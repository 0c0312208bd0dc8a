"""Render reports as HTML from one template (page.html: dark, light and narrow screens), with charts as SVG. A page
loads no other files and shows everything without scripts."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment

_TEMPLATE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
)


class Row(NamedTuple):
    """A table row: cells and marks."""

    cells: Sequence[str]
    kind: str = ""  # `best` or `pick`
    key: str = ""  # link target
    status: str = ""  # CSS class of the cell in column `Table.marked`
    mark: str = ""  # SVG before the first cell


@dataclass(frozen=True)
class Table:
    """A table that sorts by a click on a head; columns in `left` contain text, the others numbers."""

    head: Sequence[str]
    rows: Sequence[Row]
    left: Collection[int] = ()
    marked: int | None = None  # column of the cells with class `Row.status`; None: the last

    def side(self, column: int) -> str:
        return "left" if column in self.left else ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page: text, pictures (SVG) with their captions, and a table."""

    heading: str = ""
    texts: Sequence[str] = ()
    figures: Sequence[tuple[str, str]] = ()
    table: Table | None = None


def page(title: str, sections: Sequence[Section]) -> str:
    return _TEMPLATE.render(title=title, sections=sections) + "\n"


COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#555555")
"""Chosen to differ for colour-blind readers too; after eight lines the dashes change."""
DASHES = ("", "6 3", "2 3")

_WIDTH, _HEIGHT = 560, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 534, 12, 284
_MOST_POINTS = 600


class Dot(NamedTuple):
    """A run or layout in a scatter plot."""

    x: float
    y: float
    title: str  # tooltip
    kind: str = ""  # `best` or `pick`


@dataclass(frozen=True)
class Line:
    label: str
    points: Sequence[tuple[float, float]]  # (x, y), x ascending; NaN leaves a gap
    number: int  # run number, which selects colour and dashes


@dataclass(frozen=True)
class _Axes:
    x: list[float]
    y: list[float]

    def across(self, x: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (x - self.x[0]) / (self.x[-1] - self.x[0])

    def down(self, y: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (y - self.y[0]) / (self.y[-1] - self.y[0])

    def picture(self, body: Sequence[str], x_label: str, y_label: str, more: str = "") -> str:
        x_label, y_label = escape(x_label), escape(y_label)
        parts = [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" class="plot" role="img" '
            f'aria-label="{y_label} over {x_label}"{more}>'
        ]
        for x in self.x:
            parts.append(f'<path class="grid" d="M{self.across(x):.1f} {_TOP}V{_BOTTOM}"/>')
            parts.append(f'<text x="{self.across(x):.1f}" y="{_BOTTOM + 16}" class="middle">{_number(x)}</text>')
        for y in self.y:
            parts.append(f'<path class="grid" d="M{_LEFT} {self.down(y):.1f}H{_RIGHT}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{self.down(y) + 4:.1f}" class="end">{_number(y)}</text>')
        middle = (_TOP + _BOTTOM) / 2
        return "".join(
            [
                *parts,
                *body,
                f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 8}" class="middle">{x_label}</text>',
                f'<text transform="translate(14 {middle}) rotate(-90)" class="middle">{y_label}</text></svg>',
            ]
        )


def scatter(
    dots: Sequence[Dot],
    *,
    x_label: str,
    y_label: str,
    diagonal: bool = False,
    frontier: Sequence[tuple[float, float]] = (),
) -> str:
    """Draw dots on linear axes from 0. `diagonal` adds the line x = y and equal scales; `frontier` adds a staircase of
    points with ascending x and y."""
    points = [*((dot.x, dot.y) for dot in dots), *frontier]
    xs, ys = ([0.0, *(point[axis] for point in points)] for axis in (0, 1))
    most_x, most_y = (max(xs + ys),) * 2 if diagonal else (max(xs), max(ys))
    axes = _Axes(ticks(0.0, most_x or 1.0), ticks(0.0, most_y or 1.0))
    body = [f'<path class="diagonal" d="M{_LEFT} {_BOTTOM}L{_RIGHT} {_TOP}"/>'] if diagonal else []
    if frontier:
        (x, y), *steps = frontier
        stairs = "".join(f"H{axes.across(x):.1f}V{axes.down(y):.1f}" for x, y in steps)
        body.append(f'<path class="line" d="M{axes.across(x):.1f} {axes.down(y):.1f}{stairs}H{_RIGHT}"/>')
    body += [
        f'<circle class="{dot.kind}" cx="{axes.across(dot.x):.1f}" cy="{axes.down(dot.y):.1f}" r="5">'
        f"<title>{escape(f'{dot.title}: {y_label} {dot.y:,.4g}, {x_label} {dot.x:,.4g}')}</title></circle>"
        for dot in dots
    ]
    return axes.picture(body, x_label, y_label)


def draw_curves(lines: Sequence[Line], *, x_label: str, y_label: str) -> str:
    """Draw lines on axes that contain all finite points; the y axis does not start at 0. Empty without finite points."""
    finite = [(x, y) for line in lines for x, y in line.points if math.isfinite(y)]
    if not finite:
        return ""
    axes = _Axes(*(ticks(min(p[axis] for p in finite), max(p[axis] for p in finite)) for axis in (0, 1)))
    body = []
    for line in lines:
        color, dashes = style_of(line.number)
        points = thinned(line.points)
        values = json.dumps([[x, float(f"{y:.6g}") if math.isfinite(y) else None] for x, y in points])
        placed = [(axes.across(x), axes.down(y)) for x, y in points]
        body.append(
            f'<path class="curve c{line.number % len(COLORS)}" fill="none" stroke="{color}" stroke-dasharray="{dashes}" '
            f'data-points="{values}" d="{_path(placed)}"><title>{escape(line.label)}</title></path>'
        )
    frame = json.dumps([axes.x[0], axes.x[-1], axes.y[0], axes.y[-1], _LEFT, _RIGHT, _BOTTOM, _TOP])
    return axes.picture(body, x_label, y_label, f' data-frame="{frame}"')


def _number(value: float) -> str:
    unit, scale = ("M", 1e6) if abs(value) >= 1e6 else ("k", 1e3) if abs(value) >= 1e4 else ("", 1.0)
    return f"{value / scale:,.10g}{unit}"


def style_of(number: int) -> tuple[str, str]:
    """Return the (colour, dashes) of a run's lines."""
    return COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]


def key(number: int) -> str:
    """Draw a sample of a run's line for the run's row in a table."""
    color, dashes = style_of(number)
    stroke = f'stroke="{color}" stroke-dasharray="{dashes}"'
    return f'<svg class="key" width="26" height="8"><path class="curve c{number % len(COLORS)}" d="M0 4H26" {stroke}/></svg>'


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce to at most `_MOST_POINTS` points: means of equal parts, each at the part's middle."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    found = []
    for index in range(_MOST_POINTS):
        stretch = points[index * len(points) // _MOST_POINTS : (index + 1) * len(points) // _MOST_POINTS]
        found.append((stretch[len(stretch) // 2][0], math.fsum(y for _, y in stretch) / len(stretch)))
    return found


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Return evenly spaced round numbers from at most `low` to at least `high`."""
    if high <= low:
        spread = abs(low) or 1.0
        low, high = low - 0.05 * spread, high + 0.05 * spread
    power = 10.0 ** math.floor(math.log10((high - low) / about))
    step = next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= (high - low) / about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Return the path of a polyline that breaks at non-finite y; a single point becomes a short line to be visible."""
    parts: list[str] = []
    drawing = False
    for index, (x, y) in enumerate(points):
        if not math.isfinite(y):
            drawing = False
            continue
        parts.append(f"{'L' if drawing else 'M'}{x:.1f} {y:.1f}")
        followed = index + 1 < len(points) and math.isfinite(points[index + 1][1])
        if not drawing and not followed:
            parts.append("h2")
        drawing = True
    return "".join(parts)
