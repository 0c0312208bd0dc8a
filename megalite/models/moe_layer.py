"""Mixture-of-experts layer: the feed-forward half of a block."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.kernels.bases import Function, Module
from megalite.kernels.matmul import GroupSizes, Matmul, accumulate_grouped_weight_grad, grouped_matmul, matmul
from megalite.models.block import MLP, activation_of
from megalite.models.context import ForwardContext
from megalite.models.moe_dispatch import plan_route, return_to_tokens, send_to_experts
from megalite.models.moe_router import Router
from megalite.models.recompute import Recompute, SavedTensors, recomputed
from megalite.tensor_parallel.mappings import (
    reduce_from_tensor_parallel_region,
    replicate_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter, WeightGradient, as_sharded
from megalite.topology.group import Group


class Experts(Module):
    """down_e(activation(up_e(x))) for the rows of each local expert e.

    `up` is [E, f, h], or [E, 2, f, h] with a gate (first), `down` [E, h, f]: E is split over ep and f over expert_tp.
    Biases are [E, f] or [E, 2, f], and [E, h], which all ranks of expert_tp have and the first adds to its partial
    sums.

    Args:
        recompute: with `mlp_act` the activation's output is not saved; None if the whole experts are recomputed."""

    def __init__(
        self, name: str, config: ModelConfig, *, factory: ParameterFactory, recompute: Recompute | None
    ) -> None:
        super().__init__()
        assert config.num_experts is not None
        count, f, h = config.num_experts, config.expert_ffn_size, config.hidden_size
        stacked = (count, 2, f) if config.is_gated else (count, f)
        self.activation = activation_of(config, f // factory.expert_tp.size, factory=factory)
        self._up = factory.kernel("matmul", h)
        self._down = factory.kernel("matmul", f // factory.expert_tp.size)
        self.recompute_activation = recompute is not None and recompute.selects("mlp_act")
        self.saves = SavedTensors() if recompute is None else recompute.saves
        self._in_fc1, self._in_act = self.saves.runner("expert_fc1"), self.saves.runner("mlp_act")
        std, split = config.hidden_std, len(stacked) - 1
        self.up = factory.parameter(f"{name}.up.weight", (*stacked, h), shard_dim=split, std=std, expert=True)
        std = config.residual_std
        self.down = factory.parameter(f"{name}.down.weight", (count, h, f), shard_dim=2, std=std, expert=True)
        self.up_bias: ShardedParameter | None = None
        self.down_bias: ShardedParameter | None = None
        self.adds_bias = factory.expert_tp.rank == 0
        if config.moe_add_bias_linear:
            self.up_bias = factory.parameter(f"{name}.up.bias", stacked, shard_dim=split, decay=False, expert=True)
            self.down_bias = factory.parameter(f"{name}.down.bias", (count, h), decay=False, expert=True)

    def forward(self, rows: Tensor, sizes: GroupSizes) -> Tensor:
        """Rows [n, h] sorted by expert -> [n, h], partial sums over expert_tp. Collectives: none."""
        inner = self._in_fc1(grouped_linear, rows, self.up, sizes, self._up, bias=self.up_bias)
        active = self._in_act(self.activation, inner)
        recomputing = self.saves.recomputing(active, self.activation, inner, saved_in="mlp_act")
        with recomputing if self.recompute_activation else nullcontext():
            return grouped_linear(active, self.down, sizes, self._down, bias=self.down_bias, adds_bias=self.adds_bias)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    sizes: GroupSizes,
    multiply: Matmul = matmul,
    *,
    bias: ShardedParameter | None = None,
    adds_bias: bool = True,
) -> Tensor:
    """Compute y = x·W_eᵀ + b_e of each expert e: x [n, i], weight [E/ep, ..., i], bias [E/ep, ...] -> [n, o].

    Without `adds_bias` another rank adds the bias to its partial sums; this rank still computes the bias's gradient.
    `multiply` computes output and input gradient if the experts' products are not fused.

    If `weight.main_grad` is set, the backward adds the weight gradient to it and reports once per microbatch, even
    without rows; otherwise it returns the gradient to autograd. It may be deferred.

    Collectives: none."""
    return _GroupedLinear.apply(x, as_sharded(weight), bias, sizes, multiply, adds_bias)


class _GroupedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: ShardedParameter,
        bias: ShardedParameter | None,
        sizes: GroupSizes,
        multiply: Matmul,
        adds_bias: bool,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.version, ctx.bias, ctx.sizes, ctx.multiply = weight, weight._version, bias, sizes, multiply
        y = grouped_matmul(x, _matrices(weight).transpose(1, 2), sizes, multiply)
        return y if bias is None or not adds_bias else y.add_(bias.flatten(1)[sizes.owners(len(y))])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, sizes = ctx.saved_tensors, ctx.weight, ctx.sizes
        if weight._version != ctx.version:
            raise weight.changed(ctx.version)
        grad_y = grad_y.contiguous()
        grad_x, x = grouped_matmul(grad_y, _matrices(weight), sizes, ctx.multiply), x.detach()

        def product(main_grad: Tensor | None) -> Tensor | None:
            if main_grad is None:
                grad_weight = torch.zeros_like(weight)
                accumulate_grouped_weight_grad(_matrices(grad_weight), grad_y, x, sizes)
                return grad_weight
            accumulate_grouped_weight_grad(_matrices(main_grad), grad_y, x, sizes, weight.accumulate_product)
            return None

        grad_bias = None
        if ctx.bias is not None:  # a matrix product, because index_add has no fixed order on CUDA
            experts = torch.arange(len(weight), device=grad_y.device).unsqueeze(1)
            grad_bias = ((experts == sizes.owners(len(grad_y))).to(grad_y.dtype) @ grad_y).view(ctx.bias.shape)
        return grad_x, WeightGradient(weight, product).compute_or_defer(weight.deferred), grad_bias, None, None, None


def _matrices(weight: Tensor) -> Tensor:
    """View [E, 2, f, i] or [E, o, i] as [E, o, i]."""
    return weight.flatten(1, -2)


class SharedGate(Module):
    """sigmoid(x·gᵀ) with one row g [1, h]: [s, b, h] -> [s, b, 1], split over s by tp with sequence parallelism."""

    def __init__(self, name: str, config: ModelConfig, *, factory: ParameterFactory) -> None:
        super().__init__()
        shape, std = (1, config.hidden_size), config.hidden_std
        self.weight = factory.parameter(f"{name}.weight", shape, std=std, in_sequence_region=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight).sigmoid()


class MoELayer(Module):
    """y = Σ_{k chosen experts e} weight_e(x)·expert_e(x) + shared(x) (arXiv 1701.06538, 2006.16668, 2401.06066).

    Tokens are always split over tp here, with or without sequence parallelism, so that no token is sent twice.
    The shared expert is an ordinary MLP for all tokens; with a gate its output is multiplied by sigmoid(x·gᵀ). It
    overlaps the exchange of rows over ep, in forward and backward."""

    def __init__(self, name: str, config: ModelConfig, *, factory: ParameterFactory, recompute: Recompute) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.num_experts, self.topk = config.num_experts, config.moe_router_topk
        self.tp, self.ep, self.expert_tp = factory.tp, factory.ep, factory.expert_tp
        self.sequence_parallel = factory.sequence_parallel
        self.recompute = recompute.selects("moe")
        self.router = Router(f"{name}.router", config, factory=factory)
        inner = None if self.recompute else recompute
        self.experts = Experts(f"{name}.experts", config, factory=factory, recompute=inner)
        self.recompute_shared = recompute.selects("shared_experts")
        self.shared: MLP | None = None
        width = config.moe_shared_expert_intermediate_size
        if width is not None:
            inner = None if self.recompute_shared else inner
            self.shared = MLP(f"{name}.shared", config, factory=factory, recompute=inner, ffn_size=width)
        self.gate = (
            SharedGate(f"{name}.shared_gate", config, factory=factory) if config.moe_shared_expert_gate else None
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[s/cp, b, h] -> [s/cp, b, h], split over s by tp as well with sequence parallelism.

        Collectives: those of the router, the dispatch and the shared expert; with tp and without sequence
        parallelism also all-gather of the output / all-gather of the input's gradient over tp. In generation: an
        all-reduce over expert_tp, which is tp."""
        if self.recompute and torch.is_grad_enabled():
            return recomputed(self._forward, x, context)
        return self._forward(x, context)

    def _forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        shared = None
        if self.shared is not None:
            shared = _SharedPass(x, self.shared, self.gate, recompute=self.recompute_shared)
        if context.generating:
            # Every rank runs all tokens through its part of each expert: a single next token cannot be split over
            # ranks.
            assert self.ep.size == 1 and self.expert_tp.size == self.tp.size and not self.sequence_parallel
            y = self._routed(x, context.positions, context, Group.solo("ep"), Group.solo("expert-tp"), shared)
            y = reduce_from_tensor_parallel_region(y, tp=self.expert_tp)
        else:
            split = Group.solo("tp") if self.sequence_parallel else self.tp
            tokens = scatter_to_sequence_parallel_region(x, tp=split)
            positions = context.positions.tensor_split(self.tp.size)[self.tp.rank]
            y = self._routed(tokens, positions, context, self.ep, self.expert_tp, shared)
            y = replicate_from_sequence_parallel_region(y, tp=split)
        return y if shared is None else y + shared.output()

    def _routed(
        self,
        x: Tensor,
        positions: Tensor,
        context: ForwardContext,
        ep: Group,
        expert_tp: Group,
        shared: "_SharedPass | None",
    ) -> Tensor:
        routing = self.router(x, positions, context)
        counts, layer = {} if context.row_counts is None else context.row_counts, self.router.layer
        route = plan_route(routing, experts=self.num_experts, ep=ep, expert_tp=expert_tp, counts=counts.get(layer))
        counts[layer] = route.counts
        meanwhile = (lambda: None) if shared is None else shared.advance
        rows = send_to_experts(x.flatten(0, 1), route, topk=self.topk, ep=ep, expert_tp=expert_tp, meanwhile=meanwhile)
        rows = self.experts(rows, route.sizes)
        weights = routing.weights.flatten(0, 1)
        y = return_to_tokens(rows, route, weights, ep=ep, expert_tp=expert_tp, meanwhile=meanwhile)
        return y.view(x.shape)


class _SharedPass:
    """The shared expert on x: one half overlaps each of the two exchanges of rows; with `recompute` all of it overlaps
    the second."""

    def __init__(self, x: Tensor, mlp: MLP, gate: SharedGate | None, *, recompute: bool) -> None:
        self._x, self._mlp, self._gate = x, mlp, gate
        self._recompute = recompute and torch.is_grad_enabled()
        self._inner: tuple[Tensor, ...] | None = None
        self._output: Tensor | None = None

    def advance(self) -> None:
        if self._inner is None:
            self._inner = () if self._recompute else self._mlp.first_half(self._x)
            return
        y = recomputed(self._mlp, self._x) if self._recompute else self._mlp.second_half(self._inner)
        self._output = y if self._gate is None else y * self._gate(self._x)

    def output(self) -> Tensor:
        """Return the output, after both halves."""
        assert self._output is not None
        return self._output
