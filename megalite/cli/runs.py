"""`megalite runs DIR`: the runs below a folder, how they stand, and their curves side by side."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.checkpoint.files import replace_durably
from megalite.cli.curves import style_of, thinned
from megalite.cli.failures import command
from megalite.cli.output import show
from megalite.cli.parser import Parser
from megalite.cli.run_folders import RunFolder, find_runs
from megalite.cli.runs_report import format_runs, runs_page
from megalite.config.errors import ConfigError

_ABOUT = """Lists the runs in and below a folder: how each stands, its last loss, speed and goodput.

Reads what runs leave in their --run-dir; a run that is under way may be looked at."""


@command("megalite runs")
def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = Parser(
        "megalite runs", _ABOUT, examples=("megalite runs runs", "megalite runs runs --html runs/compare.html")
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder with runs in it (their --run-dir)")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write one page with their curves; it needs nothing else"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw their curves (with matplotlib)")
    parser.add_argument("--json", action="store_true", help="print the list, with the curves, as JSON")
    arguments = parser.parse_args(argv)
    runs = find_runs(arguments.folder)
    said = json.dumps([_plain(run) for run in runs], indent=1) if arguments.json else format_runs(runs)
    title = f"Runs in {arguments.folder}"
    if arguments.html is not None:
        _write(arguments.html, runs_page(runs, title).encode(), "--html")
    if arguments.png is not None:
        draw(runs, title, arguments.png)
    written = [path for path in (arguments.html, arguments.png) if path is not None]
    show(said if arguments.json else "\n".join([said, *(f"wrote {path}" for path in written)]))
    return 0


def _plain(run: RunFolder) -> dict[str, object]:
    """As JSON has it: no NaN."""
    return json.loads(json.dumps(dataclasses.asdict(run)), parse_constant=str)


def _write(path: Path, data: bytes, flag: str) -> None:
    try:
        replace_durably(path, data)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; give {flag} a file in a folder that exists"
        ) from None


def draw(runs: Sequence[RunFolder], title: str, path: Path) -> None:
    """Write losses, training and validation, and speed over steps as a picture; the ending tells the format.

    Raises:
        ConfigError: matplotlib is not installed, does not know the format, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--png needs matplotlib; pip install 'megalite[plot]', or use --html") from None
    figure = Figure(figsize=(9, 8), layout="constrained")
    figure.suptitle(title)
    losses, speeds = figure.subplots(2, 1, height_ratios=(2, 1))
    for number, run in enumerate(runs):
        color, dashes = style_of(number)
        style = {"color": color, "linestyle": (0, tuple(map(float, dashes.split()))) if dashes else "-"}
        losses.plot(*_axes(run.losses), linewidth=1.2, label=run.name, **style)
        losses.plot(*_axes(run.valid_losses), marker="o", markersize=5, linestyle="none", color=color)
        speeds.plot(*_axes(run.speeds), linewidth=1.2, **style)
    losses.set_ylabel("loss (nats a token); dots: validation")
    losses.legend(fontsize="small")
    speeds.set_ylabel("tokens/s")
    speeds.set_xlabel("step")
    for axes in (losses, speeds):
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give --png a file in a folder that exists") from None
    except ValueError as error:
        raise ConfigError(f"cannot write {path}: {error}; use .png, .svg or .pdf") from None


def _axes(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    thin = thinned(points)
    return [x for x, _ in thin], [y for _, y in thin]


if __name__ == "__main__":
    sys.exit(main())
