"""Runs on this machine, one after the other, through torchrun."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.sweep.check import Run
from megalite.sweep.launchers import guard
from megalite.sweep.launchers.base import CONFIG, training_command
from megalite.sweep.launchers.processes import END_SECONDS, kill_below
from megalite.sweep.outcome import LOG


class LocalLauncher:
    """Starts `torchrun --standalone`; a run ends when the sweep does, in whatever way that ends.

    Args:
        environment: variables of the runs.
        program: script that trains, in place of `megalite train`.
    """

    at_once = 1

    def __init__(self, *, environment: Mapping[str, str], program: Path | None = None) -> None:
        self._environment = dict(environment)
        self._program = program

    def fault(self, run: Run) -> str | None:
        """None: torchrun starts any number of ranks."""
        return None

    def start(self, run: Run, folder: Path, *, timeout: float) -> "LocalRun":
        """Start a run; see `Launcher`."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ranks = ["--nproc-per-node", str(run.ranks)]
        command = [*torchrun, *ranks, *training_command(folder / CONFIG, self._program)]
        try:
            return LocalRun(command, folder / LOG, environment=self._environment)
        except OSError as error:
            raise ConfigError(f"cannot start {run.label}: {error.strerror}: {error.filename}") from None

    def clear(self, folder: Path) -> None:
        """Nothing: its runs end with the sweep."""


class LocalRun:
    """A command under way, below a guard that ends with this process and leaves nothing behind.

    Args:
        command: and its arguments.
        log: file for all that it says.
        environment: all of its variables.
    """

    def __init__(self, command: Sequence[str], log: Path, *, environment: Mapping[str, str]) -> None:
        with log.open("wb") as file:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", guard.__name__, str(os.getpid()), *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the sweep, which ends its runs in order
            )
        self._started = time.monotonic()

    def poll(self) -> int | None:
        """Exit status of the command."""
        return self._guard.poll()

    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def end(self) -> None:
        """End the command and all that it has started."""
        self._guard.terminate()
        try:
            self._guard.wait(3 * END_SECONDS)
        except subprocess.TimeoutExpired:
            kill_below(self._guard.pid)
            self._guard.kill()
            self._guard.wait()
