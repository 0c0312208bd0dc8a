"""`megalite sweep`: run many configurations for a few steps each and compare them."""

import dataclasses
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TextIO

from megalite.checkpoint.files import replace_durably
from megalite.cli.display import ProgressLine, Redrawn, short, table
from megalite.cli.output import Stopped, first_signal_raises, show
from megalite.config.errors import ConfigError
from megalite.config.numbers import duration, format_bytes
from megalite.config.registry import gc_paused, imported
from megalite.partition.memory import is_built_without_limit
from megalite.planner.cost.calibrate import Machine
from megalite.planner.hardware import require_new_file
from megalite.sweep.candidates import Expansion, Run, check_all, expand, read_machine, usable_bytes
from megalite.sweep.execute import Launcher, LocalLauncher, Progress, execute, launchable
from megalite.sweep.report import REPORT, calibrate, report, summary
from megalite.sweep.results import RESULTS, TABLE, Result, Store, refused
from megalite.sweep.spec import SweepSpec, read_spec

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Not inherited by runs: a run with these variables would join another job."""
_LAUNCHERS = {
    "sbatch": "megalite.sweep.execute:SbatchLauncher",
    "ray": "megalite.sweep.clusters:RayLauncher",
    "kubernetes": "megalite.sweep.clusters:KubernetesLauncher",
}
_HEAD = ("configuration", "ranks", "predicted", "measured", "tokens/s", "memory", "status")
_FREE_LINES = 4  # lines of a terminal that the table leaves free


def run(flags: Namespace) -> int:
    """Run the sweep. Return 0 if every run has a result."""
    if flags.output is None and not flags.dry_run:
        raise ConfigError("--output is missing; give a folder for the results, e.g. --output runs/sweep")
    spec = read_spec(flags.sweep)
    if flags.timeout is not None:
        spec = dataclasses.replace(spec, timeout=flags.timeout)
    machine = read_machine(spec.cluster, spec.stack)
    if flags.calibrate is not None:
        require_new_file(flags.calibrate, "--calibrate")
        if machine is None:
            raise ConfigError(f"--calibrate has no effect without cluster in {spec.path}; add e.g. cluster: cpu-box")
    expansion = expand(spec)
    launcher = _launcher(flags.launcher, spec)
    runs = launchable(_checked(expansion, spec, machine), launcher)
    words = [f"{spec.path}: {len(runs)} configurations of {spec.steps} steps"]
    if expansion.left_out:
        words.append(f"{expansion.left_out} left out by exclude and only")
    if expansion.ignored:
        words.append(f"the runs ignore {', '.join(expansion.ignored)} of the base")
    room = usable_bytes(spec.memory_limit, machine)
    if room is not None and any(is_built_without_limit(each.config) for each in expansion.candidates):
        words.append(f"auto builds schedules within {format_bytes(room)} per rank")
    show("; ".join(words))
    impossible = [f"{run.label}: {run.refused}" for run in runs if run.refused is not None]
    if flags.strict and impossible:
        raise ConfigError(f"{len(impossible)} of {len(runs)} configurations are refused: {impossible[0]}")
    if flags.dry_run:
        shown = {run.key: refused(run) for run in runs if run.refused is not None}
        show("\n".join(format_table(runs, shown)))
        return 0
    for line in impossible:
        show(f"refused: {line}")
    if len(impossible) == len(runs):
        raise ConfigError(f"none of {len(runs)} configurations can run; {impossible[0]}")
    with closing(Store.open(flags.output, spec, flags.launcher)) as store:
        if not flags.report_only:
            _execute(flags, spec, runs, store, launcher)
        _write(spec, runs, store)
        if flags.calibrate is not None:
            assert machine is not None
            source = f"steps of {spec.path.name}"
            show(calibrate(runs, store.results, machine, flags.calibrate, source=source))
    written = [f"wrote {store.folder / name}" for name in (RESULTS, TABLE, REPORT)]
    show("\n".join([*summary(runs, store.results), *written]))
    return 0


def _checked(expansion: Expansion, spec: SweepSpec, machine: Machine | None) -> tuple[Run, ...]:
    count = len(expansion.candidates)

    def observe(done: int) -> None:
        line.update(done, count, (), lambda _: f"{done} of {count} configurations checked")

    with gc_paused(), closing(ProgressLine()) as line:
        return check_all(expansion, memory_limit=spec.memory_limit, machine=machine, observe=observe)


def _launcher(name: str, spec: SweepSpec) -> Launcher:
    if name != "local":
        return imported(_LAUNCHERS[name])(getattr(spec, name), environment=spec.environment, program=spec.program)
    inherited = {name: value for name, value in os.environ.items() if name not in _TORCHRUN_VARIABLES}
    return LocalLauncher(environment=inherited | dict(spec.environment), program=spec.program)


def _execute(flags: Namespace, spec: SweepSpec, runs: Sequence[Run], store: Store, launcher: Launcher) -> None:
    live = LiveTable(runs, store.results, steps=spec.steps, out=sys.stdout)

    def observe(progress: Sequence[Progress], result: Result | None) -> None:
        if result is not None:
            store.write_table(runs)
        live.update(progress, result)

    with first_signal_raises():
        try:
            execute(
                runs,
                store,
                launcher,
                warm_up=spec.warm_up_steps,
                timeout=spec.timeout,
                limit=flags.limit,
                retry=flags.retry,
                observe=observe,
            )
        except Stopped as stopped:
            _write(spec, runs, store)
            stopped.add_note("the same command continues from here")
            raise
        finally:
            live.close()


def _write(spec: SweepSpec, runs: Sequence[Run], store: Store) -> None:
    store.write_table(runs)
    page = report(f"Sweep {spec.path.name}", runs, store.results)
    replace_durably(store.folder / REPORT, page.encode())


def format_table(
    runs: Sequence[Run], results: Mapping[str, Result], progress: Sequence[Progress] = (), steps: int = 0
) -> list[str]:
    """Return a heading and a line for each run."""
    running = {each.run.key: each for each in progress}
    rows = [_row(run, results.get(run.key), running.get(run.key), steps) for run in runs]
    return table([_HEAD, *rows], right=range(1, len(_HEAD) - 1))


def _row(run: Run, result: Result | None, progress: Progress | None, steps: int) -> tuple[str, ...]:
    """Return the cells of a run. Predicted memory, of the fullest rank, has a ~ and is shown if none was measured."""
    predicted, memory = "", ""
    if run.predicted is not None:
        predicted = duration(run.predicted.step_seconds)
        memory = "~" + format_bytes(run.predicted.memory_bytes)
    if result is not None and result.memory_bytes and progress is None:
        memory = format_bytes(result.memory_bytes)
    shown = None if progress is not None else result
    return (
        short(run.label),
        str(run.ranks),
        predicted,
        duration(shown.step_seconds if shown else None),
        f"{shown.tokens_per_second:.0f}" if shown and shown.tokens_per_second else "",
        memory,
        short(_status(run, shown, progress, steps)),
    )


def _status(run: Run, result: Result | None, progress: Progress | None, steps: int) -> str:
    if progress is not None:
        return f"step {progress.steps}/{steps}, {progress.seconds:.0f} s"
    if run.refused is not None:
        return f"refused: {run.refused}"
    if result is None:
        return "waiting"
    return result.status if result.error is None else f"{result.status}: {result.error}"


class LiveTable:
    """Shows the progress of a sweep: on a terminal a table that is redrawn, otherwise a line for each result.

    `results`: results so far; the caller adds new ones before it calls `update`. `steps`: steps of each run."""

    def __init__(self, runs: Sequence[Run], results: Mapping[str, Result], *, steps: int, out: TextIO) -> None:
        self._runs, self._results, self._steps, self._out = runs, results, steps, out
        self._number = {run.key: number for number, run in enumerate(runs, 1)}
        self._screen, self.close = (screen := Redrawn(out)), screen.close
        self._shown: list[str] = []

    def update(self, progress: Sequence[Progress], result: Result | None) -> None:
        if not self._out.isatty():
            if result is not None:
                self._line(result)
            return
        lines = self._window(progress)
        if lines != self._shown:
            self._screen.show("\n".join(lines))
        self._shown = lines

    def _line(self, result: Result) -> None:
        number = self._number[result.key]
        run = self._runs[number - 1]
        measured = ""
        if result.step_seconds is not None and result.tokens_per_second is not None:
            measured = f" {duration(result.step_seconds)} per step, {result.tokens_per_second:.0f} tokens/s"
            if run.predicted is not None and run.predicted.step_seconds is not None:
                measured += f", predicted {duration(run.predicted.step_seconds)}"
        why = f" ({result.error})" if result.error else ""
        line = f"{number}/{len(self._runs)} {run.label}: {result.status}{measured}{why}"
        print(line, file=self._out, flush=True)

    def _window(self, progress: Sequence[Progress]) -> list[str]:
        """Return the table, or the part around the active run if the table is longer than the screen."""
        head, *rows = format_table(self._runs, self._results, progress, self._steps)
        active = {each.run.key for each in progress}
        at = next((index for index, run in enumerate(self._runs) if run.key in active), len(rows))
        room = max(shutil.get_terminal_size().lines - _FREE_LINES, 1)
        first = min(max(at - room // 2, 0), max(len(rows) - room, 0))
        return [head, *rows[first : first + room]]
