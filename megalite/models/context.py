"""Data of a microbatch's forward pass besides the activations: positions, dropout, caches, auxiliary losses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.context_parallel.tiles import Visibility
from megalite.kernels.bases import Function
from megalite.tensor_parallel.random import DropoutStream, keep_mask
from megalite.topology.group import Group
from megalite.topology.layout import Spans

LOAD_BALANCING_LOSS = "load_balancing_loss"
Z_LOSS = "z_loss"
MTP_LOSS = "mtp_loss"
INDEXER_LOSS = "indexer_loss"
NAMES = (LOAD_BALANCING_LOSS, Z_LOSS, MTP_LOSS, INDEXER_LOSS)  # all terms, in the order of reports


class AuxiliaryLosses:
    """Auxiliary loss terms that this rank's layers add to the objective in one step.

    A term is a sum over this rank's sequences or tokens, times `per_sequence` or `per_token`: 1 over the number in the
    global batch, masked or not. So plain sums over microbatches and ranks give the term of the global batch, as for the
    token loss. `scale`: the step's loss scale (fp16)."""

    def __init__(
        self,
        per_sequence: float,
        per_token: float,
        scale: float,
        device: torch.device,
        records_logits: bool = False,
        sequences_per_loss: int = 1,
    ) -> None:
        self.per_sequence, self.per_token, self.scale = per_sequence, per_token, scale
        self.sequences_per_loss = sequences_per_loss
        """Number of sequences per load-balancing loss; it divides the microbatch."""
        self.totals = {name: torch.zeros((), dtype=torch.float64, device=device) for name in NAMES}
        """Name -> this rank's part of the unscaled term, over all layers and the microbatches after their backward."""
        self.loads: dict[int, Tensor] = {}
        """Layer -> how often this rank's tokens of those microbatches chose each expert: fp64 [E], on the device."""
        self.records_logits = records_logits
        self.logits: dict[int, Tensor] = {}
        """Layer -> largest attention logit of each head on this rank: fp64 [heads of all ranks], -inf elsewhere."""

    def attach(self, x: Tensor, name: str, value: Tensor, *, counts: bool = True) -> Tensor:
        """Add the weighted scalar `value` to the objective and return x, on which the loss must depend.

        The value gets its gradient and is counted in the backward of x, which runs once per microbatch even if
        recomputation runs the forward twice. Of ranks with the same value only one passes `counts=True`."""
        return _Attach.apply(x, value, self, name, counts)

    def record_logits(self, layer: int, largest: Tensor, *, first: int, heads: int) -> None:
        """Record one microbatch's largest logits of this rank's heads, the first of them head `first` of all.

        A second call in recomputation changes nothing."""
        if layer not in self.logits:
            self.logits[layer] = torch.full((heads,), -torch.inf, dtype=torch.float64, device=largest.device)
        seen = self.logits[layer][first : first + len(largest)]
        torch.maximum(seen, largest.double(), out=seen)

    def count(self, x: Tensor, layer: int, chosen: Tensor, experts: int) -> Tensor:
        """Count the chosen experts in x's backward, once per microbatch; return x, on which the loss must depend."""
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
    """Inputs of the MTP layers, one tensor [b, s/cp] per depth."""

    tokens: tuple[Tensor, ...]
    """int64: token i + k at position i of depth k."""
    labels: tuple[Tensor, ...]
    """int64: token i + k + 1."""
    weights: tuple[Tensor, ...]
    """Weight of each token's loss in the objective."""


@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """One new token per row, after the cached tokens, of which rows may have different numbers.

    Columns `first` to `stop` of the cache are visible to at least one row; they include the new token."""

    positions: Tensor  # int64 [b]: position of each row's new token, equal to its number of cached tokens
    first: int
    stop: int
    visible: Tensor | None  # boolean [b, 1, 1, stop - first], the columns visible to each row; None: all

    @classmethod
    def after(cls, lengths: Sequence[int], *, window: int | None, device: torch.device) -> "NextTokens":
        """Build the next token of rows with `lengths` tokens; it sees `window` keys including its own; None: all."""
        first, stop = 0 if window is None else max(0, min(lengths) + 1 - window), max(lengths) + 1
        positions, visible = torch.tensor(lengths, device=device), None
        if len(set(lengths)) > 1:
            distance = positions.unsqueeze(1) - torch.arange(first, stop, device=device)
            visible = ((distance >= 0) & (distance < (window or stop)))[:, None, None]
        return cls(positions=positions, first=first, stop=stop, visible=visible)


class KeyValueCache:
    """Keys and values [b, groups/tp, capacity, d] of each attention layer; each row fills the first columns. Layers with
    linear attention have a state of constant size instead.

    A full cache doubles, so each token is copied at most once on average, up to `limit` tokens per row. Unused columns
    are zero: their attention weight is 0, but 0 · NaN would be NaN."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: dict[str, tuple[Tensor, Tensor]] = {}

    def fill(self, name: str, k: Tensor, v: Tensor) -> None:
        """Store keys and values [b, groups/tp, s, d] of the first s tokens of each row.

        Rows may have padding at their end: it stays masked until the row's next tokens overwrite it."""
        length = k.shape[2]
        capacity = max(min(2 * length, self._limit), length)
        self._entries[name] = _enlarged(k, length, capacity), _enlarged(v, length, capacity)

    def append(self, name: str, k: Tensor, v: Tensor, new: NextTokens) -> tuple[Tensor, Tensor]:
        """Store one new token per row, [b, groups/tp, 1, d], and return the columns `new.first` to `new.stop`."""
        keys, values = self._entries[name]
        full = keys.shape[2]
        if new.stop > full:
            capacity = max(min(2 * full, self._limit), new.stop)
            keys, values = self._entries[name] = _enlarged(keys, full, capacity), _enlarged(values, full, capacity)
        for entry, tensor in ((keys, k), (values, v)):
            if new.visible is None:
                entry[:, :, new.stop - 1] = tensor[:, :, 0]
            else:
                rows = torch.arange(tensor.shape[0], device=tensor.device)
                entry[rows, :, new.positions] = tensor[:, :, 0]
        return keys[:, :, new.first : new.stop], values[:, :, new.first : new.stop]

    def state(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the last tokens and the state of a layer with linear attention, both [b, ...]."""
        return self._entries[name]

    def set_state(self, name: str, last: Tensor, state: Tensor) -> None:
        self._entries[name] = last, state

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        for name, (keys, values) in self._entries.items():
            index = torch.tensor(rows, device=keys.device)
            self._entries[name] = keys.index_select(0, index), values.index_select(0, index)


def _enlarged(tensor: Tensor, used: int, capacity: int) -> Tensor:
    """Copy the first `used` columns into zeroed memory with `capacity` columns."""
    b, groups, _, d = tensor.shape
    larger = tensor.new_zeros(b, groups, capacity, d)
    larger[:, :, :used] = tensor[:, :, :used]
    return larger


CAUSAL = Visibility()  # the plain causal mask


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """Data of one microbatch that all layers of a stage share.

    With `generating`, the final length of the text is unknown and must not influence the result: experts accept every
    token, whatever their capacity."""

    seq_length: int  # tokens of the whole sequence, over all cp ranks
    spans: tuple[Spans, ...]  # parts of the sequence on each cp rank
    positions: Tensor  # positions of this rank's rows in the sequence, int64 [s/cp], ascending
    position_ids: Tensor  # positions for position embeddings: `positions`, or [s/cp, b] that restart at each document
    stream: DropoutStream | None = None  # source of the dropout masks; None in evaluation, without dropout
    rope: tuple[Tensor, Tensor] | None = None  # cos and sin of the position ids, [s/cp, b or 1, 1, d/2]
    query_factors: Tensor | None = None  # factors on queries by their position ids, [s/cp, b or 1, 1, 1]; None: 1
    visibility: Visibility = CAUSAL
    mtp: MTPInputs | None = None  # inputs of the MTP layers, on the last stage
    auxiliary: AuxiliaryLosses | None = None  # collects auxiliary losses; None in evaluation
    generating: bool = False
    next_tokens: NextTokens | None = None  # set if the rows are one new token each, after cached tokens
    lengths: Tensor | None = None  # tokens of each row before its padding, int64 [b], if tokens follow; None: all
    full: "ForwardContext | None" = None  # context of layers without a window if others have one; None: this one
    row_counts: dict[int, Any] | None = None  # MoE layer -> counts to reuse in recomputation; None: no recomputation

    @property
    def tables(self) -> list[Tensor]:
        """Tensors that all layers read."""
        others = [] if self.full is None else self.full.tables
        factors = [] if self.query_factors is None else [self.query_factors]
        return [self.positions, self.position_ids, *(self.rope or ()), *factors, *others]

    def keep_mask(self, x: Tensor, p: float, *, site: str, region: Group) -> Tensor | None:
        """Return the dropout mask of x [s/cp, b, h], split over the ranks of `region` as well; None: no dropout.

        The same elements are dropped in every layout."""
        if p == 0.0 or self.stream is None:
            return None
        rows = self.positions.tensor_split(region.size)[region.rank]
        return keep_mask(x, p, site=site, stream=self.stream, rows=rows)


def document_position_ids(positions: Tensor, document_starts: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return positions relative to the start of their document, [s, b], for positions [s] and b samples' starts."""
    columns = []
    for starts in document_starts:
        first = torch.tensor(starts, dtype=positions.dtype, pin_memory=positions.is_cuda)
        first = first.to(positions.device, non_blocking=True)
        columns.append(positions - first[torch.searchsorted(first, positions, right=True) - 1])
    return torch.stack(columns, dim=1)


def query_factors(config: ModelConfig, position_ids: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the factors on queries [s, b or 1, 1, 1] at position ids [s] or [s, b]; None: 1 everywhere."""
    if config.attn_temperature_beta == 0.0:
        return None
    periods = position_ids.view(len(position_ids), -1, 1, 1) // config.rope_original_max_positions
    return (1.0 + config.attn_temperature_beta * periods.double().log1p()).to(dtype)
