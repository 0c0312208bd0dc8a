"""What the sweep asks of a launcher."""

from pathlib import Path
from typing import Protocol

from megalite.sweep.check import Run

CONFIG = "config.yaml"
"""In a run's folder: what it is started with. Training writes it again, resolved."""


class Launched(Protocol):
    """A run that has been started."""

    def poll(self) -> int | None:
        """Exit status, or None while it is under way."""

    def seconds(self) -> float:
        """That it has been running; waiting in a queue does not count."""

    def end(self) -> None:
        """End it with all its processes; returns when they are gone."""


class Launcher(Protocol):
    """Starts runs."""

    at_once: int
    """Runs that may be under way at one time."""

    def fault(self, run: Run) -> str | None:
        """Why it cannot start this run, or None."""

    def start(self, run: Run, folder: Path, *, timeout: float) -> Launched:
        """Start a run whose config is in `folder`, and whose log is to be there.

        Raises:
            ConfigError: it cannot be started at all: no such program, or a queue that takes no jobs.
        """

    def clear(self, folder: Path) -> None:
        """End what a sweep that was killed may have left at work in a run's folder."""


def training_command(config: Path, program: Path | None) -> list[str]:
    """What torchrun is to start, with its arguments."""
    start = ["-m", "megalite.cli.main", "train"] if program is None else [str(program.resolve())]
    return [*start, "--config", str(config)]
