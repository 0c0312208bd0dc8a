"""Transformer block, with norms before its branches, on their outputs, or both."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.config.registry import imported
from megalite.kernels.bases import Module
from megalite.kernels.layer_ops import add_dropped
from megalite.models.attention import Attention
from megalite.models.context import ForwardContext, KeyValueCache
from megalite.models.mlp import MLP
from megalite.models.norm import Norm, ResidualNorm
from megalite.models.recompute import Recompute, recomputed
from megalite.tensor_parallel.parameter import ParameterFactory


class Block(Module):
    """x + dropout(attention(norm(x))), then x + dropout(feed_forward(norm(x))); feed_forward is an MLP or a MoE layer.

    With `post_norms` dropout is applied to norm(branch); without `pre_norms` a branch reads x itself.

    `index` is the layer's number in the whole model, used in parameter names and dropout keys. Full recompute wraps
    whole blocks (`run_layers`), selective recompute parts of a block."""

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
        self.name, self.saves = f"layers.{index}", recompute.saves
        self._in_attn_norm, self._in_mlp_norm = self.saves.runner("attn_norm"), self.saves.runner("mlp_norm")
        name = self.name
        self.dropout, self.region = config.hidden_dropout, factory.sequence_region
        self._add_dropped = add_dropped
        self.recompute_norms, self.recompute_mlp = recompute.selects("layernorm"), recompute.selects("mlp")
        self.attention_norm: Norm | None = None
        self.mlp_norm: ResidualNorm | None = None
        self.attention_post_norm: Norm | None = None
        self.mlp_post_norm: Norm | None = None
        if config.pre_norms:
            self.attention_norm = Norm(f"{name}.attention_norm", config, factory=factory)
        attention: Any = Attention
        settings: dict[str, Any] = {"cp_comm_type": cp_comm_type, "index": index}
        if config.is_linear_layer(index):
            attention, settings = imported("megalite.models.gated_delta:GatedDeltaNet"), {}
        elif config.multi_latent_attention:
            attention = imported("megalite.models.latent_attention:LatentAttention")
        self.attention = attention(f"{name}.attention", config, factory=factory, recompute=recompute, **settings)
        if config.post_norms:
            self.attention_post_norm = Norm(f"{name}.attention_post_norm", config, factory=factory)
        if config.pre_norms:
            # A recomputed norm must have the same bits, so both passes use the same, unfused kernel.
            self.mlp_norm = ResidualNorm(f"{name}.mlp_norm", config, factory=factory, fused=not self.recompute_norms)
        self.mlp: MLP | None = None
        self.moe: torch.nn.Module | None = None
        if config.is_moe_layer(index):
            experts = imported("megalite.models.moe.layer:MoELayer")
            self.moe = experts(f"{name}.moe", config, factory=factory, recompute=recompute)
        else:
            inside = None if self.recompute_mlp else recompute
            self.mlp = MLP(f"{name}.mlp", config, factory=factory, recompute=inside)
        if config.post_norms:
            self.mlp_post_norm = Norm(f"{name}.mlp_post_norm", config, factory=factory)

    def forward(self, x: Tensor, context: ForwardContext, cache: KeyValueCache | None = None) -> Tensor:
        """[s/cp, b, h] -> [s/cp, b, h], split over tp as well with sequence parallelism."""
        attention, norm, mlp_norm = self.attention, self.attention_norm, self.mlp_norm
        normed = x if norm is None else self._in_attn_norm(norm, x)
        late = self.attention_post_norm is None  # a post-norm normalizes the branch including its bias
        branch = self._branch(norm, "attn_norm", x, attention, normed, context, cache, add_late_bias=not late)
        if self.attention_post_norm is not None:
            branch = self._in_attn_norm(self.attention_post_norm, branch)
        keep = context.keep_mask(branch, self.dropout, site=f"{self.name}.attention", region=self.region)
        bias = attention.out.late_bias if late else None
        if mlp_norm is None:
            normed = x = self._add_dropped(x, branch, bias, keep, self.dropout)
        else:
            normed, x = self._in_mlp_norm(mlp_norm, x, branch, bias=bias, keep=keep, p=self.dropout)
        branch = self._branch(mlp_norm, "mlp_norm", x, self.feed_forward, normed, context)
        if self.mlp_post_norm is not None:
            branch = self._in_mlp_norm(self.mlp_post_norm, branch)
        keep = context.keep_mask(branch, self.dropout, site=f"{self.name}.mlp", region=self.region)
        return self._add_dropped(x, branch, None, keep, self.dropout)

    def _branch(
        self,
        norm: Norm | None,
        name: str,
        x: Tensor,
        branch: Callable[..., Tensor],
        normed: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return branch(normed, ...); if norms are recomputed, it saves nothing of norm(x)."""
        if not self.recompute_norms or norm is None:
            return branch(normed, *args, **kwargs)
        with self.saves.recomputing(normed, norm.normalize, x, saved_in=name):
            return branch(normed, *args, **kwargs)

    def feed_forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        if self.moe is not None:
            return self.moe(x, context)
        mlp = self.mlp
        assert mlp is not None
        return recomputed(mlp, x) if self.recompute_mlp and torch.is_grad_enabled() else mlp(x)


def run_layers(
    blocks: Sequence[Block], x: Tensor, context: ForwardContext, *, cache: KeyValueCache | None, recompute: Recompute
) -> Tensor:
    """Run all blocks on [s/cp, b, h], split over tp as well with sequence parallelism.

    With full recompute a unit of blocks saves only its input and runs again in the backward. The first
    `recompute.offload_layers` layers offload their saved tensors to host memory."""
    recompute_blocks = offloaded = 0
    offload: Any = recompute.saves  # an ActivationOffload if layers are offloaded
    if torch.is_grad_enabled():
        offloaded = recompute.offload_layers
        if recompute.granularity == "full":
            recompute_blocks = len(blocks) if recompute.method == "uniform" else min(recompute.num_layers, len(blocks))
    if offloaded:
        offload.start()
    first, fetches = 0, offloaded > 0
    while first < len(blocks):
        whole = first < recompute_blocks
        unit = blocks[first : first + (recompute.num_layers if whole and recompute.method == "uniform" else 1)]
        if first < offloaded:
            stays = [parameter for block in unit for parameter in block.parameters()]
            with offload.layer(x, [*stays, *context.tables], recomputed=whole):
                x = recomputed(_run, unit, x, context) if whole else _run(unit, x, context)
        else:
            x = recomputed(_run, unit, x, context) if whole else _run(unit, x, context, cache)
            if fetches:
                offload.fetch_with(x)
            fetches = False
        first += len(unit)
    return x


def _run(blocks: Sequence[Block], x: Tensor, context: ForwardContext, cache: KeyValueCache | None = None) -> Tensor:
    for block in blocks:
        x = block(x, context, cache)
    return x
