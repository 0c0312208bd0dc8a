"""A callback that stops a run which no longer learns, and a writer of metrics that keeps the best validation loss."""

import json
import math
from pathlib import Path
from typing import Any

from megalite import WRITERS, Callback, RunConfig, Trainer


class EarlyStop(Callback):
    """Ends the run after so many evaluations without a better loss: `Trainer(config, callbacks=[EarlyStop(3)]).fit()`."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.worse = patience, math.inf, 0

    def on_evaluation(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if record["kind"] != "valid":
            return
        self.worse = 0 if record["valid_loss"] < self.best else self.worse + 1
        self.best = min(self.best, record["valid_loss"])
        if self.worse >= self.patience:
            trainer.stop(f"no better validation loss than {self.best:.4f} in {self.patience} evaluations")


@WRITERS.register("best-loss")
class BestLoss:
    """`--metrics best-loss` writes <run_dir>/best.json. A run that resumes keeps what it had."""

    def __init__(self, config: RunConfig, *, step: int) -> None:
        assert config.logging.run_dir is not None, "give --run-dir"
        self.path = Path(config.logging.run_dir) / "best.json"
        self.best = json.loads(self.path.read_text())["valid_loss"] if step and self.path.exists() else math.inf

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "valid" and record["valid_loss"] < self.best:
            self.best = record["valid_loss"]
            self.path.write_text(json.dumps(record))

    def close(self) -> None:
        pass
