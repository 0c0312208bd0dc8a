"""One transformer block, pre-norm."""

import torch
from torch.utils.checkpoint import checkpoint

from megalite.config.model import ModelConfig
from megalite.models.attention import Attention
from megalite.models.cache import KeyValueCache
from megalite.models.context import ForwardContext
from megalite.models.mlp import MLP
from megalite.models.norm import Norm
from megalite.tensor_parallel.parameter import ParameterFactory


class Block(torch.nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).

    Args:
        index: the layer's number in the whole model; names and dropout keys carry it.
        recompute: none, selective (the attention core runs again in the backward) or full (the block does).
    """

    def __init__(self, index: int, config: ModelConfig, *, make: ParameterFactory, recompute: str) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.name = name
        self.dropout = config.hidden_dropout
        self.tp, self.sequence_parallel = make.tp, make.sequence_parallel
        self.recompute = recompute == "full"
        self.attention_norm = Norm(f"{name}.attention_norm", config, make=make)
        self.attention = Attention(
            f"{name}.attention", config, make=make, recompute_core=recompute == "selective"
        )
        self.mlp_norm = Norm(f"{name}.mlp_norm", config, make=make)
        self.mlp = MLP(f"{name}.mlp", config, make=make)

    def forward(
        self, x: torch.Tensor, context: ForwardContext, cache: KeyValueCache | None = None
    ) -> torch.Tensor:
        """[s, b, h] -> [s, b, h], split over s with sequence parallelism."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._forward, x, context, None, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, context, cache)

    def _forward(self, x: torch.Tensor, context: ForwardContext, cache: KeyValueCache | None) -> torch.Tensor:
        x = x + self._drop(self.attention(self.attention_norm(x), context, cache), "attention", context)
        return x + self._drop(self.mlp(self.mlp_norm(x)), "mlp", context)

    def _drop(self, x: torch.Tensor, branch: str, context: ForwardContext) -> torch.Tensor:
        return context.hidden_dropout(
            x,
            self.dropout,
            site=f"{self.name}.{branch}",
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
        )
