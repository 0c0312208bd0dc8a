"""What a forward pass knows of its microbatch besides the activations: positions, dropout, caches, auxiliary losses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megalite.context_parallel.tiles import Visibility
from megalite.kernels.layer_ops import masked_dropout
from megalite.tensor_parallel.random import DropoutStream, keep_mask
from megalite.topology.group import Group

LOAD_BALANCING_LOSS = "load_balancing_loss"
Z_LOSS = "z_loss"
NAMES = (LOAD_BALANCING_LOSS, Z_LOSS)
"""Every term there is, in the order in which they are reported."""


class AuxiliaryLosses:
    """What the layers of this rank have added to the objective in one step, and how they add to it.

    A term is a sum over the sequences or tokens of this rank alone, times `per_sequence` or `per_token`: so plain
    sums over microbatches and ranks give the term of the global batch, as they do for the token loss.

    Args:
        per_sequence: 1 / sequences of the global batch.
        per_token: 1 / tokens of the global batch, masked or not.
        scale: what the step's loss is multiplied with (fp16).
    """

    def __init__(self, per_sequence: float, per_token: float, scale: float, device: torch.device) -> None:
        self.per_sequence, self.per_token, self.scale = per_sequence, per_token, scale
        self.totals = {name: torch.zeros((), dtype=torch.float64, device=device) for name in NAMES}
        """By name, this rank's part of the unscaled term, of all layers and microbatches whose backward has run."""

    def attach(self, x: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        """Add the scalar `value`, already weighted, to the objective; returns x, which must take part in the loss.

        Its gradient enters when that of x passes. That is also when the value is counted: the backward runs once
        for each microbatch, also where recompute runs the forward twice.

        Collectives: none.
        """
        return _Attach.apply(x, value, self, name)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: torch.Tensor, losses: AuxiliaryLosses, name: str) -> torch.Tensor:
        ctx.save_for_backward(value)
        ctx.losses, ctx.name = losses, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        (value,), losses = ctx.saved_tensors, ctx.losses
        losses.totals[ctx.name] += value.detach().double()
        return grad, torch.full_like(value, losses.scale), None, None


@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """One new token per row, behind those that a cache holds; rows may hold different numbers of tokens.

    Args:
        positions: int64 [b]: where each row's new token stands, which is how many are before it.
        first, stop: the columns of the cache that some row sees, the new token's own among them.
        visible: boolean [b, 1, 1, stop - first]: which of them each row sees; None: every row sees all of them.
    """

    positions: torch.Tensor
    first: int
    stop: int
    visible: torch.Tensor | None

    @classmethod
    def after(cls, lengths: Sequence[int], *, window: int | None, device: torch.device) -> "NextTokens":
        """The next token of rows with that many tokens.

        Args:
            window: how many keys a query sees, its own among them; None: all before it.
        """
        first = 0 if window is None else max(0, min(lengths) + 1 - window)
        stop = max(lengths) + 1
        positions = torch.tensor(lengths, device=device)
        visible = None
        if len(set(lengths)) > 1:
            distance = positions.unsqueeze(1) - torch.arange(first, stop, device=device)
            visible = distance >= 0
            if window is not None:
                visible &= distance < window
            visible = visible[:, None, None]
        return cls(positions=positions, first=first, stop=stop, visible=visible)


class KeyValueCache:
    """One entry an attention layer: keys and values [b, groups/tp, room, d], of which each row fills a beginning.

    Room doubles when it is used up, so that on average a token is copied no more than once however long the text gets.
    What no token has filled is zero: hidden keys have no weight, but a weight of zero makes no number of a NaN.

    Args:
        limit: tokens that a row will have at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def fill(self, name: str, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keys and values [b, groups/tp, s, d] of the first s tokens of each row.

        Rows may be padded behind their end: what is there is hidden, until the row's own tokens take its place.
        """
        length = k.shape[2]
        room = min(2 * length, self._limit)
        self._entries[name] = (_with_room(k, length, room), _with_room(v, length, room))

    def append(self, name: str, k: torch.Tensor, v: torch.Tensor, new: NextTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Put in those of one new token per row, [b, groups/tp, 1, d], and return the columns that some row sees."""
        keys, values = self._entries[name]
        held = keys.shape[2]
        if new.stop > held:
            room = min(max(2 * held, new.stop), max(self._limit, new.stop))
            keys, values = _with_room(keys, held, room), _with_room(values, held, room)
            self._entries[name] = (keys, values)
        for entry, tensor in ((keys, k), (values, v)):
            if new.visible is None:
                entry[:, :, new.stop - 1] = tensor[:, :, 0]
            else:
                rows = torch.arange(tensor.shape[0], device=tensor.device)
                entry[rows, :, new.positions] = tensor[:, :, 0]
        return keys[:, :, new.first : new.stop], values[:, :, new.first : new.stop]

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these, which move up."""
        for name, entry in self._entries.items():
            index = torch.tensor(rows, device=entry[0].device)
            self._entries[name] = (entry[0].index_select(0, index), entry[1].index_select(0, index))


def _with_room(tensor: torch.Tensor, used: int, room: int) -> torch.Tensor:
    """The first `used` columns in new memory with `room` of them."""
    b, groups, _, d = tensor.shape
    larger = tensor.new_zeros(b, groups, max(room, used), d)
    larger[:, :, :used] = tensor[:, :, :used]
    return larger


CAUSAL = Visibility()
"""All that came before."""


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """One microbatch on its way through the stages.

    Args:
        seq_length: tokens of the whole sequence, over all cp ranks.
        positions: where in the sequence this rank's rows are, int64 [s/cp], ascending.
        position_ids: what position embeddings count: `positions`, or [s/cp, b] where each document begins at 0.
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


def document_position_ids(positions: torch.Tensor, document_starts: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """Positions [s] counted from the start of each one's document: [s, b] for b samples' starts."""
    columns = []
    for starts in document_starts:
        first = torch.tensor(starts, dtype=positions.dtype, pin_memory=positions.is_cuda)
        first = first.to(positions.device, non_blocking=True)
        columns.append(positions - first[torch.searchsorted(first, positions, right=True) - 1])
    return torch.stack(columns, dim=1)
