"""The mixture-of-experts feed-forward half of a block."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megalite.config.model import ModelConfig
from megalite.kernels.matmul import Matmul, accumulate_grouped_weight_grad, grouped_matmul, matmul
from megalite.models.context import ForwardContext
from megalite.models.mlp import MLP, activation_of
from megalite.models.moe.dispatch import plan_route, return_to_tokens, send_to_experts
from megalite.models.moe.router import Router
from megalite.models.recompute import Recompute, not_saving
from megalite.tensor_parallel.deferred_weight_gradients import compute_or_defer
from megalite.tensor_parallel.mappings import (
    reduce_from_tensor_parallel_region,
    replicate_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.topology.group import Group


class Experts(torch.nn.Module):
    """down_e(activation(up_e(x))) for the rows of each local expert e. No biases.

    `up` is [E, f, h], or [E, 2, f, h] with a gate (first), `down` [E, h, f]: E is split over ep and f over expert_tp.

    Args:
        recompute: with `mlp_act` the activation's output is not kept; None where the experts as a whole run again.
    """

    def __init__(
        self, name: str, config: ModelConfig, *, factory: ParameterFactory, recompute: Recompute | None
    ) -> None:
        super().__init__()
        assert config.num_experts is not None
        count, f, h = config.num_experts, config.expert_ffn_size, config.hidden_size
        stacked = (count, 2, f) if config.is_gated else (count, f)
        self.activation = activation_of(config.activation, f // factory.expert_tp.size, factory=factory)
        self._up = factory.kernel("matmul", h)
        self._down = factory.kernel("matmul", f // factory.expert_tp.size)
        self.recompute_activation = recompute is not None and recompute.selects("mlp_act")
        self.up = factory.parameter(
            f"{name}.up.weight", (*stacked, h), shard_dim=len(stacked) - 1, std=config.init_method_std, expert=True
        )
        self.down = factory.parameter(
            f"{name}.down.weight",
            (count, h, f),
            shard_dim=2,
            std=config.init_method_std / math.sqrt(2 * config.num_layers),
            expert=True,
        )

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Rows [n, h] by expert, `counts` of each -> [n, h], to be summed over expert_tp. Collectives: none."""
        inner = grouped_linear(rows, self.up, counts, self._up)
        active = self.activation(inner)
        if not self.recompute_activation:
            return grouped_linear(active, self.down, counts, self._down)
        with not_saving(active, self.activation, inner):
            return grouped_linear(active, self.down, counts, self._down)


def grouped_linear(
    x: torch.Tensor, weight: ShardedParameter, counts: list[int], multiply: Matmul = matmul
) -> torch.Tensor:
    """y = x·W_eᵀ for the rows of each expert e: x [n, i], weight [E/ep, ..., i] -> [n, o].

    `multiply` computes output and input gradient where the experts' products are not fused.

    Where `weight.main_grad` is set the weight gradient is added to it during the backward, which reports once for each
    microbatch, also where no row has come; else it is returned to autograd. It may be deferred.

    Collectives: none.
    """
    return _GroupedLinear.apply(x, weight, counts, multiply)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: ShardedParameter, counts: list[int], multiply: Matmul
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.counts, ctx.multiply = weight, counts, multiply
        return grouped_matmul(x, _matrices(weight).transpose(1, 2), counts, multiply)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        (x,), weight, counts = ctx.saved_tensors, ctx.weight, ctx.counts
        grad_y = grad_y.contiguous()
        grad_x = grouped_matmul(grad_y, _matrices(weight), counts, ctx.multiply)
        gradient = _GroupedGradient(weight, x.detach(), grad_y, counts)
        return grad_x, compute_or_defer(gradient, weight.deferred), None, None


@dataclass
class _GroupedGradient:
    """grad_y_eᵀ·x_e of each expert e."""

    parameter: ShardedParameter
    x: torch.Tensor
    grad_y: torch.Tensor
    counts: list[int]

    def start(self) -> None:
        """Needs nothing."""

    def compute(self) -> torch.Tensor | None:
        """See `DeferredGradient`."""
        weight = self.parameter
        if weight.main_grad is None:
            grad_weight = torch.zeros_like(weight)
            accumulate_grouped_weight_grad(_matrices(grad_weight), self.grad_y, self.x, self.counts)
            return grad_weight
        accumulate_grouped_weight_grad(
            _matrices(weight.main_grad), self.grad_y, self.x, self.counts, weight.accumulate_product
        )
        weight.report()
        return None


def _matrices(weight: torch.Tensor) -> torch.Tensor:
    """[E, o, i] of [E, 2, f, i], or of what is that already."""
    return weight.flatten(1, -2)


class MoELayer(torch.nn.Module):
    """y = Σ_{k chosen experts e} weight_e(x)·expert_e(x) + shared(x) (arXiv 1701.06538, 2006.16668, 2401.06066).

    Tokens are always split over tp here, with sequence parallelism or without, so that no token is sent twice.
    The shared expert is an ordinary MLP that every token goes through.
    """

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
        self.shared: MLP | None = None
        width = config.moe_shared_expert_intermediate_size
        if width is not None:
            self.shared = MLP(f"{name}.shared", config, factory=factory, recompute=inner, ffn_size=width)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[s/cp, b, h] -> [s/cp, b, h], split over s by tp as well with sequence parallelism.

        Collectives: those of the router, the dispatch and the shared expert; with tp and without sequence
        parallelism also all-gather of the output / all-gather of the input's gradient over tp. While text is generated
        see `_unsplit` instead.
        """
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._forward, x, context, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, context)

    def _forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        if context.generating:
            y = self._unsplit(x, context)
            return y if self.shared is None else y + self.shared(x)
        split = self.tp.size > 1 and not self.sequence_parallel
        tokens = scatter_to_sequence_parallel_region(x, tp=self.tp) if split else x
        y = self._routed(tokens, context)
        if split:
            y = replicate_from_sequence_parallel_region(y, tp=self.tp)
        return y if self.shared is None else y + self.shared(x)

    def _unsplit(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Every rank takes all tokens through its part of each expert: of a next token there is nothing to split.

        Collectives: all-reduce over expert_tp, which is tp.
        """
        assert self.ep.size == 1 and self.expert_tp.size == self.tp.size and not self.sequence_parallel
        y = self._through(x, context.positions, context, Group.solo("ep"), Group.solo("expert-tp"))
        return reduce_from_tensor_parallel_region(y, tp=self.expert_tp)

    def _routed(self, tokens: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        positions = context.positions.tensor_split(self.tp.size)[self.tp.rank]
        return self._through(tokens, positions, context, self.ep, self.expert_tp)

    def _through(
        self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext, ep: Group, expert_tp: Group
    ) -> torch.Tensor:
        routing = self.router(x, positions, context)
        route = plan_route(routing, experts=self.num_experts, ep=ep, expert_tp=expert_tp)
        rows = send_to_experts(x.flatten(0, 1), route, topk=self.topk, ep=ep, expert_tp=expert_tp)
        rows = self.experts(rows, route.counts)
        weights = routing.weights.flatten(0, 1)
        return return_to_tokens(rows, route, weights, ep=ep, expert_tp=expert_tp).view(x.shape)
