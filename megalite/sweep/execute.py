"""Launches the runs of a sweep and keeps what came of each."""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.files import write_durably
from megalite.config import files
from megalite.config.describe import replace
from megalite.sweep.candidates import Run
from megalite.sweep.launchers import CONFIG, Launched, Launcher
from megalite.sweep.results import Result, Store, outcome, refused, steps_made

_LOOK_SECONDS = 0.2  # between two looks at what is under way


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A run under way."""

    run: Run
    steps: int
    seconds: float


@dataclass(frozen=True)
class _Active:
    run: Run
    folder: Path
    launched: Launched


Observer = Callable[[Sequence[Progress], Result | None], None]
"""Called with what is under way, and with a result when there is a new one."""


def launchable(runs: Sequence[Run], launcher: Launcher) -> tuple[Run, ...]:
    """The runs, with those refused that the launcher cannot start."""
    return tuple(
        run if run.refused is not None else dataclasses.replace(run, refused=launcher.fault(run)) for run in runs
    )


def execute(
    runs: Sequence[Run],
    store: Store,
    launcher: Launcher,
    *,
    warm_up: int,
    timeout: float,
    limit: int | None,
    retry: bool,
    observe: Observer,
) -> None:
    """Run what has no result yet, in order; whatever ends it, nothing is left running.

    The first `warm_up` steps of a run are not measured; a run may take `timeout` seconds; at most `limit` are launched;
    `retry` runs again what did not end well. Raises ConfigError if a run cannot be started at all.
    """
    for run in runs:
        if run.refused is not None:
            store.append(refused(run))
    waiting = [run for run in runs if run.refused is None and not store.is_done(run.key, retry=retry)][:limit]
    waiting.reverse()
    active: list[_Active] = []
    try:
        while waiting or active:
            while waiting and len(active) < launcher.at_once:
                run = waiting.pop()
                folder = _prepare(run, store, launcher)
                active.append(_Active(run, folder, launcher.start(run, folder, timeout=timeout)))
            for each in list(active):
                result = _look(each, warm_up=warm_up, timeout=timeout)
                if result is not None:
                    active.remove(each)
                    store.append(result)
                    observe(_progress(active), result)
            observe(_progress(active), None)
            time.sleep(_LOOK_SECONDS)
    finally:
        for each in active:
            each.launched.end()


def _prepare(run: Run, store: Store, launcher: Launcher) -> Path:
    """An empty folder with the run's config."""
    folder = store.run_folder(run)
    if folder.exists():
        launcher.clear(folder)
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    config = replace(run.config, run_dir=str(folder))
    write_durably(folder / CONFIG, files.dump(config).encode())
    return folder


def _look(active: _Active, *, warm_up: int, timeout: float) -> Result | None:
    """The result of a run that has ended, or that is now ended for taking too long."""
    status, seconds = active.launched.poll(), active.launched.seconds()
    timed_out = status is None and seconds > timeout
    if status is None and not timed_out:
        return None
    if timed_out:
        active.launched.end()
    return outcome(
        active.run,
        active.folder,
        status=os.EX_OK if status is None else status,
        timed_out=timeout if timed_out else None,
        seconds=seconds,
        warm_up=warm_up,
    )


def _progress(active: Sequence[_Active]) -> list[Progress]:
    return [Progress(run=each.run, steps=steps_made(each.folder), seconds=each.launched.seconds()) for each in active]
