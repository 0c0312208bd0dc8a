"""Small sweeps, shared by several tests."""

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megalite.planner.cost.calibrate import Machine
from megalite.sweep.candidates import Run, check_all, expand
from megalite.sweep.execute import NodesLauncher, execute
from megalite.sweep.results import OK, Result, Store
from megalite.sweep.spec import SweepSpec, read_spec

MODEL: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
MODEL |= {"seq_length": 16, "global_batch_size": 8, "mock_data": True, "device": "cpu"}
GRID: dict[str, Any] = {"tp": [1, 2], "pp": [1, 2]}


def write_sweep(folder: Path, **keys: Any) -> Path:
    """Write a sweep.yaml of the tiny model; `keys` override a grid of four layouts on 2 ranks, None removes a key."""
    tree = {"settings": MODEL, "ranks": 2, "grid": GRID, "steps": 3, "warm_up_steps": 1} | keys
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value is not None}, sort_keys=False))
    return path


def read_runs(
    path: Path, *, machine: Machine | None = None, memory_limit: float | None = None
) -> tuple[SweepSpec, tuple[Run, ...]]:
    """The sweep of a file and its validated runs."""
    spec = read_spec(path)
    return spec, check_all(expand(spec), memory_limit=memory_limit, machine=machine)


def results_of(folder: Path, runs: tuple[Run, ...], launcher: NodesLauncher, *, timeout: float) -> dict[str, Result]:
    """Results of the sweep of `write_sweep` in the folder, run to its end."""
    store = Store.open(folder / "out", read_runs(folder / "sweep.yaml")[0], "test")
    keys: dict[str, Any] = {"warm_up": 1, "timeout": timeout, "limit": None, "retry": False}
    try:
        execute(runs, store, launcher, observe=lambda progress, result: None, **keys)
    finally:
        store.close()
    return store.results


def put_programs(folder: Path, programs: Mapping[str, str]) -> None:
    """Write short shell programs, by name."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(stat.S_IRWXU)


def measured(run: Run, seconds: float, **changes: Any) -> Result:
    """A successful result with steps of `seconds`."""
    facts = {"key": run.key, "settings": dict(run.settings), "ranks": run.ranks, "status": OK, "steps": 5}
    facts |= {"step_seconds": seconds, "step_seconds_low": 0.9 * seconds, "step_seconds_high": 1.1 * seconds}
    facts |= {"tokens_per_second": run.tokens_per_step / seconds, "loss": 4.1, "memory_bytes": 3 << 27, "seconds": 10.0}
    return Result(**{**facts, **changes})
