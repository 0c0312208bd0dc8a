"""What the folders of runs say: read from sessions.json, metrics.jsonl and config.yaml, none of which need be whole."""

import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megalite.config.errors import ConfigError
from megalite.config.reading import read_text
from megalite.training.goodput import FILE, Session, goodput_of, read_sessions
from megalite.training.sinks import read_records

METRICS = "metrics.jsonl"
_NO_RUNS_BELOW = {"checkpoints", "tensorboard", "profile", "wandb"}
_SPEED_OVER = 20  # last steps of which the mean speed is shown

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    name: str  # its folder, below the one that was asked for
    status: str  # `running`, `finished`, `stopped`, `failed`, `killed`, `silent for ...` on another host, or `unknown`
    started: float | None  # time of day of its first start
    starts: int
    ranks: int | None
    layout: str
    step: int
    total_steps: int | None
    loss: float | None  # of the last step
    valid_loss: float | None
    tokens_per_second: float | None  # over the last steps
    goodput: float | None
    losses: Curve
    valid_losses: Curve
    speeds: Curve


def find_runs(folder: Path) -> list[RunFolder]:
    """The runs in and below a folder, by name."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}; give a folder with runs in it (their --run-dir), e.g. runs")
    found = [
        read_run(path, str(path.relative_to(folder)) if path != folder else path.resolve().name)
        for path in _run_folders(folder)
    ]
    if not found:
        raise ConfigError(f"there is no run in {folder}: no {METRICS} or {FILE} in it or in a folder below it")
    return found


def _run_folders(folder: Path) -> Iterator[Path]:
    for place, below, files in os.walk(folder):
        if METRICS in files or FILE in files:
            yield Path(place)
        below[:] = sorted(name for name in below if name not in _NO_RUNS_BELOW and not name.startswith("."))


def read_run(path: Path, name: str) -> RunFolder:
    """One run, however little of it is there."""
    train, sessions = read_records(path / METRICS, "train"), read_sessions(path)
    losses, speeds = _curve(train, "loss"), _curve(train, "tokens_per_second")
    valid = _curve(read_records(path / METRICS, "valid"), "valid_loss")
    last = [speed for _, speed in speeds[-_SPEED_OVER:]]
    if sessions and sessions[-1].ended is None:
        sessions[-1].seen = max(sessions[-1].seen, _touched(path))
    goodput = goodput_of(sessions) if sessions else None
    return RunFolder(
        name=name,
        status=status_of(sessions, _touched(path)),
        started=sessions[0].started if sessions else None,
        starts=len(sessions),
        ranks=sessions[-1].ranks if sessions else None,
        layout=sessions[-1].layout if sessions else "",
        step=train[-1]["step"] if train else 0,
        total_steps=_total_steps(path / "config.yaml"),
        loss=losses[-1][1] if losses else None,
        valid_loss=valid[-1][1] if valid else None,
        tokens_per_second=len(last) / sum(1.0 / speed for speed in last) if last and min(last) > 0 else None,
        goodput=goodput.fraction if goodput is not None and goodput.wall > 0.0 else None,
        losses=losses,
        valid_losses=valid,
        speeds=speeds,
    )


def status_of(sessions: Sequence[Session], touched: float) -> str:
    if not sessions:
        return "unknown"
    last = sessions[-1]
    if last.ended is not None:
        return last.ended
    if last.host == platform.node():
        return "running" if _is_alive(last.pid) else "killed"
    quiet = (time.time() - touched) / 60.0
    if quiet < 10.0:
        return "running"
    return f"silent for {quiet:.0f} min" if quiet < 120.0 else f"silent for {quiet / 60.0:.0f} h"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0


def _touched(path: Path) -> float:
    times = [(path / name).stat().st_mtime for name in (METRICS, FILE) if (path / name).exists()]
    return max(times, default=0.0)


def _curve(records: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """(step, value); NaN, which the file spells as a text, stays NaN."""
    found = []
    for record in records:
        try:
            found.append((float(record["step"]), float(record[name])))
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _total_steps(path: Path) -> int | None:
    try:
        steps = yaml.safe_load(read_text(path))["training"]["train_iters"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        return None
    return steps if isinstance(steps, int) else None
