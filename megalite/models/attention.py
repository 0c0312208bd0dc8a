"""Causal self-attention, multi-head or grouped-query, on a whole sequence or one split over cp; and QK-clip, which shrinks
the query and key weights of heads with logits above a limit."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.context_parallel.attention import (
    gather_sequence,
    heads_to_sequence,
    largest_logits,
    ring_attention,
    sequence_to_heads,
)
from megalite.context_parallel.tiles import Visibility
from megalite.kernels.attention import cached_attention, causal_attention, unfused_attention
from megalite.kernels.bases import Module
from megalite.models.context import CAUSAL, AuxiliaryLosses, ForwardContext, KeyValueCache, NextTokens
from megalite.models.norm import AllHeadsNorm, Norm
from megalite.models.recompute import Recompute, recomputed
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.mappings import SharedHeads
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.tensor_parallel.random import DropoutStream
from megalite.topology.group import Group
from megalite.topology.layout import Spans, joined_spans


class AttentionCore(Module):
    """softmax(q·kᵀ·scale)·v of one layer, for this rank's heads (tp) and part of the sequence (cp).

    With context parallelism the subclass exchanges sequence parts for heads over `cp_heads` (`a2a`), before and after
    the core. Over `cp_keys`, keys and values are passed round the ranks (`p2p`) or gathered (`allgather`). Except with
    `a2a+p2p`, one of the two groups has one rank."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        *,
        factory: ParameterFactory,
        recompute: Recompute,
        cp_comm_type: str = "p2p",
        index: int = 0,
    ) -> None:
        super().__init__()
        self.name, self.index, self.all_heads = name, index, config.num_attention_heads
        self.recompute_core, self.saves = recompute.selects("core_attn"), recompute.saves
        self._in_qkv, self._in_core, self._in_proj = map(self.saves.runner, ("qkv_linear", "core_attn", "attn_proj"))
        self.dropout, self.softcap = config.attention_dropout, config.attn_logit_softcapping
        self.sinks: ShardedParameter | None = None
        if config.softmax_type == "learnable":
            shape, std = (config.num_attention_heads,), config.init_method_std
            self.sinks = factory.parameter(f"{name}.sinks", shape, shard_dim=0, std=std, decay=False)
        self.plain_softmax = config.softmax_type == "vanilla"
        self.windowed, self.has_rope = config.has_window(index), config.has_rope(index)
        self.causal_attention: Callable[..., Tensor] = causal_attention
        self.masked_attention: Callable[..., Tensor] | None = None
        """Kernel for windows and documents in whole sequences; None: the core uses tiles."""
        self.head_size = config.head_size
        self.groups = max(1, config.query_groups // factory.tp.size)
        self.queries = config.num_attention_heads // factory.tp.size // self.groups
        # `core_cp`: the ranks over which the sequence is split inside the core.
        self.cp_heads, self.core_cp = factory.cp_heads, factory.cp_keys
        self.exchange_heads = self.cp_heads.size > 1
        self.gathers_keys = cp_comm_type == "allgather"
        heads = self.groups * self.queries
        # Global index of the core's first query head.
        self.first_head = factory.tp.rank * heads + self.cp_heads.rank * (heads // self.cp_heads.size)
        self._rope = factory.kernel("rope", config.rotary_size)
        self._softmax = None
        if self.dropout > 0.0 and self.core_cp.size == 1 and self.plain_softmax:
            self._softmax = factory.kernel("softmax", config.max_position_embeddings or 0)

    def core(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        """Attend queries [b, heads, s, d] to keys and values [b, groups, s, d] -> [b, heads, s, d].

        Scores are multiplied by 1 / sqrt(d). Collectives: with cp those of `ring_attention`."""
        if self.recompute_core and torch.is_grad_enabled():
            return recomputed(self._core, q, k, v, context)
        return self._core(q, k, v, context)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        if context.next_tokens is not None:
            return self.cached(q, k, v, context.next_tokens)
        if context.auxiliary is not None and context.auxiliary.records_logits:
            spans, rule = self.core_spans(context), context.visibility
            largest = largest_logits(q.detach(), k.detach(), cp=self.core_cp, spans=spans, visibility=rule)
            context.auxiliary.record_logits(self.index, largest, first=self.first_head, heads=self.all_heads)
        if self.dropout > 0.0 and context.stream is not None:
            return self._core_with_dropout(q, k, v, context, context.stream)
        plain = self.core_cp.size == 1 and self.softcap is None and self.plain_softmax
        if plain and context.visibility == CAUSAL:
            return self.causal_attention(q, k, v)
        if plain and self.masked_attention is not None:
            rule = context.visibility
            return self.masked_attention(q, k, v, window=rule.window, document_starts=rule.document_starts)
        return ring_attention(
            *(q, k, v),
            cp=self.core_cp,
            spans=self.core_spans(context),
            visibility=context.visibility,
            softcap=self.softcap,
            sink=self._sink(q),
            gathers=self.gathers_keys,
        )

    def _sink(self, q: Tensor) -> Tensor | None:
        """Return the sink logit of each head [heads] for queries [b, heads, s, d]; None without sinks."""
        if self.plain_softmax:
            return None
        if self.sinks is None:
            return q.new_zeros(q.shape[1])
        return self.sinks.chunk(self.cp_heads.size)[self.cp_heads.rank]

    def core_spans(self, context: ForwardContext) -> tuple[Spans, ...]:
        """Return the sequence spans of each rank of `core_cp` inside the core, after the exchange of heads."""
        return joined_spans(context.spans, self.cp_heads.size)

    def exchange_spans(self, context: ForwardContext) -> tuple[Spans, ...]:
        """Return the sequence spans of each rank of `cp_heads` outside the core."""
        first = self.core_cp.rank * self.cp_heads.size
        return context.spans[first : first + self.cp_heads.size]

    def cached(self, q: Tensor, k: Tensor, v: Tensor, new: NextTokens) -> Tensor:
        """Attend one new query per row to the cached keys and values; otherwise like `core`."""
        return cached_attention(q, k, v, visible=new.visible, softcap=self.softcap, sink=self._sink(q))

    def _core_with_dropout(
        self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext, stream: DropoutStream
    ) -> Tensor:
        """Compute the core unfused, with the probabilities of this rank's queries and all keys in memory."""
        length = context.seq_length
        columns = torch.arange(length, device=q.device)
        spans = self.core_spans(context)
        rows = torch.cat([columns[first:stop] for first, stop in spans[self.core_cp.rank]])
        k, v = (gather_sequence(tensor, cp=self.core_cp, dim=2, spans=spans) for tensor in (k, v))
        keep = torch.empty(*q.shape[:3], length, dtype=torch.bool, device=q.device)
        stream.fill(keep, rows, self.dropout, site=f"{self.name}.probabilities", first_head=self.first_head)
        causal = self._softmax if context.visibility == CAUSAL else None
        visible = None if causal is not None else visible_keys(rows, columns, context.visibility)
        return unfused_attention(
            *(q, k, v),
            visible=visible,
            keep=keep,
            p=self.dropout,
            causal=causal,
            softcap=self.softcap,
            sink=self._sink(q),
        )


class Attention(AttentionCore):
    """Multi-head or grouped-query attention, with heads split over tp by key/value group.

    Rows of `qkv` are ordered by group: its queries, its key, its value. With fewer groups than tp ranks, several ranks
    share a group and each has a part of its queries (`SharedHeads`). If the exchange of heads over cp (`a2a`) needs
    more key heads than each rank has, they are repeated. With an output gate, the gates of a group follow its queries."""

    def __init__(self, name: str, config: ModelConfig, *, factory: ParameterFactory, **common: Any) -> None:
        super().__init__(name, config, factory=factory, **common)
        # Every core multiplies scores by 1 / sqrt(d); any other scale is applied to the queries.
        self.query_scale = 1.0 if config.score_scale is None else config.score_scale * math.sqrt(config.head_size)
        queries = config.num_attention_heads // config.query_groups
        self._shared: Callable[[Tensor], Tensor] | None = None
        if config.query_groups < factory.tp.size:
            self._shared = SharedHeads(
                *(factory.tp, config.query_groups, config.head_size),
                queries=queries,
                gated=config.attention_output_gate,
            )
        self.repeats = max(1, self.cp_heads.size // self.groups)
        self.gated = config.attention_output_gate
        rows = config.query_groups * config.group_heads * self.head_size
        self.qkv = ColumnParallelLinear(
            f"{name}.qkv",
            (rows, config.hidden_size),
            std=config.hidden_std,
            bias=config.add_bias_linear or config.add_qkv_bias,
            factory=factory,
        )
        self.rotary_size, self.rotary_interleaved = config.rotary_size, config.rotary_interleaved
        self.plain_rope = config.rotary_size == config.head_size and not config.rotary_interleaved
        self.q_norm: Norm | AllHeadsNorm | None = None
        self.k_norm: Norm | AllHeadsNorm | None = None
        if config.qk_norm_all_heads:
            size = config.num_attention_heads * config.head_size
            self.q_norm = AllHeadsNorm(f"{name}.q_norm", config, factory=factory, size=size)
            size = config.query_groups * config.head_size
            self.k_norm = AllHeadsNorm(f"{name}.k_norm", config, factory=factory, size=size)
        elif config.qk_norm:
            # Each tp rank normalizes its own heads, so the weight's gradient is partial.
            self.q_norm = Norm(f"{name}.q_norm", config, factory=factory, size=config.head_size, per_head=True)
            self.k_norm = Norm(f"{name}.k_norm", config, factory=factory, size=config.head_size, per_head=True)
        self.out = RowParallelLinear(
            f"{name}.out",
            (config.hidden_size, config.num_attention_heads * self.head_size),
            std=config.residual_std,
            bias=config.add_bias_linear,
            factory=factory,
        )

    def forward(
        self, x: Tensor, context: ForwardContext, cache: KeyValueCache | None = None, *, add_late_bias: bool = True
    ) -> Tensor:
        """[s/cp, b, h] -> [s/cp, b, h], split over tp as well with sequence parallelism.

        Collectives, forward and backward: those of the two linear layers, of `SharedHeads` and over cp of the core, and
        two all-to-alls over `cp_heads`."""
        if not self.windowed and context.full is not None:
            context = context.full
        q, k, v, gate = self._in_qkv(self._heads, x, context, cache)
        mixed = self._in_core(self.core, q, k, v, context).permute(2, 0, 1, 3)
        if self.exchange_heads:
            mixed = heads_to_sequence(mixed, cp=self.cp_heads, spans=self.exchange_spans(context))
        return self._in_proj(self._out, mixed, gate, add_late_bias)

    def _out(self, mixed: Tensor, gate: Tensor | None, add_late_bias: bool) -> Tensor:
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        return self.out(mixed.flatten(2), add_late_bias=add_late_bias)

    def _heads(
        self, x: Tensor, context: ForwardContext, cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the core's inputs: queries [b, heads, s, d], keys and values [b, groups, s, d]; and the gates or None."""
        rope = context.rope if self.has_rope else None
        qkv = self.qkv(x)
        if self._shared is not None:
            qkv = self._shared(qkv)
        s, b = qkv.shape[:2]
        gate: Tensor | None = None
        qkv = qkv.view(s * b, self.groups, -1, self.head_size)
        if self.gated:
            queries, gate, keys = qkv.split((self.queries, self.queries, 2), dim=2)
            qkv, gate = torch.cat((queries, keys), dim=2), gate.reshape(s, b, -1, self.head_size)
        if self.q_norm is None and self.plain_rope and rope is not None and context.next_tokens is not None:
            # With few tokens, one call that needlessly rotates the values too is faster than a second call for keys.
            rotated = self._rope(qkv.view(s, b, -1, self.head_size), *rope).view_as(qkv)
            q, k = rotated[:, :, :-2].flatten(1, 2).unsqueeze(0), rotated[:, :, -2].unsqueeze(0)
            v = qkv[:, :, -1].unsqueeze(0)
        elif self.q_norm is None and self.plain_rope and rope is not None and rope[0].shape[1] == 1:
            q, k, v = self._split_rotated(qkv, b, *rope)
        else:
            q, k, v = self._split(qkv, b)
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
                if isinstance(self.q_norm, AllHeadsNorm):  # the norm saves a copy, but a view v would keep all of qkv
                    v = v.contiguous()
            if rope is not None:
                q, k = self._rotate(q, *rope), self._rotate(k, *rope)
                if self.q_norm is None:  # a view would keep all of qkv in memory
                    v = v.contiguous()
        if self.query_scale != 1.0:
            q = q * self.query_scale
        if context.query_factors is not None:
            q = q * context.query_factors
        if self.exchange_heads:
            if self.repeats > 1:
                k, v = (tensor.repeat_interleave(self.repeats, dim=2) for tensor in (k, v))
            grouped = q.unflatten(2, (self.groups * self.repeats, -1))
            packed = torch.cat((grouped, k.unsqueeze(3), v.unsqueeze(3)), dim=3)
            packed = sequence_to_heads(packed, cp=self.cp_heads, spans=self.exchange_spans(context))
            q, k, v = self._split(packed.flatten(0, 1), b)
        q, k, v = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
        if cache is not None:
            if context.next_tokens is None:
                cache.fill(self.name, k, v)
            else:
                k, v = cache.append(self.name, k, v, context.next_tokens)
        return q, k, v, gate

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply RoPE to the first `rotary_size` channels of queries or keys."""
        if self.plain_rope:
            return self._rope(x, cos, sin)
        return rotate_part(self._rope, x, (cos, sin), interleaved=self.rotary_interleaved)

    def _split(self, qkv: Tensor, b: int) -> tuple[Tensor, Tensor, Tensor]:
        """Split [s·b, groups, queries + 2, d] -> queries [s, b, heads, d], keys and values [s, b, groups, d]."""
        groups, queries, d = qkv.shape[1], qkv.shape[2] - 2, self.head_size
        if queries == 1:
            q, k, v = qkv.view(-1, b, groups, 3, d).unbind(3)
            return q, k, v
        # With more than four dimensions CUDA would concatenate these gradients by one launch each. The queries of
        # several groups are a copy, so views of keys and values would keep all of qkv in memory as well.
        q, k, v = qkv.split((queries, 1, 1), dim=2)
        k, v = k.reshape(-1, b, groups, d).contiguous(), v.reshape(-1, b, groups, d).contiguous()
        return q.reshape(-1, b, groups * queries, d).contiguous(), k, v

    def _split_rotated(self, qkv: Tensor, b: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`_split` with queries and keys rotated by one table [s, 1, 1, d/2] for all sequences.

        The kernel reads the projection's output without a copy: it treats each group as a sequence."""
        s, groups, d = len(cos), self.groups, self.head_size
        q, k, v = qkv.split((self.queries, 1, 1), dim=2)
        q = self._rope(q.view(s, b * groups, self.queries, d), cos, sin).view(s, b, -1, d)
        return q, self._rope(k.view(s, b, groups, d), cos, sin), v.view(s, b, groups, d).contiguous()


def rotate_part(rope: Callable[..., Tensor], x: Tensor, tables: tuple[Tensor, Tensor], *, interleaved: bool) -> Tensor:
    """Apply RoPE to the first channels of x [s, b, heads, d], as many as `tables` (cos and sin) are for.

    Interleaved pairs are reordered into halves first: scores do not depend on a channel order that queries and keys
    share."""
    size = 2 * tables[0].shape[-1]
    pairs, rest = x[..., :size], x[..., size:]
    if interleaved:
        pairs = pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((rope(pairs.contiguous(), *tables), rest), dim=-1)


def visible_keys(rows: Tensor, columns: Tensor, visibility: Visibility) -> Tensor:
    """Return the dense mask of `visibility`: [b or 1, 1, rows, columns], true if the query attends to the key."""
    distance = rows.unsqueeze(1) - columns
    visible = distance >= 0
    if visibility.window is not None:
        visible &= distance < visibility.window
    if visibility.document_starts is None:
        return visible[None, None]
    samples = []
    for starts in visibility.document_starts:
        first = torch.tensor(starts, pin_memory=rows.is_cuda).to(rows.device, non_blocking=True)
        of_row, of_column = (torch.searchsorted(first, places, right=True) for places in (rows, columns))
        samples.append(visible & (of_row.unsqueeze(1) == of_column))
    return torch.stack(samples).unsqueeze(1)


RowFactor = tuple[int, int, float]
"""Rows [first, stop) of a tensor, and the factor that multiplies them."""


def batch_logits(seen: AuxiliaryLosses, model: ModelConfig, world: Group) -> list[list[float]]:
    """Return the largest logit of the whole batch by layer and head.

    Collectives: one max all-reduce of layers·heads numbers over the world."""
    layers = model.mtp_layers.stop
    table = torch.full((layers, model.num_attention_heads), -torch.inf, dtype=torch.float64, device=world.device)
    for layer, logits in seen.logits.items():
        table[layer] = logits
    world.all_reduce(table, op="max")
    with world.heartbeat.synchronise():
        return table.tolist()


def clipped_rows(
    logits: Sequence[Sequence[float]], model: ModelConfig, config: OptimizerConfig
) -> Mapping[str, Sequence[RowFactor]]:
    """Return the rows of each tensor that QK-clip shrinks (Kimi-K2, arXiv 2507.20534).

    With γ = min(1, qk_clip_threshold / the largest logit), query rows are multiplied by γ^α and key rows by γ^(1-α), so
    that logits shrink by γ. Heads that share a key use the γ of their largest logit. In latent attention the queries'
    RoPE channels take all of γ, since all heads share those keys."""
    found: dict[str, list[RowFactor]] = {}
    for layer, heads in enumerate(logits):
        shared = model.num_attention_heads // model.query_groups
        for group in range(model.query_groups):
            largest = max(heads[group * shared : (group + 1) * shared])
            if largest > config.qk_clip_threshold:
                factor = config.qk_clip_threshold / largest
                for name, rows in _rows(model, f"layers.{layer}.attention", group, factor, config.qk_clip_alpha):
                    found.setdefault(name, []).append(rows)
    return found


def _rows(model: ModelConfig, prefix: str, group: int, factor: float, alpha: float) -> Iterator[tuple[str, RowFactor]]:
    """Yield tensor names and the rows to shrink for one group of heads."""
    query, key = factor**alpha, factor ** (1.0 - alpha)
    if model.multi_latent_attention:
        name = f"{prefix}.q{'' if model.q_lora_rank is None else '_up'}.weight"
        first, plain = group * model.head_size, model.qk_head_dim
        yield name, (first, first + plain, query)
        yield name, (first + plain, first + model.head_size, factor)
        first = group * (plain + model.v_head_dim)
        yield f"{prefix}.kv_up.weight", (first, first + plain, key)
        return
    queries = model.num_attention_heads // model.query_groups * model.head_size
    first = group * model.group_heads * model.head_size
    keys = first + (model.group_heads - 2) * model.head_size
    for kind in ("weight", "bias"):  # the bias may not exist
        yield f"{prefix}.qkv.{kind}", (first, first + queries, query)
        yield f"{prefix}.qkv.{kind}", (keys, keys + model.head_size, key)
