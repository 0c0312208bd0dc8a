"""Causal self-attention, multi-head or grouped-query."""

import math

import torch
from torch.utils.checkpoint import checkpoint

from megalite.config.model import ModelConfig
from megalite.kernels.attention import causal_attention
from megalite.kernels.rope import apply_rope
from megalite.models.cache import KeyValueCache
from megalite.models.context import ForwardContext
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter import ParameterFactory


class Attention(torch.nn.Module):
    """Heads are split over tp by key/value group. Rows of `qkv` are ordered by group: its queries, its key, its value."""

    def __init__(
        self, name: str, config: ModelConfig, *, make: ParameterFactory, recompute_core: bool
    ) -> None:
        super().__init__()
        self.name = name
        self.recompute_core = recompute_core
        self.dropout = config.attention_dropout
        self.head_size = config.head_size
        self.queries = config.num_attention_heads // config.query_groups
        self.groups = config.query_groups // make.tp.size
        self.first_head = make.tp.rank * self.groups * self.queries
        rows = config.query_groups * (self.queries + 2) * self.head_size
        self.qkv = ColumnParallelLinear(
            f"{name}.qkv",
            (rows, config.hidden_size),
            std=config.init_method_std,
            bias=config.add_bias_linear,
            make=make,
        )
        self.out = RowParallelLinear(
            f"{name}.out",
            (config.hidden_size, config.num_attention_heads * self.head_size),
            std=config.init_method_std / math.sqrt(2 * config.num_layers),
            bias=config.add_bias_linear,
            make=make,
        )

    def forward(
        self, x: torch.Tensor, context: ForwardContext, cache: KeyValueCache | None = None
    ) -> torch.Tensor:
        """[s, b, h] -> [s, b, h]. Collectives: those of the two linear layers."""
        qkv = self.qkv(x)
        s, b = qkv.shape[:2]
        qkv = qkv.view(s, b, self.groups, self.queries + 2, self.head_size)
        q, k, v = qkv.split((self.queries, 1, 1), dim=3)
        q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
        if context.rope is not None:
            q, k = apply_rope(q, *context.rope), apply_rope(k, *context.rope)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
        if cache is not None:
            k, v = cache.extend(self.name, k, v)
        if self.recompute_core and torch.is_grad_enabled():
            mixed = checkpoint(self._core, q, k, v, context, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._core(q, k, v, context)
        return self.out(mixed.permute(2, 0, 1, 3).reshape(s, b, -1))

    def _core(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """[b, heads/tp, s, d] queries against keys and values -> [b, heads/tp, s, d]."""
        causal = q.shape[2] == k.shape[2]
        if self.dropout == 0.0 or context.stream is None:
            return causal_attention(q, k, v, causal=causal)
        stream = context.stream

        def keep_mask(probabilities: torch.Tensor) -> torch.Tensor:
            b, heads, s, t = probabilities.shape
            masks = [
                torch.stack(
                    [
                        stream.keep(
                            f"{self.name}.{self.first_head + head}", i, (s, t), self.dropout, q.device
                        )
                        for head in range(heads)
                    ]
                )
                for i in range(b)
            ]
            return torch.stack(masks).to(probabilities.dtype) / (1.0 - self.dropout)

        return causal_attention(q, k, v, causal=causal, keep_mask=keep_mask)
