"""`megalite runs`: list the runs in and below a folder, with their status and curves.

Reads sessions.json, metrics.jsonl and config.yaml, each of which may be missing or incomplete."""

import dataclasses
import math
import os
import platform
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megalite.cli.display import table
from megalite.cli.output import json_text, show
from megalite.config.errors import ConfigError
from megalite.config.files import CONFIG_NAME
from megalite.config.reading import read_text, write_text
from megalite.config.registry import optional
from megalite.config.training import LOSSES
from megalite.planner.page import Line, Row, Section, Table, draw_curves, key, page, style_of, thinned
from megalite.training.records import METRICS, SESSIONS, Session, goodput_of, read_records, read_sessions

_SKIPPED_FOLDERS = {"checkpoints", "tensorboard", "profile", "wandb"}
_SPEED_STEPS = 20  # number of last steps in the mean speed
_HEADS = ("run", "status", "layout", "ranks", "step", "loss", "valid loss", "tokens/s", "goodput", "starts", "started")
_NUMBERS = range(3, 10)  # columns with numbers

Curve = Sequence[tuple[float, float]]


def run(flags: Namespace) -> int:
    runs = find_runs(flags.folder)
    title = f"Runs in {flags.folder}"
    if flags.html is not None:
        write_text(flags.html, _page(runs, title))
    if flags.png is not None:
        draw(runs, title, flags.png)
    if flags.json:
        show(json_text([dataclasses.asdict(run) for run in runs]))
        return 0
    written = [f"wrote {path}" for path in (flags.html, flags.png) if path is not None]
    show("\n".join([*table([_HEADS, *map(_cells, runs)], right=_NUMBERS), *written]))
    return 0


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    name: str  # path relative to the listed folder
    status: str  # `running`, `finished`, `stopped`, `failed`, `killed`, `silent for ...` on another host, or `unknown`
    started: float | None  # Unix time of the first start
    starts: int
    ranks: int | None
    layout: str
    step: int
    total_steps: int | None
    loss_name: str | None
    loss: float | None  # loss of the last step
    valid_loss: float | None
    tokens_per_second: float | None  # mean of the last `_SPEED_STEPS` steps
    goodput: float | None
    losses: Curve
    valid_losses: Curve
    speeds: Curve


def find_runs(folder: Path) -> list[RunFolder]:
    """Return the runs in and below a folder, ordered by name."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}; give a folder with runs in it (their --run-dir), e.g. runs")
    found = [
        read_run(path, str(path.relative_to(folder)) if path != folder else path.resolve().name)
        for path in _run_folders(folder)
    ]
    if not found:
        raise ConfigError(f"there is no run in {folder}: no {METRICS} or {SESSIONS} in it or in a folder below it")
    return found


def _run_folders(folder: Path) -> Iterator[Path]:
    for place, below, files in os.walk(folder):
        if METRICS in files or SESSIONS in files:
            yield Path(place)
        below[:] = sorted(name for name in below if name not in _SKIPPED_FOLDERS and not name.startswith("."))


def read_run(path: Path, name: str) -> RunFolder:
    """Read one run, even if files are missing or incomplete."""
    train, sessions = read_records(path, "train"), read_sessions(path)
    training = _training(path / CONFIG_NAME)
    losses, speeds = _curve(train, "loss"), _curve(train, "tokens_per_second")
    valid, written = _curve(read_records(path, "valid"), "valid_loss"), _last_write(path)
    last = [speed for _, speed in speeds[-_SPEED_STEPS:]]
    if sessions and sessions[-1].ended is None:
        sessions[-1].seen = max(sessions[-1].seen, written)
    goodput = goodput_of(sessions) if sessions else None
    return RunFolder(
        name=name,
        status=status_of(sessions, written),
        started=sessions[0].started if sessions else None,
        starts=len(sessions),
        ranks=sessions[-1].ranks if sessions else None,
        layout=sessions[-1].layout if sessions else "",
        step=train[-1]["step"] if train else 0,
        total_steps=steps if isinstance(steps := training.get("train_iters"), int) else None,
        loss_name=training.get("loss"),
        loss=losses[-1][1] if losses else None,
        valid_loss=valid[-1][1] if valid else None,
        tokens_per_second=statistics.harmonic_mean(last) if last and min(last) > 0 else None,
        goodput=goodput.fraction if goodput is not None and goodput.wall > 0.0 else None,
        losses=losses,
        valid_losses=valid,
        speeds=speeds,
    )


def status_of(sessions: Sequence[Session], last_write: float) -> str:
    """Return the status of a run. `last_write`: Unix time of the last write to its files."""
    if not sessions:
        return "unknown"
    last = sessions[-1]
    if last.ended is not None:
        return last.ended
    if last.host == platform.node():
        return "running" if _is_alive(last.pid) else "killed"
    minutes = (time.time() - last_write) / 60.0
    if minutes < 10.0:
        return "running"
    return f"silent for {minutes:.0f} min" if minutes < 120.0 else f"silent for {minutes / 60.0:.0f} h"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0


def _last_write(path: Path) -> float:
    times = [(path / name).stat().st_mtime for name in (METRICS, SESSIONS) if (path / name).exists()]
    return max(times, default=0.0)


def _curve(records: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return (step, value) of each record. The file stores NaN as text, which becomes NaN again."""
    found = []
    for record in records:
        try:
            found.append((float(record["step"]), float(record[name])))
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _training(path: Path) -> dict[str, Any]:
    """Return the section `training` of a config file; empty if it cannot be read."""
    try:
        return dict(yaml.safe_load(read_text(path))["training"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        return {}


def _loss_label(runs: Sequence[RunFolder]) -> str:
    return "loss (nats per token)" if all(run.loss_name in LOSSES.builtin for run in runs) else "loss"


def draw(runs: Sequence[RunFolder], title: str, path: Path, *, marked: Sequence[int] = ()) -> None:
    """Draw losses and speed over steps with matplotlib. The suffix of `path` gives the format. `marked`: steps with a
    vertical line."""
    remedy = "pip install 'megalite[plot]', or use megalite runs --html"
    figures = optional("matplotlib.figure", f"drawing needs matplotlib; {remedy}")
    drawn = figures.Figure(layout="constrained", figsize=(9, 8))
    drawn.suptitle(title)
    losses, speeds = drawn.subplots(2, 1, height_ratios=(2, 1))
    for number, run in enumerate(runs):
        color, dashes = style_of(number)
        style = {"color": color, "linestyle": (0, tuple(map(float, dashes.split()))) if dashes else "-"}
        losses.plot(*_columns(run.losses), linewidth=1.2, label=run.name, **style)
        losses.plot(*_columns(run.valid_losses), marker="o", markersize=5, linestyle="none", color=color)
        speeds.plot(*_columns(run.speeds), linewidth=1.2, **style)
    for step in marked:
        losses.axvline(step, color="#555", linestyle="--", linewidth=1.0)
    losses.set_ylabel(f"{_loss_label(runs)}; dots: validation")
    losses.legend(fontsize="small")
    speeds.set_ylabel("tokens/s")
    speeds.set_xlabel("step")
    for axes in (losses, speeds):
        axes.grid(alpha=0.3)
    try:
        drawn.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give a file in a folder that exists") from None
    except ValueError as error:
        raise ConfigError(f"cannot write {path}: {error}; use .png, .svg or .pdf") from None


def _columns(points: Curve) -> tuple[list[float], list[float]]:
    thin = thinned(points)
    return [x for x, _ in thin], [y for _, y in thin]


def _cells(run: RunFolder) -> tuple[str, ...]:
    started = "" if run.started is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
    return (
        run.name,
        run.status,
        run.layout,
        "" if run.ranks is None else str(run.ranks),
        f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step),
        _number(run.loss, ".4f"),
        _number(run.valid_loss, ".4f"),
        _number(run.tokens_per_second, ".0f"),
        _number(run.goodput, ".1%"),
        str(run.starts or ""),
        started,
    )


def _number(value: float | None, how: str) -> str:
    if value is None:
        return ""
    return format(value, how) if math.isfinite(value) else str(value)


def _page(runs: Sequence[RunFolder], title: str) -> str:
    """Return an HTML page with a table of the runs and one figure per curve."""
    figures = [
        _figure("Training loss", runs, "losses", _loss_label(runs)),
        _figure("Validation loss", runs, "valid_losses", _loss_label(runs)),
        _figure("Speed", runs, "speeds", "tokens/s"),
    ]
    rows = [Row(_cells(run), status=run.status.split()[0], mark=key(number)) for number, run in enumerate(runs)]
    columns = Table(_HEADS, rows, left=[column for column in range(len(_HEADS)) if column not in _NUMBERS], marked=1)
    return page(title, [Section(table=columns), Section(figures=[figure for figure in figures if figure[0]])])


def _figure(caption: str, runs: Sequence[RunFolder], name: str, y_label: str) -> tuple[str, str]:
    lines = [Line(run.name, getattr(run, name), number) for number, run in enumerate(runs)]
    return draw_curves([line for line in lines if line.points], x_label="step", y_label=y_label), caption
