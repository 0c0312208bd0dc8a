"""Multi-latent attention: queries, keys and values from low-rank latents (DeepSeek-V2, arXiv 2405.04434)."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.context_parallel.attention import heads_to_sequence, sequence_to_heads
from megalite.kernels.layer_ops import latent_score_factor
from megalite.models.attention import AttentionCore
from megalite.models.context import ForwardContext, KeyValueCache, NextTokens
from megalite.models.norm import Norm
from megalite.models.recompute import Recompute, recomputed
from megalite.tensor_parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megalite.tensor_parallel.mappings import enter_tensor_parallel_region
from megalite.tensor_parallel.parameter import ParameterFactory


class LatentAttention(AttentionCore):
    """Project down to a latent on every tp rank, normalize, project up to this rank's heads.

    A head's query and key have `qk_head_dim` channels from the latent and `qk_pos_emb_head_dim` channels with RoPE;
    those of the key come from the layer's input and are shared by all heads. Values have `v_head_dim` channels.

    Letters: d = qk_head_dim, e = qk_pos_emb_head_dim, w = v_head_dim, r = kv_lora_rank. The core uses one width, d + e,
    so narrower values are padded with zeros."""

    def __init__(
        self, name: str, config: ModelConfig, *, factory: ParameterFactory, recompute: Recompute, **common: Any
    ) -> None:
        super().__init__(name, config, factory=factory, recompute=recompute, **common)
        self.tp, self.sequence_parallel = factory.tp, factory.sequence_parallel
        self.plain, self.rotary, self.values = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        self.rank = config.kv_lora_rank
        self.recompute_up = recompute.selects("mla_up_proj")
        # A configured softmax_scale replaces YaRN's factor too.
        factor = 1.0 if config.softmax_scale is not None else latent_score_factor(config)
        self.scale = factor * (config.score_scale or 1 / math.sqrt(config.head_size))
        h, heads, std = config.hidden_size, config.num_attention_heads, config.hidden_std
        rows = heads * config.head_size
        self.q_down: ReplicatedLinear | None = None
        self.q_latent_norm: Norm | None = None
        if config.q_lora_rank is None:
            self.q_up = ColumnParallelLinear(f"{name}.q", (rows, h), std=std, bias=False, factory=factory)
        else:
            shape = (config.q_lora_rank, h)
            self.q_down = ReplicatedLinear(f"{name}.q_down", shape, std=std, factory=factory)
            if config.qk_norm:
                self.q_latent_norm = Norm(f"{name}.q_latent_norm", config, factory=factory, size=config.q_lora_rank)
            shape = (rows, config.q_lora_rank)
            self.q_up = ColumnParallelLinear(f"{name}.q_up", shape, std=std, bias=False, factory=factory)
        self.kv_down = ReplicatedLinear(f"{name}.kv_down", (self.rank + self.rotary, h), std=std, factory=factory)
        self.kv_latent_norm: Norm | None = None
        if config.qk_norm:
            self.kv_latent_norm = Norm(f"{name}.kv_latent_norm", config, factory=factory, size=self.rank)
        shape = (heads * (self.plain + self.values), self.rank)
        self.kv_up = ColumnParallelLinear(f"{name}.kv_up", shape, std=std, bias=False, factory=factory)
        self.out = RowParallelLinear(
            f"{name}.out",
            (h, heads * self.values),
            std=config.residual_std,
            bias=config.add_bias_linear,
            factory=factory,
        )

    def indexed(self, x: Tensor, q: Tensor, context: ForwardContext) -> tuple[Tensor, ...]:
        """Return what `core` needs besides the heads, from the layer's input and that of q_up."""
        return ()

    def forward(
        self, x: Tensor, context: ForwardContext, cache: KeyValueCache | None = None, *, add_late_bias: bool = True
    ) -> Tensor:
        """[s/cp, b, h] -> [s/cp, b, h], split over tp as well with sequence parallelism.

        Collectives (forward / backward): those of the parallel layers; for the shared RoPE key an all-gather /
        reduce-scatter with sequence parallelism, else none / all-reduce; over cp those of the core and two all-to-alls.
        """
        if not self.windowed and context.full is not None:
            context = context.full
        with self.saves.module("qkv_linear"):
            q = x if self.q_down is None else self.q_down(x)
            q = q if self.q_latent_norm is None else self.q_latent_norm(q)
            latent, shared = self.kv_down(x).split((self.rank, self.rotary), dim=2)
            latent = latent.contiguous() if self.kv_latent_norm is None else self.kv_latent_norm(latent)
            index = self.indexed(x, q, context)
        if cache is not None and context.next_tokens is not None:
            mixed = self._cached(q, latent, shared, cache, context, context.next_tokens, *index)
            return self.out(mixed.flatten(2), add_late_bias=add_late_bias)
        if cache is not None:
            cache.fill(self.name, *self._cached_keys(latent, shared, context, *index))
        mixed = self._attention(q, latent, shared, context, *index).permute(2, 0, 1, 3)[..., : self.values]
        if self.exchange_heads:
            mixed = heads_to_sequence(mixed, cp=self.cp_heads, spans=self.exchange_spans(context))
        return self._in_proj(self.out, mixed.flatten(2), add_late_bias=add_late_bias)

    def _attention(self, q: Tensor, latent: Tensor, shared: Tensor, context: ForwardContext, *index: Tensor) -> Tensor:
        """Run `core` on the heads; selective recompute of `mla_up_proj` recomputes the heads from the latents."""
        recompute = self.recompute_up and torch.is_grad_enabled()
        with self.saves.module("qkv_linear"):
            if recompute and self.recompute_core:
                return recomputed(self._whole, q, latent, shared, context, *index)
            heads = self._heads(q, latent, shared, context)
        with self.saves.module("core_attn"):
            if not recompute:
                return self.core(*heads, context, *index)
            up_project = partial(self._heads, context=context)
            with self.saves.recomputing(heads, up_project, q, latent, shared, saved_in="qkv_linear"):
                return self._core(*heads, context)

    def _whole(self, q: Tensor, latent: Tensor, shared: Tensor, context: ForwardContext, *index: Tensor) -> Tensor:
        return self._core(*self._heads(q, latent, shared, context), context, *index)

    def _heads(
        self, q: Tensor, latent: Tensor, shared: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Build the core's queries, keys and values [b, heads, s, d + e].

        Inputs [s/cp, b, ...]: the input of q_up, the latent of keys and values, and the shared RoPE key."""
        q = self._queries(q, context)
        s, b, heads, _ = q.shape
        k, v = self.kv_up(latent).view(s, b, heads, -1).split((self.plain, self.values), dim=3)
        k = torch.cat((k, self._shared_key(shared, context).expand(-1, -1, heads, -1)), dim=3)
        if self.exchange_heads:
            packed = sequence_to_heads(
                torch.cat((q, k, v), dim=3), cp=self.cp_heads, spans=self.exchange_spans(context)
            )
            q, k, v = (part.contiguous() for part in packed.split((q.shape[3], k.shape[3], v.shape[3]), dim=3))
        v = F.pad(v, (0, self.head_size - self.values)) if self.values < self.head_size else v.contiguous()
        return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)

    def _queries(self, q: Tensor, context: ForwardContext) -> Tensor:
        """Return queries [s, b, heads, d + e], scaled so that the core's 1 / sqrt(d + e) gives `self.scale`."""
        plain, rotary = self.q_up(q).unflatten(2, (-1, self.head_size)).split((self.plain, self.rotary), dim=3)
        q = torch.cat((plain, self._rotate(rotary, context)), dim=3) * (self.scale * math.sqrt(self.head_size))
        return q if context.query_factors is None else q * context.query_factors

    def _shared_key(self, shared: Tensor, context: ForwardContext) -> Tensor:
        """Return the RoPE key that all heads share, [s, b, 1, e]; every tp rank uses it for its own heads."""
        shared = enter_tensor_parallel_region(shared, tp=self.tp, sequence_parallel=self.sequence_parallel)
        return self._rotate(shared.unsqueeze(2), context)

    def _rotate(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Apply RoPE to interleaved pairs of all channels of x [s, b, heads, e]; the output has the pairs' first
        channels in one half and the second in the other, for queries and keys alike."""
        if not self.has_rope or context.rope is None:
            return x
        pairs = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return self._rope(pairs.contiguous(), *context.rope)

    def _cached_keys(
        self, latent: Tensor, shared: Tensor, context: ForwardContext, *index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the cache's entries [b, 1, s, r + e] for all heads, of which the first r channels are also the values,
        and the keys [b, 1, s, ...] of an indexer."""
        keys = torch.cat((latent.unsqueeze(2), self._shared_key(shared, context)), dim=3).permute(1, 2, 0, 3)
        return keys, keys[..., :0]

    def chosen(self, new: NextTokens, index_keys: Tensor, *index: Tensor) -> NextTokens:
        """Return `new` with the cached tokens that the next ones attend to."""
        return new

    def _cached(
        self,
        q: Tensor,
        latent: Tensor,
        shared: Tensor,
        cache: KeyValueCache,
        context: ForwardContext,
        new: NextTokens,
        *index: Tensor,
    ) -> Tensor:
        """Attend one token per row to the cached latents -> [1, b, heads, w].

        kv_up is applied to queries and results instead of every key and value: q·(U·c) = (Uᵀ·q)·c and
        P·(c·Vᵀ) = (P·c)·Vᵀ. Attention is then multi-query with keys of r + e channels."""
        keys, index_keys = cache.append(self.name, *self._cached_keys(latent, shared, context, *index), new)
        new = self.chosen(new, index_keys, *index)
        q = self._queries(q, context)
        up, down = self.kv_up.weight.unflatten(0, (q.shape[2], -1)).split((self.plain, self.values), dim=1)
        plain, rotary = q.split((self.plain, self.rotary), dim=3)
        # The core divides by the square root of its input's width.
        queries = torch.cat((torch.einsum("sbhd,hdr->sbhr", plain, up), rotary), dim=3)
        queries = queries * math.sqrt(keys.shape[3] / self.head_size)
        mixed = self.cached(queries.permute(1, 2, 0, 3), keys, keys[..., : self.rank], new)
        return torch.einsum("bhsr,hwr->sbhw", mixed, down)
