"""Reports as HTML: one page template, dark and light, for a telephone too, and one scatter plot; nothing from outside."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import Environment

_ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)

_STYLE = """
:root{color-scheme:light dark;--text:#1f2328;--quiet:#57606a;--paper:#fff;--line:#d0d7de;--best:#e6f2ff}
@media (prefers-color-scheme:dark){:root{--text:#e6edf3;--quiet:#9da7b3;--paper:#0d1117;--line:#30363d;--best:#12304f}}
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:80em;padding:0 1em;color:var(--text);background:var(--paper)}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}figcaption,.quiet{color:var(--quiet)}.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;margin:1em 0}td,th{padding:.25em .6em;border-bottom:1px solid var(--line)}
td,th{text-align:right;font-variant-numeric:tabular-nums}.left{text-align:left}
tr.best{background:var(--best)}tr.pick{font-weight:600}.refused,.failed,.oom,.timeout{color:#d1242f}
figure{display:inline-block;margin:1em 2em 1em 0;max-width:100%}svg{max-width:100%;height:auto}
.plot text{font:11px system-ui,sans-serif;fill:var(--text)}.grid{stroke:var(--line);fill:none}.middle{text-anchor:middle}
.end{text-anchor:end}.line{stroke:#6fa5de;stroke-width:2;fill:none}.diagonal{stroke:var(--quiet);stroke-dasharray:4}
circle{fill:#4878a8;fill-opacity:.8}circle.best{fill:#2c8c47}circle.pick{fill:#c26a1a}
"""
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title><style>{{ style }}</style></head><body><h1>{{ title }}</h1>
{% for section in sections %}
{% if section.heading %}<h2>{{ section.heading }}</h2>{% endif %}
{% for text in section.texts %}<p>{{ text }}</p>{% endfor %}
{% for picture, caption in section.figures %}
<figure class="wide">{{ picture|safe }}<figcaption>{{ caption }}</figcaption></figure>
{% endfor %}
{% if section.table %}<div class="wide"><table><thead><tr>
{%- for name in section.table.head %}<th class="{{ section.table.side(loop.index0) }}">{{ name }}</th>{% endfor %}
</tr></thead><tbody>
{% for row in section.table.rows %}<tr class="{{ row.kind }}"{% if row.key %} id="{{ row.key }}"{% endif %}>
{%- for cell in row.cells -%}
<td class="{{ section.table.side(loop.index0) }}{% if loop.last %} {{ row.status }}{% endif %}">{{ cell }}</td>
{%- endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}
{% endfor %}
</body></html>
"""
_PLOT = """<svg class="plot" viewBox="0 0 {{ width }} {{ height }}" width="{{ width }}" height="{{ height }}" role="img"
aria-label="{{ y_label }} over {{ x_label }}">
{%- for x, text in x_ticks %}<path class="grid" d="M{{ x }} {{ top }}V{{ bottom }}"/>
<text x="{{ x }}" y="{{ bottom + 16 }}" class="middle">{{ text }}</text>{% endfor %}
{%- for y, text in y_ticks %}<path class="grid" d="M{{ left }} {{ y }}H{{ right }}"/>
<text x="{{ left - 6 }}" y="{{ y + 4 }}" class="end">{{ text }}</text>{% endfor %}
{%- for kind, path in paths %}<path class="{{ kind }}" d="{{ path }}"/>{% endfor %}
{%- for dot, x, y in dots -%}
<circle class="{{ dot.kind }}" cx="{{ x }}" cy="{{ y }}" r="5"><title>{{ dot.title }}</title></circle>
{%- endfor %}<text x="{{ (left + right) / 2 }}" y="{{ height - 8 }}" class="middle">{{ x_label }}</text>
<text transform="translate(14 {{ (top + bottom) / 2 }}) rotate(-90)" class="middle">{{ y_label }}</text></svg>
"""


class Row(NamedTuple):
    """Of a table: the cells, and how they are marked."""

    cells: Sequence[str]
    kind: str = ""  # `best` or `pick`
    key: str = ""  # to link to
    status: str = ""  # class of the last cell


@dataclass(frozen=True)
class Table:
    """Cells of the columns in `left` are text, the others numbers."""

    head: Sequence[str]
    rows: Sequence[Row]
    left: Collection[int] = ()

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
    return _rendered(_PAGE, title=title, sections=sections, style=_STYLE) + "\n"


def _rendered(source: str, **values: Any) -> str:
    return _ENVIRONMENT.from_string(source).render(values)


class Dot(NamedTuple):
    """One run or layout of a plot."""

    x: float
    y: float
    title: str  # shown where the mouse rests
    kind: str = ""  # `best` or `pick`


_WIDTH, _HEIGHT = 560, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 546.0, 14.0, 314.0
_TICKS = 5


def scatter(
    dots: Sequence[Dot],
    *,
    x_label: str,
    y_label: str,
    diagonal: bool = False,
    frontier: Sequence[tuple[float, float]] = (),
) -> str:
    """SVG: dots over linear axes that start at 0. `diagonal` draws x = y, with the same scale on both axes; `frontier`
    a staircase: more x is no less y."""
    points = [*((dot.x, dot.y) for dot in dots), *frontier]
    most_x, most_y = _round_top(x for x, _ in points), _round_top(y for _, y in points)
    if diagonal:
        most_x = most_y = max(most_x, most_y)

    def at_x(x: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * x / most_x, 1)

    def at_y(y: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * y / most_y, 1)

    paths = [("diagonal", f"M{_LEFT} {_BOTTOM}L{_RIGHT} {_TOP}")] if diagonal else []
    if frontier:
        (x, y), *steps = frontier
        stairs = "".join(f"H{at_x(x)}V{at_y(y)}" for x, y in steps)
        paths.append(("line", f"M{at_x(x)} {at_y(y)}{stairs}H{_RIGHT}"))
    parts = [index / _TICKS for index in range(_TICKS + 1)]
    return _rendered(
        _PLOT,
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=_RIGHT,
        top=_TOP,
        bottom=_BOTTOM,
        x_label=x_label,
        y_label=y_label,
        x_ticks=[(at_x(part * most_x), _number(part * most_x)) for part in parts],
        y_ticks=[(at_y(part * most_y), _number(part * most_y)) for part in parts],
        paths=paths,
        dots=[(dot, at_x(dot.x), at_y(dot.y)) for dot in dots],
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _round_top(values: Iterable[float]) -> float:
    """A round number, none of the values above it."""
    most = max(values, default=1.0) or 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0) if step * power >= most)
