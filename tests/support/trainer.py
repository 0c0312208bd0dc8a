"""A `Trainer` on a replica that a test has built, on the ranks of the pool."""

from collections.abc import Callable
from contextlib import ExitStack

from megalite.tokenizers.base import Tokenizer
from megalite.training.replica import Replica
from megalite.training.stopping import StopRequests
from megalite.training.trainer import Trainer


class ReplicaTrainer(Trainer):
    """Makes no process groups and leaves no exit.json.

    Args:
        on_open: called with the trainer once data, checkpoint and reports are open.
    """

    def __init__(
        self,
        replica: Replica,
        log: Callable[[str], None] = lambda line: None,
        stops: StopRequests | None = None,
        on_open: Callable[["ReplicaTrainer"], None] = lambda trainer: None,
    ) -> None:
        super().__init__(replica.config, log=log, stops=stops)
        self.replica, self.log, self._on_open = replica, log, on_open
        self._run_dir, self._roll = None, None

    def _build(self, stack: ExitStack) -> Tokenizer | None:
        return None

    def _open(self, stack: ExitStack, tokenizer: Tokenizer | None) -> None:
        super()._open(stack, tokenizer)
        self._on_open(self)
