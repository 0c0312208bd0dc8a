"""`megalite sweep`: run many configurations for a few steps each and compare them."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.cli.failures import command
from megalite.cli.output import show, tell
from megalite.cli.parser import Parser
from megalite.cli.stopping import Stopped, first_signal_raises
from megalite.cli.sweep_table import LiveTable, format_table
from megalite.config.errors import ConfigError
from megalite.sweep.candidates import Run, check_all, expand, read_machine, refusals
from megalite.sweep.execute import Progress, execute, launchable
from megalite.sweep.launchers import Launcher, LocalLauncher, SbatchLauncher
from megalite.sweep.report import REPORT, calibrate, refuse_taken, summary, write_report
from megalite.sweep.results import RESULTS, TABLE, Result, Store, refused
from megalite.sweep.spec import SweepSpec, read_spec

DONE = 0
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that would make a rank of something else of a run."""

_DESCRIPTION = """Check every configuration of a grid, a list or a plan, train each for a few steps, and compare speed and memory,
measured and predicted. What is done is not run again: the same command goes on after a kill. docs/sweep.md explains all of
it."""


@command("megalite sweep")
def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if every run has a result, 2 after a ConfigError, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    _check_flags(arguments)
    try:
        return _sweep(arguments)
    except Stopped as stopped:
        goes_on = "; the same command goes on from here" if arguments.output is not None else ""
        tell(f"{stopped.how}{goes_on}")
        return stopped.status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "megalite sweep",
        _DESCRIPTION,
        examples=("megalite sweep sweep.yaml --dry-run", "megalite sweep sweep.yaml --output runs/sweep"),
    )
    parser.add_argument("sweep", type=Path, metavar="SWEEP.yaml", help="which configurations, and for how long")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="results and runs; goes on if it is there")
    parser.add_argument("--dry-run", action="store_true", help="check and predict all, run nothing")
    parser.add_argument("--strict", action="store_true", help="stop if any configuration is refused")
    parser.add_argument(
        "--launcher", choices=("local", "sbatch"), default="local", help="torchrun here, or jobs (default local)"
    )
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="of a run; over the file's (default 300)")
    parser.add_argument("--limit", type=_whole, metavar="N", help="launch at most N runs this time")
    parser.add_argument("--retry", action="store_true", help="run again what did not end well")
    parser.add_argument("--report-only", action="store_true", help="write table and report from the results there are")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="CLUSTER.yaml",
        help="fit cluster and stack to what was measured, into new files",
    )
    return parser


def _whole(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"takes a whole number of at least 1, such as 4, got {word}")
    return int(word)


def _seconds(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"takes a number of seconds such as 300, got {word}")
    return value


def _check_flags(arguments: argparse.Namespace) -> None:
    """No flag is without effect, and there is a place for the results."""
    runs_nothing = "--dry-run" if arguments.dry_run else "--report-only" if arguments.report_only else None
    given = {
        "--timeout": arguments.timeout is not None,
        "--limit": arguments.limit is not None,
        "--retry": arguments.retry,
    }
    if arguments.dry_run:
        given |= {"--report-only": arguments.report_only, "--calibrate": arguments.calibrate is not None}
    for flag, is_given in given.items():
        if is_given and runs_nothing is not None:
            raise ConfigError(f"{flag} has no effect with {runs_nothing}; remove one of them")
    if arguments.output is None and not arguments.dry_run:
        raise ConfigError("--output is missing; give a folder for the results, e.g. --output runs/sweep")


def _sweep(arguments: argparse.Namespace) -> int:
    spec = read_spec(arguments.sweep)
    if arguments.timeout is not None:
        spec = dataclasses.replace(spec, timeout=arguments.timeout)
    machine = read_machine(spec.cluster, spec.stack)
    if arguments.calibrate is not None:
        refuse_taken(arguments.calibrate)
        if machine is None:
            raise ConfigError(f"--calibrate has no effect without cluster in {spec.path}; add e.g. cluster: cpu-box")
    expansion = expand(spec)
    launcher = _launcher(arguments.launcher, spec)
    runs = launchable(check_all(expansion, memory_limit=spec.memory_limit, machine=machine), launcher)
    print(_opening(spec, runs, left_out=expansion.left_out, ignored=expansion.ignored), flush=True)
    impossible = list(refusals(runs))
    if arguments.strict and impossible:
        raise ConfigError(f"{len(impossible)} of {len(runs)} configurations are refused: {impossible[0]}")
    if arguments.dry_run:
        shown = {run.key: refused(run) for run in runs if run.refused is not None}
        show("\n".join(format_table(runs, shown)))
        return DONE
    for line in impossible:
        print(f"refused: {line}", flush=True)
    if len(impossible) == len(runs):
        raise ConfigError(f"none of {len(runs)} configurations can run; {impossible[0]}")
    store = Store.open(arguments.output, spec, arguments.launcher)
    try:
        if not arguments.report_only:
            _execute(arguments, spec, runs, store, launcher)
        _write(spec, runs, store)
        if arguments.calibrate is not None:
            assert machine is not None
            source = f"steps of {spec.path.name}"
            show(calibrate(runs, store.results, machine, arguments.calibrate, source=source))
    finally:
        store.close()
    show("\n".join([*summary(runs, store.results), *_written(store)]))
    return DONE


def _opening(spec: SweepSpec, runs: Sequence[Run], *, left_out: int, ignored: Sequence[str]) -> str:
    words = [f"{spec.path}: {len(runs)} configurations of {spec.steps} steps"]
    if left_out:
        words.append(f"{left_out} left out by exclude and only")
    if ignored:
        words.append(f"the runs do not go by {', '.join(ignored)} of the base")
    return "; ".join(words)


def _launcher(name: str, spec: SweepSpec) -> Launcher:
    if name == "sbatch":
        return SbatchLauncher(spec.sbatch, environment=spec.environment, program=spec.program)
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_TORCHRUN}
    return LocalLauncher(environment=inherited | dict(spec.environment), program=spec.program)


def _execute(
    arguments: argparse.Namespace, spec: SweepSpec, runs: Sequence[Run], store: Store, launcher: Launcher
) -> None:
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
                limit=arguments.limit,
                retry=arguments.retry,
                observe=observe,
            )
        except Stopped:
            _write(spec, runs, store)
            raise


def _write(spec: SweepSpec, runs: Sequence[Run], store: Store) -> None:
    store.write_table(runs)
    write_report(store.folder / REPORT, f"Sweep {spec.path.name}", runs, store.results)


def _written(store: Store) -> list[str]:
    return [f"wrote {store.folder / name}" for name in (RESULTS, TABLE, REPORT)]


if __name__ == "__main__":
    sys.exit(main())
