"""Transformer block, with norms before its branches, on their outputs, or both; the MLP, its feed-forward half; and multi-token
prediction (MTP), blocks after the last that predict later tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.config.registry import imported
from megalite.kernels.bases import Module
from megalite.kernels.layer_ops import add_dropped, gated, squared_relu
from megalite.models.attention import Attention
from megalite.models.context import MTP_LOSS, ForwardContext, KeyValueCache
from megalite.models.norm import Norm, ResidualNorm
from megalite.models.recompute import Recompute, SavedTensors, recomputed
from megalite.tensor_parallel.layers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    vocab_parallel_lookup,
)
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter

_KINDS = {"swiglu": "silu", "geglu": "none", "geglu_tanh": "tanh", "quick_geglu": "quick"}


def activation_of(config: ModelConfig, size: int, *, factory: ParameterFactory) -> Callable[..., Tensor]:
    """Return the activation x [..., size] -> [..., size]; gated ones take x [..., 2·size] with the gate first.

    gelu also accepts a bias: `f(x, bias)`. `size`: the features on this rank."""
    name, limit, offset = config.activation, config.activation_func_clamp_value, config.glu_linear_offset
    if config.is_gated and (name == "quick_geglu" or limit is not None or offset):  # no other kernel supports these
        return partial(gated, kind=_KINDS[name], limit=limit, offset=offset)
    if name == "swiglu":
        return factory.kernel("swiglu", size)
    if name == "squared_relu":
        return squared_relu
    kind, _, tanh = name.partition("_")
    return partial(factory.kernel({"geglu": "geglu", "gelu": "bias_gelu"}[kind], size), tanh=bool(tanh))


class MLP(Module):
    """down(activation(up(x))). With a gate `up` is [2, f, h], gate first, split along f: each tp rank has whole pairs.

    `ffn_size`: the width f, by default the dense MLP's. `recompute`: None if the whole MLP is recomputed."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        *,
        factory: ParameterFactory,
        recompute: Recompute | None = None,
        ffn_size: int | None = None,
    ) -> None:
        super().__init__()
        f, h = ffn_size or config.ffn_size, config.hidden_size
        local = f // factory.tp.size
        self.activation = activation_of(config, local, factory=factory)
        # A fused kernel computes the bias's gradient without an extra pass.
        self.fuses_bias = (
            config.add_bias_linear and config.activation in ("gelu", "gelu_tanh") and factory.fuses("bias_gelu", local)
        )
        self.recompute_activation = recompute is not None and recompute.selects("mlp_act")
        self.saves = SavedTensors() if recompute is None else recompute.saves
        self._in_act = self.saves.runner("mlp_act")
        self.up = ColumnParallelLinear(
            f"{name}.up",
            (2, f, h) if config.is_gated else (f, h),
            shard_dim=1 if config.is_gated else 0,
            std=config.hidden_std,
            bias=config.add_bias_linear,
            factory=factory,
        )
        self.down = RowParallelLinear(
            f"{name}.down", (h, f), std=config.residual_std, bias=config.add_bias_linear, factory=factory
        )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]. Collectives: those of the two linear layers."""
        return self.second_half(self.first_half(x))

    def first_half(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the activation's arguments. Collectives: those of `up`."""
        if not self.fuses_bias:
            return (self.up(x),)
        assert self.up.bias is not None
        return self.up(x, add_bias=False), self.up.bias

    def second_half(self, inner: tuple[Tensor, ...]) -> Tensor:
        """Return the output. Collectives: those of `down`."""
        active = self._in_act(self.activation, *inner)
        if not self.recompute_activation:
            return self.down(active)
        with self.saves.recomputing(active, self.activation, *inner, saved_in="mlp_act"):
            return self.down(active)


class Block(Module):
    """x + r·dropout(attention(norm(x))), then x + r·dropout(feed_forward(norm(x))) for r = `residual_multiplier`;
    feed_forward is an MLP or a MoE layer, which layers of `no_mlp_freq` lack.

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
        self._add_dropped, self.factor = add_dropped, config.residual_multiplier
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
            kinds = imported("megalite.models.linear_attention:KINDS")
            attention, settings = kinds[config.experimental_attention_variant], {}
        elif config.multi_latent_attention:
            kind = "sparse_attention:SparseAttention" if config.is_sparse else "latent_attention:LatentAttention"
            attention = imported(f"megalite.models.{kind}")
        self.attention = attention(f"{name}.attention", config, factory=factory, recompute=recompute, **settings)
        if config.post_norms:
            self.attention_post_norm = Norm(f"{name}.attention_post_norm", config, factory=factory)
        self.mlp: MLP | None = None
        self.moe: torch.nn.Module | None = None
        self.has_mlp = config.has_mlp(index)
        if not self.has_mlp:
            return
        if config.pre_norms:
            # A recomputed norm must have the same bits, so both passes use the same, unfused kernel.
            self.mlp_norm = ResidualNorm(f"{name}.mlp_norm", config, factory=factory, fused=not self.recompute_norms)
        if config.is_moe_layer(index):
            experts = imported("megalite.models.moe_layer:MoELayer")
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
            normed = x = self._add_dropped(x, branch, bias, keep, self.dropout, self.factor)
        else:
            normed, x = self._in_mlp_norm(mlp_norm, x, branch, bias=bias, keep=keep, p=self.dropout)
        if not self.has_mlp:
            return x
        branch = self._branch(mlp_norm, "mlp_norm", x, self.feed_forward, normed, context)
        if self.mlp_post_norm is not None:
            branch = self._in_mlp_norm(self.mlp_post_norm, branch)
        keep = context.keep_mask(branch, self.dropout, site=f"{self.name}.mlp", region=self.region)
        return self._add_dropped(x, branch, None, keep, self.dropout, self.factor)

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


TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""(normalized hidden states, labels [b, s/cp]) -> loss of each token [b, s/cp]."""


class MTPLayer(Module):
    """One depth: depth k predicts token i + k + 1 at position i (DeepSeek-V3, arXiv 2412.19437, 2.2).

    norm(embedding of token i + k) and norm(hidden state of the previous depth) are projected to one hidden state, which
    passes through a block and a final norm. Parameters are named like layer num_layers + k - 1. The projection is
    replicated over tp; with sequence parallelism it runs on the rank's part of the sequence."""

    def __init__(
        self, index: int, config: ModelConfig, *, factory: ParameterFactory, recompute: Recompute, cp_comm_type: str
    ) -> None:
        super().__init__()
        name, h = f"layers.{index}", config.hidden_size
        self.recompute_whole = recompute.granularity == "full"
        self.embedding_norm = Norm(f"{name}.embedding_norm", config, factory=factory)
        self.hidden_norm = Norm(f"{name}.hidden_norm", config, factory=factory)
        self.projection = ReplicatedLinear(f"{name}.projection", (h, 2 * h), std=config.hidden_std, factory=factory)
        self.block = Block(index, config, factory=factory, recompute=recompute, cp_comm_type=cp_comm_type)
        self.final_norm = Norm(f"{name}.final_norm", config, factory=factory)

    def forward(self, x: Tensor, embedded: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states and embeddings [s/cp, b, h] -> normalized hidden states [s/cp, b, h].

        With sequence parallelism all are split over tp as well."""
        if self.recompute_whole and torch.is_grad_enabled():
            return self.final_norm(recomputed(self._block, x, embedded, context))
        return self.final_norm(self._block(x, embedded, context))

    def _block(self, x: Tensor, embedded: Tensor, context: ForwardContext) -> Tensor:
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(x)), dim=-1)
        return self.block(self.projection(both), context)


class MTPBlock(Module):
    """The `mtp_num_layers` depths of a model, on its last stage; they share the model's embedding and head.

    `word`: weight of the word embedding, or the last stage's copy of it."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        factory: ParameterFactory,
        word: ShardedParameter,
        recompute: Recompute,
        cp_comm_type: str,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = factory.tp, factory.sequence_parallel
        self.scale = config.embedding_scale
        self.word = word
        self.depths = torch.nn.ModuleList(
            MTPLayer(index, config, factory=factory, recompute=recompute, cp_comm_type=cp_comm_type)
            for index in config.mtp_layers
        )

    def forward(self, x: Tensor, context: ForwardContext, losses: TokenLosses) -> Tensor:
        """Return x [s/cp, b, h], the normalized hidden states, with the depths' losses attached to it."""
        inputs, auxiliary = context.mtp, context.auxiliary
        assert inputs is not None and auxiliary is not None
        hidden, total = x, None
        for depth, labels, tokens, weights in zip(
            self.depths, inputs.labels, inputs.tokens, inputs.weights, strict=True
        ):
            embedded = vocab_parallel_lookup(tokens, self.word, tp=self.tp, sequence_parallel=self.sequence_parallel)
            if self.scale != 1.0:
                embedded = embedded * self.scale
            hidden = depth(hidden, embedded, context)
            each = losses(hidden, labels)
            term = (each * weights.to(each.dtype)).sum()
            total = term if total is None else total + term
        assert total is not None
        # Every tp rank computes the same loss, so only one counts it.
        return auxiliary.attach(x, MTP_LOSS, total, counts=self.tp.rank == 0)
