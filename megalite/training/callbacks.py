"""Runs a user's code between the steps: `Trainer(config, callbacks=[...])`."""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError, nearest
from megalite.training.stopping import Ending

Trainer = Any
"""A `training.trainer.Trainer`; its module imports this one."""


def write_line(line: str) -> None:
    """Write a line to standard output, for a script or a notebook."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Callback:
    """Base class with empty hooks; override some of them. Hooks run only on rank 0, so they must not wait for other
    ranks: no collectives, no saving of the model. `trainer.stop(why)` ends the run on all ranks after the step.

    An exception in a hook ends the run like an error of the training: complete checkpoints remain."""

    def on_start(self, trainer: Trainer) -> None:
        """Called when all is built and loaded: `trainer.config` is resolved, and `trainer.progress` is set."""

    def on_step_end(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Called after each step with its line of metrics.jsonl: step, consumed_samples, loss, lr, grad_norm, ..."""

    def on_evaluation(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Called with valid_loss or test_loss in `record`; of cross-entropy also valid_perplexity or test_perplexity."""

    def on_checkpoint(self, trainer: Trainer, path: Path | str) -> None:
        """Called when the checkpoint at `path` is complete; with async_save this is some steps after its own step."""

    def on_end(self, trainer: Trainer, ending: Ending) -> None:
        """Called when the run has finished or stopped and the last checkpoint is written, but not after an error."""


class CallbackError(Exception):
    """A callback has raised the error in `__cause__`."""


class Callbacks:
    """Calls the callbacks of a run in order. It is also a sink of metrics, for the hooks that receive records."""

    def __init__(self, callbacks: Sequence[Callback], trainer: Trainer) -> None:
        for callback in callbacks:
            _require_callback(callback)
        self._callbacks, self._trainer = callbacks if trainer.launch.rank == 0 else (), trainer
        self.start: Callable[[], None] = partial(self._call, "on_start")
        self.checkpoint: Callable[[Path | str], None] = partial(self._call, "on_checkpoint")
        self.end: Callable[[Ending], None] = partial(self._call, "on_end")

    def write(self, record: dict[str, Any]) -> None:
        self._call("on_step_end" if record["kind"] == "train" else "on_evaluation", record)

    def close(self) -> None:
        pass

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self._callbacks:
            try:
                getattr(callback, hook)(self._trainer, *args)
            except Exception as error:
                # Wrap the error: the trainer takes a RuntimeError for a failed collective, and looks for lost peers.
                raise CallbackError(
                    f"{hook} of {type(callback).__name__} has failed: {type(error).__name__}: {error}"
                ) from error


def _require_callback(given: object) -> None:
    """Raise ConfigError unless this is a Callback, all hooks of which exist."""
    if not isinstance(given, Callback):
        raise ConfigError(f"callbacks take instances of subclasses of megalite.Callback, got {given!r}")
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(given):
        if name.startswith("on_") and name not in hooks and callable(inspect.getattr_static(given, name)):
            kind = type(given).__name__
            raise ConfigError(
                f"callback {kind}: {name} is not a hook{nearest(name, hooks)} (one of {', '.join(hooks)})"
            )
