"""`megalite plot`: draw the loss curve of a run from its metrics.jsonl."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.cli.failures import command
from megalite.cli.output import show
from megalite.cli.parser import Parser
from megalite.config.errors import ConfigError
from megalite.config.reading import read_text
from megalite.training.sinks import parse_record

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@command("megalite plot")
def main(argv: Sequence[str]) -> int:
    """Write the picture; returns the exit status."""
    parser = Parser(
        "megalite plot",
        "Draw training and validation loss over steps from the metrics.jsonl of a run.",
        examples=("megalite plot runs/first --output loss.svg",),
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run (--run-dir)")
    parser.add_argument("--output", type=Path, help="default RUN_DIR/loss.png; the ending tells the format")
    arguments = parser.parse_args(argv)
    output = arguments.output or arguments.run_dir / "loss.png"
    plot(read_metrics(arguments.run_dir), output)
    show(str(output))
    return 0


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run, in the order in which they were written; damaged lines are left out.

    Raises:
        ConfigError: there is no metrics.jsonl, or it holds no records.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give the --run-dir of a run that has started")
    lines = read_text(path, errors="replace").splitlines(keepends=True)
    records = [record for line in lines if (record := parse_record(line)) is not None]
    if not records:
        raise ConfigError(f"{path} has no records yet; wait for the first step")
    return records


def plot(records: Sequence[dict[str, Any]], output: Path, *, switches: Sequence[int] = ()) -> None:
    """Write `figure` to a file.

    Raises:
        ConfigError: matplotlib is not installed, does not know the format, or the file cannot be written.
    """
    drawn = figure(records, switches=switches)
    try:
        drawn.savefig(output, dpi=130)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}; give another file with --output") from None
    except ValueError as error:
        raise ConfigError(f"cannot write {output}: {error}; use .png, .svg or .pdf") from None


def figure(records: Sequence[dict[str, Any]], *, switches: Sequence[int] = ()) -> "Figure":
    """The losses over steps; `switches` are steps to mark with a vertical line.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawing needs matplotlib; pip install 'megalite[plot]'") from None
    train = [record for record in records if record["kind"] == "train"]
    valid = [record for record in records if record["kind"] == "valid"]
    drawn = Figure(figsize=(8, 4.5), layout="constrained")
    axes = drawn.add_subplot()
    axes.plot(*_series(train, "loss"), color="#9ab", linewidth=1.0, label="training")
    axes.plot(*_series(valid, "valid_loss"), color="#c33", marker="o", markersize=4, label="validation")
    for number, step in enumerate(switches):
        axes.axvline(step, color="#555", linestyle="--", linewidth=1.0, label=None if number else "layout switch")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn


def _series(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [record["step"] for record in records], [float(record[name]) for record in records]


if __name__ == "__main__":
    sys.exit(main())
