"""The mixture-of-experts feed-forward half of a block."""

import torch
from torch.utils.checkpoint import checkpoint

from megalite.config.model import ModelConfig
from megalite.models.context import ForwardContext
from megalite.models.mlp import MLP
from megalite.models.moe.dispatch import plan_route, return_to_tokens, send_to_experts
from megalite.models.moe.experts import Experts
from megalite.models.moe.router import Router
from megalite.models.recompute import Recompute
from megalite.tensor_parallel.mappings import (
    reduce_from_tensor_parallel_region,
    replicate_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megalite.tensor_parallel.parameter import ParameterFactory
from megalite.topology.group import Group


class MoELayer(torch.nn.Module):
    """y = Σ_{k chosen experts e} weight_e(x)·expert_e(x) + shared(x) (arXiv 1701.06538, 2006.16668, 2401.06066).

    Tokens are always split over tp here, with sequence parallelism or without, so that no token is sent twice.
    The shared expert is an ordinary MLP that every token goes through.
    """

    def __init__(
        self, name: str, config: ModelConfig, *, make: ParameterFactory, recompute: Recompute
    ) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.num_experts, self.topk = config.num_experts, config.moe_router_topk
        self.tp, self.ep, self.expert_tp = make.tp, make.ep, make.expert_tp
        self.sequence_parallel = make.sequence_parallel
        self.recompute = recompute.selects("moe")
        self.router = Router(f"{name}.router", config, make=make)
        inner = None if self.recompute else recompute
        self.experts = Experts(f"{name}.experts", config, make=make, recompute=inner)
        self.shared: MLP | None = None
        width = config.moe_shared_expert_intermediate_size
        if width is not None:
            self.shared = MLP(f"{name}.shared", config, make=make, recompute=inner, ffn_size=width)

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
        routing = self.router(x, context.positions, context)
        here = {"ep": Group.solo("ep"), "expert_tp": Group.solo("expert-tp")}
        route = plan_route(routing, experts=self.num_experts, **here)
        rows = send_to_experts(x.flatten(0, 1), route, topk=self.topk, **here)
        rows = self.experts(rows, route.counts)
        y = return_to_tokens(rows, route, routing.weights.flatten(0, 1), **here).view(x.shape)
        return reduce_from_tensor_parallel_region(y, tp=self.expert_tp)

    def _routed(self, tokens: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        positions = context.positions.tensor_split(self.tp.size)[self.tp.rank]
        routing = self.router(tokens, positions, context)
        groups = {"ep": self.ep, "expert_tp": self.expert_tp}
        route = plan_route(routing, experts=self.num_experts, **groups)
        rows = send_to_experts(tokens.flatten(0, 1), route, topk=self.topk, **groups)
        rows = self.experts(rows, route.counts)
        weights = routing.weights.flatten(0, 1)
        return return_to_tokens(rows, route, weights, **groups).view(tokens.shape)
