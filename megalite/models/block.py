"""One transformer block, pre-norm."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils.checkpoint import checkpoint

from megalite.config.model import ModelConfig
from megalite.config.registry import Registry
from megalite.kernels.layer_ops import add_dropped
from megalite.models.attention import Attention
from megalite.models.context import ForwardContext, KeyValueCache
from megalite.models.mlp import MLP
from megalite.models.norm import Norm, ResidualNorm
from megalite.models.recompute import Recompute, not_saving
from megalite.tensor_parallel.parameter import ParameterFactory

FEED_FORWARD: Registry[Callable[..., torch.nn.Module]] = Registry(
    "feed-forward", {"experts": "megalite.models.moe.layer:MoELayer"}
)
"""What a layer may have in place of an MLP."""


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
        factory: ParameterFactory,
        recompute: Recompute,
        cp_comm_type: str = "p2p",
    ) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.name = name
        self.dropout = config.hidden_dropout
        self.tp, self.sequence_parallel = factory.tp, factory.sequence_parallel
        self._add_dropped = add_dropped
        self.recompute_norms = recompute.selects("layernorm")
        self.recompute_mlp = recompute.selects("mlp")
        self.attention_norm = Norm(f"{name}.attention_norm", config, factory=factory)
        self.attention = Attention(
            f"{name}.attention", config, factory=factory, recompute=recompute, cp_comm_type=cp_comm_type
        )
        # What a recomputed norm gives again must have the same bits, so one kernel makes it both times.
        self.mlp_norm = ResidualNorm(f"{name}.mlp_norm", config, factory=factory, fused=not self.recompute_norms)
        self.mlp: MLP | None = None
        self.moe: torch.nn.Module | None = None
        if config.is_moe_layer(index):
            self.moe = FEED_FORWARD.get("experts")(f"{name}.moe", config, factory=factory, recompute=recompute)
        else:
            inside = None if self.recompute_mlp else recompute
            self.mlp = MLP(f"{name}.mlp", config, factory=factory, recompute=inside)

    def forward(self, x: torch.Tensor, context: ForwardContext, cache: KeyValueCache | None = None) -> torch.Tensor:
        """[s/cp, b, h] -> [s/cp, b, h], split over tp as well with sequence parallelism."""

        with self._remaking(normed := self.attention_norm(x), self.attention_norm, x):
            branch = self.attention(normed, context, cache, add_late_bias=False)
        normed, x = self.mlp_norm(
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
        return not_saving(normed, norm.normalize, x) if self.recompute_norms else nullcontext()

    def _feed_forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        if self.moe is not None:
            return self.moe(x, context)
        assert self.mlp is not None
        if self.recompute_mlp and torch.is_grad_enabled():
            return checkpoint(self.mlp, x, use_reentrant=False, preserve_rng_state=False)
        return self.mlp(x)

    def _keep_mask(self, x: torch.Tensor, branch: str, context: ForwardContext) -> torch.Tensor | None:
        return context.keep_mask(
            x, self.dropout, site=f"{self.name}.{branch}", tp=self.tp, sequence_parallel=self.sequence_parallel
        )


def run_layers(
    blocks: Sequence[Block],
    x: torch.Tensor,
    context: ForwardContext,
    *,
    cache: KeyValueCache | None,
    recompute: Recompute,
) -> torch.Tensor:
    """[s/cp, b, h] -> [s/cp, b, h] through all blocks, split over tp as well with sequence parallelism.

    With full recompute a unit keeps its input alone and runs again in the backward; dropout needs no saved generator
    state for that, since its masks have none.
    """
    recomputed, kept = 0, len(blocks)
    if recompute.granularity == "full" and torch.is_grad_enabled():
        recomputed = kept if recompute.method == "uniform" else min(recompute.num_layers, kept)
    unit = recompute.num_layers if recompute.method == "uniform" else 1
    for start in range(0, recomputed, unit):
        x = checkpoint(_run, blocks[start : start + unit], x, context, use_reentrant=False, preserve_rng_state=False)
    return _run(blocks[recomputed:], x, context, cache)


def _run(
    blocks: Sequence[Block], x: torch.Tensor, context: ForwardContext, cache: KeyValueCache | None = None
) -> torch.Tensor:
    for block in blocks:
        x = block(x, context, cache)
    return x
