"""`megalite plot`: draw the loss curve of a run from its metrics.jsonl."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.cli.curves import new_figure, save
from megalite.cli.output import show
from megalite.cli.run_folders import METRICS, read_records
from megalite.cli.tool_commands import PLOT
from megalite.config.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

main = PLOT


def run(flags: Namespace) -> int:
    """Write the picture."""
    output = flags.output or flags.run_dir / "loss.png"
    plot(read_metrics(flags.run_dir), output)
    show(str(output))
    return 0


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run, in the order in which they were written; damaged lines are left out.

    Raises:
        ConfigError: there is no metrics.jsonl, or it holds no records.
    """
    path = run_dir / METRICS
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give the --run-dir of a run that has started")
    records = read_records(path)
    if not records:
        raise ConfigError(f"{path} has no records yet; wait for the first step")
    return records


def plot(records: Sequence[dict[str, Any]], output: Path, *, switches: Sequence[int] = ()) -> None:
    """Write `figure` to a file.

    Raises:
        ConfigError: matplotlib is not installed, does not know the format, or the file cannot be written.
    """
    save(figure(records, switches=switches), output, "--output")


def figure(records: Sequence[dict[str, Any]], *, switches: Sequence[int] = ()) -> "Figure":
    """The losses over steps; `switches` are steps to mark with a vertical line.

    Raises:
        ConfigError: matplotlib is not installed.
    """
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
