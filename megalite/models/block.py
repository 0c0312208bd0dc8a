"""One transformer block, pre-norm."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils.checkpoint import checkpoint

from megalite.config.model import ModelConfig
from megalite.kernels.dropout import add_dropped
from megalite.models.attention import Attention
from megalite.models.cache import KeyValueCache
from megalite.models.context import ForwardContext
from megalite.models.mlp import MLP
from megalite.models.moe.layer import MoELayer
from megalite.models.norm import Norm
from megalite.models.recompute import Recompute
from megalite.models.recompute_saved import not_saving
from megalite.tensor_parallel.parameter import ParameterFactory


class Block(torch.nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(feed_forward(norm(x))): an MLP, or experts.

    Args:
        index: the layer's number in the whole model; names and dropout keys carry it.
        recompute: what the backward runs again inside the block; full recompute is around it (`run_layers`).
        cp_comm_type: how attention sees a sequence that is split over cp.
    """

    def __init__(
        self,
        index: int,
        config: ModelConfig,
        *,
        make: ParameterFactory,
        recompute: Recompute,
        cp_comm_type: str = "p2p",
    ) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.name = name
        self.dropout = config.hidden_dropout
        self.tp, self.sequence_parallel = make.tp, make.sequence_parallel
        self._add_dropped = add_dropped
        self.recompute_norms = recompute.selects("layernorm")
        self.recompute_mlp = recompute.selects("mlp")
        self.attention_norm = Norm(f"{name}.attention_norm", config, make=make)
        self.attention = Attention(
            f"{name}.attention", config, make=make, recompute=recompute, cp_comm_type=cp_comm_type
        )
        # What a recomputed norm gives again must have the same bits, so one kernel makes it both times.
        self.mlp_norm = Norm(f"{name}.mlp_norm", config, make=make, of_sums=not self.recompute_norms)
        self.mlp: MLP | None = None
        self.moe: MoELayer | None = None
        if config.is_moe_layer(index):
            self.moe = MoELayer(f"{name}.moe", config, make=make, recompute=recompute)
        else:
            inside = None if self.recompute_mlp else recompute
            self.mlp = MLP(f"{name}.mlp", config, make=make, recompute=inside)

    def forward(
        self, x: torch.Tensor, context: ForwardContext, cache: KeyValueCache | None = None
    ) -> torch.Tensor:
        """[s/cp, b, h] -> [s/cp, b, h], split over tp as well with sequence parallelism."""

        with self._remaking(normed := self.attention_norm(x), self.attention_norm, x):
            branch = self.attention(normed, context, cache, add_late_bias=False)
        normed, x = self.mlp_norm.of_sum(
            x,
            branch,
            bias=self.attention.out.late_bias,
            keep=self._keep_mask(branch, "attention", context),
            p=self.dropout,
        )
        with self._remaking(normed, self.mlp_norm, x):
            branch = self._feed_forward(normed, context)
        keep = self._keep_mask(branch, "mlp", context)
        return self._add_dropped(x, branch, None, keep, self.dropout)

    def _remaking(self, normed: torch.Tensor, norm: Norm, x: torch.Tensor) -> AbstractContextManager[None]:
        """Where norms are recomputed, what runs inside keeps nothing of norm(x)."""
        return not_saving(normed, norm, x) if self.recompute_norms else nullcontext()

    def _feed_forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        if self.moe is not None:
            return self.moe(x, context)
        assert self.mlp is not None
        if self.recompute_mlp and torch.is_grad_enabled():
            return checkpoint(self.mlp, x, use_reentrant=False, preserve_rng_state=False)
        return self.mlp(x)

    def _keep_mask(self, x: torch.Tensor, branch: str, context: ForwardContext) -> torch.Tensor | None:
        return context.keep_mask(
            x,
            self.dropout,
            site=f"{self.name}.{branch}",
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
        )
