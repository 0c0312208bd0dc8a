"""What a forward pass knows of its microbatch besides the activations."""

from dataclasses import dataclass

import torch

from megalite.tensor_parallel.random import DropoutStream, dropout
from megalite.topology.group import Group


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """One microbatch on its way through the stages.

    `stream` keys the dropout masks; None in evaluation, where nothing is dropped. `rope` holds the cos and sin
    tables of the positions, if the model has them.
    """

    seq_length: int
    stream: DropoutStream | None = None
    rope: tuple[torch.Tensor, torch.Tensor] | None = None

    def hidden_dropout(
        self, x: torch.Tensor, p: float, *, site: str, tp: Group, sequence_parallel: bool
    ) -> torch.Tensor:
        """Dropout on x [s, b, h] (or [s/tp, b, h]); the same elements fall in every layout."""
        if p == 0.0 or self.stream is None:
            return x
        rows = (0, self.seq_length)
        if sequence_parallel:
            rows = (tp.rank * x.shape[0], (tp.rank + 1) * x.shape[0])
        return dropout(x, p, site=site, stream=self.stream, rows=rows, length=self.seq_length)
