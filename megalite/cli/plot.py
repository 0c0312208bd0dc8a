"""Curves of runs: `megalite plot`, and those of `megalite runs` as inline SVG and by matplotlib."""

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.cli.output import show
from megalite.cli.run_folders import METRICS, RunFolder, read_records
from megalite.cli.tool_commands import PLOT
from megalite.config.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#555555")
"""Different also for those who see fewer colours; then the dashes change."""
DASHES = ("", "6 3", "2 3")

_WIDTH, _HEIGHT = 620, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 16, 12, 44
_MOST_POINTS = 600


@dataclass(frozen=True)
class Line:
    label: str
    points: Sequence[tuple[float, float]]
    """(x, y), x ascending; NaN leaves a gap."""
    number: int
    """Of the run: its colour and dashes."""


def style_of(number: int) -> tuple[str, str]:
    """(colour, dashes) of a run's lines."""
    return COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]


def draw_curves(lines: Sequence[Line], *, x_label: str, y_label: str) -> str:
    """Lines over axes that hold all finite points; the y axis starts where they do."""
    finite = [(x, y) for line in lines for x, y in line.points if math.isfinite(y)]
    if not finite:
        return ""
    x_ticks = ticks(min(x for x, _ in finite), max(x for x, _ in finite))
    y_ticks = ticks(min(y for _, y in finite), max(y for _, y in finite))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def across(x: float) -> float:
        return _LEFT + width * (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])

    def down(y: float) -> float:
        return _TOP + height * (1.0 - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]))

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{escape(y_label)} over {escape(x_label)}">'
    ]
    for x in x_ticks:
        parts.append(f'<path class="grid" d="M{across(x):.1f} {_TOP}V{_TOP + height}"/>')
        parts.append(f'<text x="{across(x):.1f}" y="{_TOP + height + 16}" class="middle">{x:,.10g}</text>')
    for y in y_ticks:
        parts.append(f'<path class="grid" d="M{_LEFT} {down(y):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{down(y) + 4:.1f}" class="end">{y:,.10g}</text>')
    for line in lines:
        color, dashes = style_of(line.number)
        placed = [(across(x), down(y)) for x, y in thinned(line.points)]
        parts.append(
            f'<path class="curve" stroke="{color}" stroke-dasharray="{dashes}" d="{_path(placed)}">'
            f"<title>{escape(line.label)}</title></path>"
        )
    parts.append(
        f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 8}" class="middle">{escape(x_label)}</text>'
        f'<text transform="translate(14 {_TOP + height / 2}) rotate(-90)" class="middle">{escape(y_label)}</text></svg>'
    )
    return "".join(parts)


def thinned(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many points: means of equal stretches, each at its middle."""
    if len(points) <= most:
        return list(points)
    found = []
    for index in range(most):
        stretch = points[index * len(points) // most : (index + 1) * len(points) // most]
        found.append((stretch[len(stretch) // 2][0], math.fsum(y for _, y in stretch) / len(stretch)))
    return found


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers, evenly apart, from one that is not above `low` to one that is not below `high`."""
    if high <= low:
        spread = abs(low) or 1.0
        low, high = low - 0.05 * spread, high + 0.05 * spread
    power = 10.0 ** math.floor(math.log10((high - low) / about))
    step = next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= (high - low) / about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """A polyline; what is not finite breaks it. A point alone is a short line, so that it is seen."""
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


def new_figure(**options: Any) -> "Figure":
    """An empty figure of matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "drawing needs matplotlib; pip install 'megalite[plot]', or use megalite runs --html"
        ) from None
    return Figure(layout="constrained", **options)


def plot_runs(runs: Sequence[RunFolder], title: str) -> "Figure":
    """Losses, training and validation, and speed over steps."""
    drawn = new_figure(figsize=(9, 8))
    drawn.suptitle(title)
    losses, speeds = drawn.subplots(2, 1, height_ratios=(2, 1))
    for number, run in enumerate(runs):
        color, dashes = style_of(number)
        style = {"color": color, "linestyle": (0, tuple(map(float, dashes.split()))) if dashes else "-"}
        losses.plot(*_columns(run.losses), linewidth=1.2, label=run.name, **style)
        losses.plot(*_columns(run.valid_losses), marker="o", markersize=5, linestyle="none", color=color)
        speeds.plot(*_columns(run.speeds), linewidth=1.2, **style)
    losses.set_ylabel("loss (nats a token); dots: validation")
    losses.legend(fontsize="small")
    speeds.set_ylabel("tokens/s")
    speeds.set_xlabel("step")
    for axes in (losses, speeds):
        axes.grid(alpha=0.3)
    return drawn


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    thin = thinned(points)
    return [x for x, _ in thin], [y for _, y in thin]


def save(drawn: "Figure", path: Path, flag: str) -> None:
    """Write a figure; the ending gives the format."""
    try:
        drawn.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; give {flag} a file in a folder that exists"
        ) from None
    except ValueError as error:
        raise ConfigError(f"cannot write {path}: {error}; use .png, .svg or .pdf") from None


main = PLOT


def run(flags: Namespace) -> int:
    output = flags.output or flags.run_dir / "loss.png"
    plot(read_metrics(flags.run_dir), output)
    show(str(output))
    return 0


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run, in the order in which they were written; damaged lines are left out."""
    path = run_dir / METRICS
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give the --run-dir of a run that has started")
    records = read_records(path)
    if not records:
        raise ConfigError(f"{path} has no records yet; wait for the first step")
    return records


def plot(records: Sequence[dict[str, Any]], output: Path, *, switches: Sequence[int] = ()) -> None:
    save(figure(records, switches=switches), output, "--output")


def figure(records: Sequence[dict[str, Any]], *, switches: Sequence[int] = ()) -> "Figure":
    """The losses over steps; `switches` are steps to mark with a vertical line."""
    drawn = new_figure(figsize=(8, 4.5))
    axes = drawn.add_subplot()
    axes.plot(*_series(records, "train", "loss"), color="#9ab", linewidth=1.0, label="training")
    axes.plot(*_series(records, "valid", "valid_loss"), color="#c33", marker="o", markersize=4, label="validation")
    for number, step in enumerate(switches):
        axes.axvline(step, color="#555", linestyle="--", linewidth=1.0, label=None if number else "layout switch")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn


def _series(records: Sequence[dict[str, Any]], kind: str, name: str) -> tuple[list[int], list[float]]:
    mine = [record for record in records if record["kind"] == kind]
    return [record["step"] for record in mine], [float(record[name]) for record in mine]
