"""DeepSeek Sparse Attention (DSA, arXiv 2512.02556): a small indexer chooses the keys that each query attends to."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.config.model import INDEX_ROWS, ModelConfig
from megalite.context_parallel.attention import gather_sequence
from megalite.kernels.attention import HALF_TYPES
from megalite.kernels.bases import Module
from megalite.models.attention import rotate_part, visible_keys
from megalite.models.context import INDEXER_LOSS, ForwardContext, NextTokens
from megalite.models.latent_attention import LatentAttention
from megalite.models.norm import Norm
from megalite.models.recompute import recomputed
from megalite.tensor_parallel.layers import ReplicatedLinear
from megalite.tensor_parallel.mappings import replicate_from_sequence_parallel_region
from megalite.tensor_parallel.parameter import ParameterFactory

LEAST = 1e-10
"""Lower limit of probabilities inside the logarithm of the loss."""


class Indexer(Module):
    """Queries, keys and head weights that score every key: Σ_h w_h·ReLU(q_h·k), each on every tp rank.

    Letters: n = dsa_indexer_n_heads, d = dsa_indexer_head_dim. RoPE rotates the first channels of queries and keys. The
    paper also rotates both by one orthogonal (Hadamard) matrix before it rounds them to 8 bits; that changes no
    product, so it is left out."""

    def __init__(self, name: str, config: ModelConfig, *, factory: ParameterFactory) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = factory.tp, factory.sequence_parallel
        self.heads, self.size = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.interleaved = config.dsa_indexer_rope_interleaved
        h, std = config.hidden_size, config.hidden_std
        shape = (self.heads * self.size, config.q_lora_rank or h)
        self.q_up = ReplicatedLinear(f"{name}.q_up", shape, std=std, factory=factory)
        self.key = ReplicatedLinear(f"{name}.key", (self.size, h), std=std, factory=factory)
        epsilon = config.dsa_indexer_k_norm_epsilon or config.norm_epsilon
        norm = replace(config, normalization="LayerNorm", norm_epsilon=epsilon)
        self.key_norm = Norm(f"{name}.key_norm", norm, factory=factory, size=self.size)
        self.head_weights = ReplicatedLinear(f"{name}.head_weights", (self.heads, h), std=std, factory=factory)
        self._rope = factory.kernel("rope", config.rotary_size)

    def forward(self, x: Tensor, q: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's input and that of its q_up, [s/cp, b, ...] -> queries [b, s/cp, n, d], keys [b, s/cp, d] and weights
        [b, s/cp, n].

        Inputs are split over tp as well with sequence parallelism, outputs are not.
        Collectives: with sequence parallelism three all-gathers over tp, forward."""
        parts = self.q_up(q), self.key_norm(self.key(x)), self.head_weights(x)
        if self.sequence_parallel:
            queries, keys, weights = (replicate_from_sequence_parallel_region(part, tp=self.tp) for part in parts)
        else:
            queries, keys, weights = parts
        queries = self._rotate(queries.unflatten(2, (self.heads, self.size)), context)
        keys = self._rotate(keys.unsqueeze(2), context).squeeze(2)
        weights = weights / math.sqrt(self.heads * self.size)
        return queries.transpose(0, 1), keys.transpose(0, 1), weights.transpose(0, 1)

    def _rotate(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Apply RoPE to the first channels of x [s, b, heads, d]."""
        return x if context.rope is None else rotate_part(self._rope, x, context.rope, interleaved=self.interleaved)


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_h w_h·ReLU(q_h·k): queries [b, s_q, n, d], keys [b, s_k, d], weights [b, s_q, n] -> [b, s_q, s_k].

    fp32 for half types."""
    products = _wide(queries).flatten(1, 2) @ _wide(keys).mT
    return (_wide(weights).unsqueeze(2) @ products.unflatten(1, queries.shape[1:3]).relu()).squeeze(2)


def top_keys(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Return the mask [b, s_q, s_k] of each query's `count` visible keys with the highest scores, or of all visible keys if
    they are fewer. Of equal scores, such as the zeros of ReLU, the earliest keys are chosen, on any device and layout."""
    scores = scores.masked_fill(~visible, -math.inf)
    last = scores.topk(min(count, scores.shape[-1]), dim=-1).values[..., -1:]
    above, equal = scores > last, scores == last
    left = count - above.sum(dim=-1, keepdim=True)
    return visible & (above | (equal & (equal.cumsum(dim=-1) <= left)))


class SparseAttention(LatentAttention):
    """Multi-latent attention over the keys that an `Indexer` chooses. The indexer learns only from its loss: the
    divergence of its softmax over keys from attention's probabilities, averaged over heads; the rest of the model only
    from the other losses.

    Scores of all keys are in memory for `INDEX_ROWS` queries at a time; the backward computes them again."""

    def __init__(self, name: str, config: ModelConfig, *, factory: ParameterFactory, **common: Any) -> None:
        super().__init__(name, config, factory=factory, **common)
        self.indexer = Indexer(f"{name}.indexer", config, factory=factory)
        self.top, self.coefficient = config.dsa_indexer_topk, config.dsa_indexer_loss_coeff
        self.sparse_loss = config.dsa_indexer_use_sparse_loss
        self.recompute_core = True

    def indexed(self, x: Tensor, q: Tensor, context: ForwardContext) -> tuple[Tensor, ...]:
        """Return the indexer's outputs; no gradient leaves the indexer. Collectives: those of `Indexer`."""
        return self.indexer(x.detach(), q.detach(), context)

    def core(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext, *index: Tensor) -> Tensor:
        """Attend queries [b, heads, s/cp, d] to the chosen of keys and values [b, heads, s/cp, d] -> [b, heads, s/cp, w].

        Collectives: over cp an all-gather / reduce-scatter each of keys, values and index keys; in training over tp an
        all-reduce of a score per query and key, forward and backward."""
        return self._core(q, k, v, context, *index)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext, *index: Tensor) -> Tensor:
        spans, (queries, keys, weights) = self.core_spans(context), index
        k, v = (gather_sequence(tensor, cp=self.core_cp, dim=2, spans=spans) for tensor in (k, v))
        keys = gather_sequence(keys, cp=self.core_cp, dim=1, spans=spans)
        parts = zip(
            *(q.split(INDEX_ROWS, dim=2), queries.split(INDEX_ROWS, dim=1), weights.split(INDEX_ROWS, dim=1)),
            context.positions.split(INDEX_ROWS),
            strict=True,
        )
        rows = partial(recomputed, self._rows) if torch.is_grad_enabled() else self._rows
        return torch.cat([rows(*part, k, v, keys, context) for part in parts], dim=2)

    def _rows(
        self,
        q: Tensor,
        queries: Tensor,
        weights: Tensor,
        positions: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        context: ForwardContext,
    ) -> Tensor:
        """Return the core's output for some queries, with their part of the indexer loss attached."""
        visible = visible_keys(positions, torch.arange(k.shape[2], device=k.device), context.visibility)
        scores = index_scores(queries, keys, weights)
        chosen = top_keys(scores.detach(), visible.squeeze(1), self.top)
        logits = _wide(q @ k.mT) / math.sqrt(self.head_size)
        found = _softmax(logits, chosen.unsqueeze(1))
        out = found.to(v.dtype) @ v[..., : self.values]
        if context.auxiliary is None:
            return out
        if self.sparse_loss:
            seen, target = chosen, found.detach()
        else:
            seen, target = visible.squeeze(1), _softmax(logits.detach(), visible)
        target = target.sum(dim=1)
        self.tp.all_reduce(target)
        target /= target.sum(dim=-1, keepdim=True)
        predicted = scores.masked_fill(~seen, -math.inf).log_softmax(dim=-1)
        # Hidden keys have 0·∞.
        divergence = (target * (target.clamp_min(LEAST).log() - predicted)).masked_fill(~seen, 0.0).sum()
        value = divergence * (self.coefficient * context.auxiliary.per_token)
        # Every tp rank computes the same loss, so only one counts it.
        return context.auxiliary.attach(out, INDEXER_LOSS, value, counts=self.tp.rank == 0)

    def _cached_keys(
        self, latent: Tensor, shared: Tensor, context: ForwardContext, *index: Tensor
    ) -> tuple[Tensor, Tensor]:
        keys, _ = super()._cached_keys(latent, shared, context)
        return keys, index[1].unsqueeze(1)

    def chosen(self, new: NextTokens, index_keys: Tensor, *index: Tensor) -> NextTokens:
        """Return `new` with the chosen keys as the visible ones, from the cached `index_keys` [b, 1, n, d]."""
        queries, _, weights = index
        scores = index_scores(queries, index_keys.squeeze(1), weights)
        visible = torch.ones_like(scores, dtype=torch.bool) if new.visible is None else new.visible.squeeze(1)
        return replace(new, visible=top_keys(scores, visible, self.top).unsqueeze(1))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF_TYPES else x


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
