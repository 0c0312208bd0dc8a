"""Run a `Trainer` in the test's process, or on a replica built by a test on ranks of the pool."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.tokenizers.base import Tokenizer
from megalite.training.replica import Replica
from megalite.training.stopping import RunFolder, StopRequests
from megalite.training.trainer import Trainer


def fit(log: Callable[[str], None] | None = None, **settings: Any) -> list[str]:
    """Train in this process. Returns the log lines, unless `log` receives them."""
    lines: list[str] = []
    Trainer(replace(RunConfig(), **settings), explicit=frozenset(), log=log or lines.append).fit()
    return lines


class ReplicaTrainer(Trainer):
    """A trainer of an existing replica; creates no process groups and writes no exit.json.

    Args:
        on_open: called with the trainer once data, checkpoint and reports are open."""

    def __init__(
        self,
        replica: Replica,
        log: Callable[[str], None] = lambda line: None,
        stops: StopRequests | None = None,
        on_open: Callable[["ReplicaTrainer"], None] = lambda trainer: None,
    ) -> None:
        super().__init__(replica.config, log=log, stops=stops)
        self.replica, self.log, self._on_open = replica, log, on_open
        self._run_folder, self._roll = RunFolder(None), None

    def _build(self, stack: ExitStack) -> Tokenizer | None:
        return None

    def _open(self, stack: ExitStack, tokenizer: Tokenizer | None) -> None:
        super()._open(stack, tokenizer)
        self._on_open(self)
