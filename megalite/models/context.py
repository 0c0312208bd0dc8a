"""What a forward pass knows of its microbatch besides the activations."""

from dataclasses import dataclass

import torch

from megalite.context_parallel.tiles import Visibility
from megalite.kernels.dropout import masked_dropout
from megalite.models.auxiliary import AuxiliaryLosses
from megalite.models.cache import NextTokens
from megalite.tensor_parallel.random import DropoutStream, keep_mask
from megalite.topology.group import Group

CAUSAL = Visibility()
"""All that came before."""


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """One microbatch on its way through the stages.

    Args:
        seq_length: tokens of the whole sequence, over all cp ranks.
        positions: where in the sequence this rank's rows are, int64 [s/cp], ascending.
        position_ids: what position embeddings count: `positions`, or [s/cp, b] where documents begin anew.
        stream: keys the dropout masks; None in evaluation, where nothing is dropped.
        rope: cos and sin of the position ids, [s/cp, b or 1, 1, d/2], if the model has them.
        visibility: which keys a query sees.
        auxiliary: where layers add terms to the objective; None in evaluation.
        generating: the tokens after these are not known yet, so nothing may depend on how many there will be:
            experts take every token, whatever their capacity.
        next_tokens: the rows are one token each, behind those that a cache holds.
    """

    seq_length: int
    positions: torch.Tensor
    position_ids: torch.Tensor
    stream: DropoutStream | None = None
    rope: tuple[torch.Tensor, torch.Tensor] | None = None
    visibility: Visibility = CAUSAL
    auxiliary: AuxiliaryLosses | None = None
    generating: bool = False
    next_tokens: NextTokens | None = None

    def keep_mask(
        self, x: torch.Tensor, p: float, *, site: str, tp: Group, sequence_parallel: bool
    ) -> torch.Tensor | None:
        """What stays of x [s/cp, b, h], or split over tp as well; None: everything. The same elements fall in every
        layout."""
        if p == 0.0 or self.stream is None:
            return None
        rows = self.positions.tensor_split(tp.size)[tp.rank] if sequence_parallel else self.positions
        return keep_mask(x, p, site=site, stream=self.stream, rows=rows, length=self.seq_length)

    def hidden_dropout(
        self, x: torch.Tensor, p: float, *, site: str, tp: Group, sequence_parallel: bool
    ) -> torch.Tensor:
        """Dropout on x: what falls is 0, the rest scaled by 1/(1-p); keeps one byte an element."""
        keep = self.keep_mask(x, p, site=site, tp=tp, sequence_parallel=sequence_parallel)
        return x if keep is None else masked_dropout(x, keep, p)


def document_position_ids(
    positions: torch.Tensor, document_starts: tuple[tuple[int, ...], ...]
) -> torch.Tensor:
    """Positions [s] counted from the start of each one's document: [s, b] for b samples' starts."""
    columns = []
    for starts in document_starts:
        first = torch.tensor(starts, dtype=positions.dtype, pin_memory=positions.is_cuda)
        first = first.to(positions.device, non_blocking=True)
        columns.append(positions - first[torch.searchsorted(first, positions, right=True) - 1])
    return torch.stack(columns, dim=1)
