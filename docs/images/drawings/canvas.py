"""A panel to draw on, white or on dark pages dark, in pixels from the top left corner, and the colours that all drawings share.

A hue is a rank or a group of ranks (in schedules: forward and backward, or a bucket), red is communication, and grey
is what every rank holds alike, or idle time.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, PathPatch
from matplotlib.path import Path as Outline

WIDTH = 760
INK, MUTED, FAINT = "#1f2328", "#57606a", "#c4cad1"
GREY = "#e6e9ed"
RED = "#c0273d"
LIGHT = ("#bcd6f2", "#fbd3a4", "#bfe3bd", "#dccaef")
"""Fills of ranks 0 to 3: blue, orange, green, purple. Dark text reads well on each."""
MIDDLE = ("#7fb0e3", "#f3a95c", "#86c984", "#b996dd")
"""The same hues, stronger."""
DARK = ("#2364a8", "#b4610c", "#2f7d33", "#73459f")
"""The same hues for lines and text."""

_NIGHT = {
    "#ffffff": "#0d1117",
    "#f6f8fa": "#161b22",
    INK: "#e6edf3",
    MUTED: "#9da7b3",
    FAINT: "#3d444d",
    GREY: "#30363d",
    **dict(zip(LIGHT, ("#1f3f66", "#5e3d16", "#234f2a", "#463463"), strict=True)),
    **dict(zip(MIDDLE, ("#2f6bb0", "#96590f", "#3a7d3a", "#6f4aa3"), strict=True)),
    **dict(zip(DARK, ("#79b8ff", "#f0a35e", "#7ee787", "#cba6f7"), strict=True)),
    RED: "#ff7b72",
}
"""Each colour where the reader wants dark pages; light text reads well on the fills."""
_RULES = "".join(
    f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
    for light, dark in _NIGHT.items()
    for what in ("fill", "stroke")
)

POINTS = 72 / 96
"""Of a pixel."""

Point = tuple[float, float]


class Drawing:
    """One picture, `WIDTH` x `height` pixels.

    Args:
        title: what it shows in a sentence; viewers that cannot draw read it.
    """

    def __init__(self, height: float, title: str) -> None:
        self.height = height
        self.title = title
        self.figure = Figure(figsize=(WIDTH / 96, height / 96), facecolor="none")
        self.axes = self.figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")
        self.box(0.5, 0.5, WIDTH - 1, height - 1, fill="white", edge=FAINT, radius=8)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        edge: str = "none",
        line: float = 1.0,
        radius: float = 0.0,
        dashed: bool = False,
    ) -> None:
        """A rectangle with its top left corner at (x, y)."""
        style = f"round,pad=0,rounding_size={radius}" if radius else "square,pad=0"
        self.axes.add_patch(
            FancyBboxPatch(
                (x, y),
                width,
                height,
                boxstyle=style,
                facecolor=fill,
                edgecolor=edge,
                linewidth=line * POINTS if edge != "none" else 0.0,
                linestyle=(0, (4, 3)) if dashed else "solid",
                clip_on=False,
            )
        )

    def circle(self, x: float, y: float, radius: float, *, fill: str, edge: str, line: float = 1.0) -> None:
        """A disc with its centre at (x, y)."""
        self.axes.add_patch(
            Circle((x, y), radius, facecolor=fill, edgecolor=edge, linewidth=line * POINTS, clip_on=False)
        )

    def shape(self, corners: Sequence[Point], *, fill: str, edge: str = "none", line: float = 1.0) -> None:
        """A closed polygon."""
        codes = [Outline.MOVETO, *[Outline.LINETO] * (len(corners) - 1), Outline.CLOSEPOLY]
        self._path(Outline([*corners, corners[0]], codes), fill=fill, edge=edge, line=line)

    def line(self, *points: Point, colour: str = INK, line: float = 1.0, dashed: bool = False) -> None:
        """Straight from point to point."""
        self._path(Outline(points), fill="none", edge=colour, line=line, dashed=dashed)

    def curve(self, start: Point, end: Point, *, colour: str = INK, line: float = 1.0) -> None:
        """An S from left to right, level at both ends."""
        middle = (start[0] + end[0]) / 2
        codes = [Outline.MOVETO, Outline.CURVE4, Outline.CURVE4, Outline.CURVE4]
        outline = Outline([start, (middle, start[1]), (middle, end[1]), end], codes)
        self._path(outline, fill="none", edge=colour, line=line)

    def arrow(self, start: Point, end: Point, *, colour: str = INK, line: float = 1.5) -> None:
        """A straight line with a head at its end."""
        (x0, y0), (x1, y1) = start, end
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        head = 4 + 2.5 * line
        back = (x1 - head * dx, y1 - head * dy)
        half = 0.5 * head
        self.line(start, back, colour=colour, line=line)
        corners = [end, (back[0] - half * dy, back[1] + half * dx), (back[0] + half * dy, back[1] - half * dx)]
        self.shape(corners, fill=colour)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        colour: str = INK,
        align: str = "center",
        bold: bool = False,
    ) -> None:
        """One line of text whose capitals are centred on `y`; `align` says what of it is at `x`."""
        assert size >= 11, "too small to read"
        # By the baseline, not by the ink: words with and without descenders then stand on one line.
        self.axes.text(
            x,
            y + 0.36 * size,
            text,
            fontsize=size * POINTS,
            color=colour,
            ha=align,
            va="baseline",
            family="DejaVu Sans",
            fontweight="bold" if bold else "normal",
            parse_math=False,
        )

    def cells(self, x: float, y: float, size: float, labels: Sequence[str], fills: Sequence[str]) -> None:
        """A row of labelled squares."""
        for index, (label, fill) in enumerate(zip(labels, fills, strict=True)):
            left = x + index * size
            self.box(left, y, size, size, fill=fill, edge="white", radius=2)
            self.text(left + size / 2, y + size / 2, label, size=11)

    def save(self, path: Path) -> None:
        """Write it as SVG (or as what the name ends with); the same bytes in every run."""
        # Ids that are the same in every run, and text as outlines: the fonts of a web page are not ours to choose.
        with mpl.rc_context({"svg.hashsalt": "megalite", "svg.fonttype": "path"}):
            metadata = {"Date": None, "Creator": None, "Title": self.title} if path.suffix == ".svg" else None
            self.figure.savefig(path, metadata=metadata, dpi=96)
        if path.suffix == ".svg":
            style = f"<style>@media (prefers-color-scheme: dark){{{_RULES}}}</style>\n </defs>"
            path.write_text(path.read_text(encoding="utf-8").replace("</defs>", style, 1), encoding="utf-8")

    def _path(self, outline: Outline, *, fill: str, edge: str, line: float = 1.0, dashed: bool = False) -> None:
        self.axes.add_patch(
            PathPatch(
                outline,
                facecolor=fill,
                edgecolor=edge,
                linewidth=line * POINTS if edge != "none" else 0.0,
                linestyle=(0, (4, 3)) if dashed else "solid",
                capstyle="butt",
                clip_on=False,
            )
        )
