"""Efficiencies of a cluster and constants of a stack, fitted to what a sweep measured."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.planner.cost.calibrate import Measured, fit
from megalite.planner.hardware.cluster import save_cluster
from megalite.planner.hardware.stack import save_stack
from megalite.sweep.check import Run
from megalite.sweep.judgement import judge
from megalite.sweep.predict import Machine
from megalite.sweep.results import Result

FEWEST = 3
"""Runs that a fit needs."""


def stack_file(cluster: Path) -> Path:
    """Where the fitted stack goes: beside the cluster's file, `mine.yaml` -> `mine-stack.yaml`."""
    return cluster.with_name(f"{cluster.stem}-stack.yaml")


def refuse_taken(path: Path) -> None:
    """Raise ConfigError if a fit could not be written to `path`: known before hours of runs, not after them."""
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--calibrate: {path} must end in .yaml, e.g. {path.name or 'mine'}.yaml")
    for each in (path, stack_file(path)):
        if each.exists():
            raise ConfigError(f"--calibrate: {each} is there already; give the name of a new file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--calibrate: there is no folder {path.parent}; give a file in one that exists")


def calibrate(
    runs: Sequence[Run], results: Mapping[str, Result], machine: Machine, path: Path, *, source: str
) -> str:
    """Fit, and write the cluster to `path` and the stack to `stack_file(path)`; returns what it did, for people.

    Args:
        source: what the measurements are, for the provenance of the figures.

    Raises:
        ConfigError: too few runs were measured, or a file cannot be written.
    """
    pairs = judge(runs, results).pairs
    if len(pairs) < FEWEST:
        raise ConfigError(
            f"--calibrate needs {FEWEST} runs or more that ended well, there are {len(pairs)}; run more configurations"
        )
    rows = [Measured(pair.run.config, pair.measured_seconds) for pair in pairs]
    found = fit(rows, machine.cluster, machine.stack, source=source)
    stack_path = stack_file(path)
    save_cluster(dataclasses.replace(found.cluster, name=path.stem), path)
    save_stack(dataclasses.replace(found.stack, name=stack_path.stem), stack_path)
    before = statistics.fmean(abs(pair.error) for pair in pairs)
    after = statistics.fmean(map(abs, found.errors))
    return (
        f"Fitted to {len(rows)} runs: mean error of the seconds of a step {100 * before:.1f} % before, {100 * after:.1f} % "
        f"after, on the same runs.\nwrote {path}\nwrote {stack_path}"
    )
