"""Code of users' own that runs between the steps: `Trainer(config, callbacks=[...])`."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megalite.training.stopping import Ending

Trainer = Any
"""A `training.trainer.Trainer`; its module imports this one."""


def write_line(line: str) -> None:
    """On standard output, for a script or a notebook."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Callback:
    """Override what you need. All of it is called on rank 0 alone, so nothing in it may wait for other ranks: no
    collective, no saving of the model. `trainer.stop(why)` ends the run on all ranks after the step.

    An error in a callback ends the run, as one of the training would: what was saved is kept.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Everything is built and loaded: `trainer.config` is resolved, `trainer.progress` where the run continues."""

    def on_step_end(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """A step has been made; `record` is its line of metrics.jsonl: step, consumed_samples, loss, lr, grad_norm, ..."""

    def on_evaluation(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """`record` has valid_loss and valid_perplexity, or test_loss and test_perplexity."""

    def on_checkpoint(self, trainer: Trainer, path: Path | str) -> None:
        """A checkpoint is complete, in the folder `path` or at that address. With async_save this comes some steps after its own."""

    def on_end(self, trainer: Trainer, ending: Ending) -> None:
        """The run has come to its end in order, finished or stopped; the last checkpoint is written. An error skips this."""


class CallbackError(Exception):
    """A callback has failed; its own error is the cause."""


class Callbacks:
    """Those of a run, in their order; as a sink of metrics, what records tell."""

    def __init__(self, callbacks: Sequence[Callback], trainer: Trainer) -> None:
        self._callbacks, self._trainer = callbacks, trainer
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
                # Not as it is: a RuntimeError would be taken for that of a collective, and other ranks be asked.
                raise CallbackError(
                    f"{hook} of {type(callback).__name__} has failed: {type(error).__name__}: {error}"
                ) from error
