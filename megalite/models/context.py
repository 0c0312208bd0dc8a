"""What a forward pass knows of its microbatch besides the activations: positions, dropout, caches, auxiliary losses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.context_parallel.tiles import Visibility
from megalite.kernels.bases import Function
from megalite.tensor_parallel.random import DropoutStream, keep_mask
from megalite.topology.group import Group
from megalite.topology.layout import Spans

LOAD_BALANCING_LOSS = "load_balancing_loss"
Z_LOSS = "z_loss"
MTP_LOSS = "mtp_loss"
NAMES = (LOAD_BALANCING_LOSS, Z_LOSS, MTP_LOSS)  # every term there is, in the order in which they are reported


class AuxiliaryLosses:
    """What the layers of this rank have added to the objective in one step, and how they add to it.

    A term is a sum over the sequences or tokens of this rank alone, times `per_sequence` or `per_token`, 1 over those of
    the global batch, masked or not: so plain sums over microbatches and ranks give the term of the global batch, as they
    do for the token loss. `scale` is what the step's loss is multiplied with (fp16).
    """

    def __init__(
        self,
        per_sequence: float,
        per_token: float,
        scale: float,
        device: torch.device,
        watches_logits: bool = False,
        together: int = 1,
    ) -> None:
        self.per_sequence, self.per_token, self.scale = per_sequence, per_token, scale
        self.together = together
        """Sequences that a load-balancing loss is taken over; they divide the microbatch."""
        self.totals = {name: torch.zeros((), dtype=torch.float64, device=device) for name in NAMES}
        """By name, this rank's part of the unscaled term, of all layers and of the microbatches that have run backward."""
        self.loads: dict[int, Tensor] = {}
        """By layer, how often this rank's tokens of those microbatches have chosen each expert: fp64 [E], on the device."""
        self.watches_logits = watches_logits
        self.logits: dict[int, Tensor] = {}
        """By layer, the largest attention logit of each head that this rank has seen: fp64 [heads of all ranks]."""

    def attach(self, x: Tensor, name: str, value: Tensor, *, counts: bool = True) -> Tensor:
        """Add the scalar `value`, already weighted, to the objective; returns x, which must take part in the loss. Of ranks
        that have the same value one `counts`.

        Its gradient enters when that of x passes. That is also when the value is counted: the backward runs once
        for each microbatch, also where recompute runs the forward twice.
        """
        return _Attach.apply(x, value, self, name, counts)

    def see_logits(self, layer: int, largest: Tensor, *, first: int, heads: int) -> None:
        """The largest logits of this rank's heads, from number `first` on, of one microbatch; seeing them again in
        recompute changes nothing."""
        if layer not in self.logits:
            self.logits[layer] = torch.full((heads,), -torch.inf, dtype=torch.float64, device=largest.device)
        seen = self.logits[layer][first : first + len(largest)]
        torch.maximum(seen, largest.double(), out=seen)

    def count(self, x: Tensor, layer: int, chosen: Tensor, experts: int) -> Tensor:
        """Count in the backward of x, once for each microbatch, which experts were chosen; returns x, which must take part
        in the loss."""
        return _Count.apply(x, chosen, self, layer, experts)


class _Count(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, losses: AuxiliaryLosses, layer: int, experts: int) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.losses, ctx.layer, ctx.experts = losses, layer, experts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (chosen,), loads = ctx.saved_tensors, ctx.losses.loads
        if ctx.layer not in loads:
            loads[ctx.layer] = torch.zeros(ctx.experts, dtype=torch.float64, device=grad.device)
        ones = torch.ones((), dtype=torch.float64, device=grad.device).expand(chosen.numel())
        loads[ctx.layer].index_add_(0, chosen.flatten(), ones)
        return grad, None, None, None, None


class _Attach(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, losses: AuxiliaryLosses, name: str, counts: bool) -> Tensor:
        ctx.save_for_backward(value)
        ctx.losses, ctx.name, ctx.counts = losses, name, counts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (value,), losses = ctx.saved_tensors, ctx.losses
        if ctx.counts:
            losses.totals[ctx.name] += value.detach().double()
        return grad, torch.full_like(value, losses.scale), None, None, None


@dataclass(frozen=True, kw_only=True)
class MTPInputs:
    """What the layers that predict further tokens read, by depth, each [b, s/cp]."""

    tokens: tuple[Tensor, ...]
    """int64: at position i of depth k token i + k."""
    labels: tuple[Tensor, ...]
    """int64: token i + k + 1."""
    weights: tuple[Tensor, ...]
    """What each token's loss counts in the objective."""


@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """One new token per row, behind those that a cache holds; rows may hold different numbers of tokens.

    The columns `first` to `stop` of the cache are those that some row sees, the new token's own among them.
    """

    positions: Tensor  # int64 [b]: where each row's new token stands, which is how many are before it
    first: int
    stop: int
    visible: Tensor | None  # boolean [b, 1, 1, stop - first], which columns a row sees; None: all of them

    @classmethod
    def after(cls, lengths: Sequence[int], *, window: int | None, device: torch.device) -> "NextTokens":
        """The next token of rows with that many tokens, each of which sees `window` keys with its own; None: all."""
        first, stop = 0 if window is None else max(0, min(lengths) + 1 - window), max(lengths) + 1
        positions, visible = torch.tensor(lengths, device=device), None
        if len(set(lengths)) > 1:
            distance = positions.unsqueeze(1) - torch.arange(first, stop, device=device)
            visible = ((distance >= 0) & (distance < (window or stop)))[:, None, None]
        return cls(positions=positions, first=first, stop=stop, visible=visible)


class KeyValueCache:
    """One entry an attention layer: keys and values [b, groups/tp, room, d], of which each row fills a beginning.

    Room doubles when it is used up, so that on average a token is copied no more than once however long the text gets, up
    to the `limit` of tokens that a row will have. What no token has filled is zero: hidden keys have no weight, but a
    weight of zero makes no number of a NaN.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: dict[str, tuple[Tensor, Tensor]] = {}

    def fill(self, name: str, k: Tensor, v: Tensor) -> None:
        """Keys and values [b, groups/tp, s, d] of the first s tokens of each row.

        Rows may be padded behind their end: what is there is hidden, until the row's own tokens take its place.
        """
        length = k.shape[2]
        room = max(min(2 * length, self._limit), length)
        self._entries[name] = _with_room(k, length, room), _with_room(v, length, room)

    def append(self, name: str, k: Tensor, v: Tensor, new: NextTokens) -> tuple[Tensor, Tensor]:
        """Put in those of one new token per row, [b, groups/tp, 1, d], and return the columns that some row sees."""
        keys, values = self._entries[name]
        held = keys.shape[2]
        if new.stop > held:
            room = max(min(2 * held, self._limit), new.stop)
            keys, values = self._entries[name] = _with_room(keys, held, room), _with_room(values, held, room)
        for entry, tensor in ((keys, k), (values, v)):
            if new.visible is None:
                entry[:, :, new.stop - 1] = tensor[:, :, 0]
            else:
                rows = torch.arange(tensor.shape[0], device=tensor.device)
                entry[rows, :, new.positions] = tensor[:, :, 0]
        return keys[:, :, new.first : new.stop], values[:, :, new.first : new.stop]

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these, which move up."""
        for name, (keys, values) in self._entries.items():
            index = torch.tensor(rows, device=keys.device)
            self._entries[name] = keys.index_select(0, index), values.index_select(0, index)


def _with_room(tensor: Tensor, used: int, room: int) -> Tensor:
    """The first `used` columns in new memory with `room` of them."""
    b, groups, _, d = tensor.shape
    larger = tensor.new_zeros(b, groups, room, d)
    larger[:, :, :used] = tensor[:, :, :used]
    return larger


CAUSAL = Visibility()  # all that came before


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """One microbatch on its way through the stages.

    While text is `generating` the tokens after these are not known yet, so nothing may depend on how many there will be:
    experts take every token, whatever their capacity.
    """

    seq_length: int  # tokens of the whole sequence, over all cp ranks
    spans: tuple[Spans, ...]  # what each cp rank holds of it
    positions: Tensor  # where in the sequence this rank's rows are, int64 [s/cp], ascending
    position_ids: Tensor  # `positions`, or [s/cp, b] where each document begins at 0: what position embeddings count
    stream: DropoutStream | None = None  # keys the dropout masks; None in evaluation, where nothing is dropped
    rope: tuple[Tensor, Tensor] | None = None  # cos and sin of the position ids, [s/cp, b or 1, 1, d/2]
    visibility: Visibility = CAUSAL
    mtp: MTPInputs | None = None  # for the last stage of a model that predicts further tokens
    auxiliary: AuxiliaryLosses | None = None  # where layers add terms to the objective; None in evaluation
    generating: bool = False
    next_tokens: NextTokens | None = None  # the rows are one token each, behind those that a cache holds
    full: "ForwardContext | None" = None  # for layers that have no window, where others have; None: this one
    row_counts: dict[int, Any] | None = None  # by MoE layer, for when this pass runs again; None: it does not

    @property
    def tables(self) -> list[Tensor]:
        """What all layers read."""
        further = [] if self.full is None else self.full.tables
        return [self.positions, self.position_ids, *(self.rope or ()), *further]

    def keep_mask(self, x: Tensor, p: float, *, site: str, region: Group) -> Tensor | None:
        """What stays of x [s/cp, b, h], split over the ranks of `region` as well; None: everything.

        The same elements fall in every layout.
        """
        if p == 0.0 or self.stream is None:
            return None
        rows = self.positions.tensor_split(region.size)[region.rank]
        return keep_mask(x, p, site=site, stream=self.stream, rows=rows)


def document_position_ids(positions: Tensor, document_starts: tuple[tuple[int, ...], ...]) -> Tensor:
    """Positions [s] counted from the start of each one's document: [s, b] for b samples' starts."""
    columns = []
    for starts in document_starts:
        first = torch.tensor(starts, dtype=positions.dtype, pin_memory=positions.is_cuda)
        first = first.to(positions.device, non_blocking=True)
        columns.append(positions - first[torch.searchsorted(first, positions, right=True) - 1])
    return torch.stack(columns, dim=1)
