"""`megalite plot`: draw the loss curve of a run from its metrics.jsonl."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Write the picture; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="megalite plot",
        description="Draw training and validation loss over steps from the metrics.jsonl of a run.",
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run (--run-dir)")
    parser.add_argument("--output", type=Path, help="default RUN_DIR/loss.png; the ending tells the format")
    arguments = parser.parse_args(argv)
    output = arguments.output or arguments.run_dir / "loss.png"
    try:
        plot(read_metrics(arguments.run_dir), output)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(output)
    return 0


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run, in the order in which they were written.

    Raises:
        ConfigError: there is no metrics.jsonl, or it holds no records.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give the --run-dir of a run that has started")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    if not records:
        raise ConfigError(f"{path} has no records yet; wait for the first step")
    return records


def plot(records: Sequence[dict[str, Any]], output: Path, *, switches: Sequence[int] = ()) -> None:
    """Draw the losses; `switches` are steps to mark with a vertical line.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawing needs matplotlib; pip install 'megalite[plot]'") from None
    train = [record for record in records if record["kind"] == "train"]
    valid = [record for record in records if record["kind"] == "valid"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*_series(train, "loss"), color="#9ab", linewidth=1.0, label="training")
    axes.plot(*_series(valid, "valid_loss"), color="#c33", marker="o", markersize=4, label="validation")
    for number, step in enumerate(switches):
        axes.axvline(
            step, color="#555", linestyle="--", linewidth=1.0, label=None if number else "layout switch"
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=130)


def _series(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [record["step"] for record in records], [float(record[name]) for record in records]


if __name__ == "__main__":
    sys.exit(main())
