"""Scatter plots as inline SVG."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 460, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 14, 14, 46
_TICKS = 5


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One run."""

    x: float
    y: float
    title: str
    """Shown where the mouse rests."""
    kind: str = "ran"
    """`ran`, `best` or `pick`: its class in the style sheet."""


def scatter(dots: Sequence[Dot], *, x_label: str, y_label: str, diagonal: bool = False) -> str:
    """Dots over linear axes that start at 0.

    Args:
        diagonal: draw x = y, with the same scale on both axes.
    """
    top_x, top_y = _top(dot.x for dot in dots), _top(dot.y for dot in dots)
    if diagonal:
        top_x = top_y = max(top_x, top_y)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + width * x / top_x, _TOP + height * (1.0 - y / top_y)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{escape(y_label)} over {escape(x_label)}">'
    ]
    for tick in range(_TICKS + 1):
        x, bottom = place(top_x * tick / _TICKS, 0.0)
        left, y = place(0.0, top_y * tick / _TICKS)
        parts.append(
            f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom:.1f}M{left} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 16:.1f}" class="middle">{top_x * tick / _TICKS:.3g}</text>'
        )
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" class="end">{top_y * tick / _TICKS:.3g}</text>')
    if diagonal:
        (x0, y0), (x1, y1) = place(0.0, 0.0), place(top_x, top_y)
        parts.append(f'<path class="diagonal" d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"/>')
    for dot in dots:
        x, y = place(dot.x, dot.y)
        parts.append(
            f'<circle class="{escape(dot.kind)}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(dot.title)}</title></circle>'
        )
    parts.append(
        f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 8}" class="middle">{escape(x_label)}</text>'
        f'<text transform="translate(14 {_TOP + height / 2}) rotate(-90)" class="middle">{escape(y_label)}</text></svg>'
    )
    return "".join(parts)


def _top(values: Iterable[float]) -> float:
    """A round number, none of the values above it."""
    most = max(values, default=1.0) or 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0) if step * power >= most)
