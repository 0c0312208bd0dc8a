"""Curves of runs by matplotlib: `megalite plot`, and `megalite runs --png`."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.cli.output import show
from megalite.cli.run_folders import METRICS, RunFolder
from megalite.cli.tool_commands import PLOT
from megalite.config.errors import ConfigError
from megalite.planner.page import style_of, thinned
from megalite.training.sinks import read_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
