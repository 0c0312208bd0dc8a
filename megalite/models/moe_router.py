"""Router: choose the experts of each token and their weights, and compute the load-balancing and z-losses."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.kernels.bases import Function, Module
from megalite.kernels.matmul import accumulate_weight_grad
from megalite.models.context import LOAD_BALANCING_LOSS, Z_LOSS, ForwardContext
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter, WeightGradient, as_sharded
from megalite.topology.group import Group
from megalite.topology.host_memory import pinned

WEIGHT_STEPS = {torch.float32: 2.0**16, torch.float64: 2.0**30}  # weights are compared as multiples of 1/steps


@torch.no_grad()
def within_capacity(
    weights: Tensor, chosen: Tensor, positions: Tensor, *, capacity: int, drop_last: bool, sequence: Group
) -> Tensor:
    """Select for each expert the `capacity` tokens of each sequence with the largest weights, or the first ones.

    The choice is made per sequence over all its tokens, so it depends neither on the split over ranks nor on the other
    sequences of the microbatch. Of equal weights the lower position wins. Weights are equal if they round to the same
    multiple of 1 / `WEIGHT_STEPS`, because weights of equal tokens differ by rounding that depends on the layout.

    Args:
        weights: [s_local, b, k] of this rank's tokens; `chosen`: their experts, int64.
        positions: [s_local], positions in the sequence; the ranks of `sequence` together have each position once.
        drop_last: keep the first tokens, whatever their weights.

    Returns:
        bool [s_local, b, k]: whether the pair is kept.

    Collectives: an all-gather of s_local·(2·b·k + 1) numbers."""
    local, b, k = weights.shape
    # Positions and experts are exact in fp32 below 2^24, so one message contains all three.
    packed = torch.cat(
        (weights.flatten(1), chosen.flatten(1).to(weights.dtype), positions[:, None].to(weights.dtype)), dim=1
    )
    everything = packed.new_empty(local * sequence.size, packed.shape[1])
    sequence.all_gather(everything, packed)
    own = slice(sequence.rank * local, (sequence.rank + 1) * local)
    by_position = everything[:, -1].argsort()
    ordered = everything[by_position]
    # One column per sequence: its s·k pairs, tokens in the order of positions.
    weight, expert = (part.view(-1, b, k).transpose(1, 2).flatten(0, 1) for part in ordered[:, :-1].split(b * k, dim=1))
    pairs = torch.arange(weight.shape[0], device=weight.device)[:, None].expand_as(weight)
    if not drop_last:
        steps = (weight * WEIGHT_STEPS[weight.dtype]).round_()
        pairs = steps.sort(dim=0, descending=True, stable=True).indices
    by_expert = expert.gather(0, pairs).sort(dim=0, stable=True)
    pairs = pairs.gather(0, by_expert.indices)
    kept = torch.empty_like(pairs, dtype=torch.bool)
    kept.scatter_(0, pairs, _index_in_run(by_expert.values) < capacity)
    rows = torch.empty_like(by_position)
    rows[by_position] = torch.arange(rows.numel(), device=rows.device)
    return kept.view(-1, k, b).transpose(1, 2)[rows[own]]


def _index_in_run(values: Tensor) -> Tensor:
    """Return for each element of the sorted columns of [n, b] the number of equal elements before it."""
    index = torch.arange(values.shape[0], device=values.device)[:, None].expand_as(values)
    first = torch.ones_like(values, dtype=torch.bool)
    first[1:] = values[1:] != values[:-1]
    return index - torch.where(first, index, 0).cummax(dim=0).values


_TOLERANCE, _ITERATIONS, _LEAST_SHARE = 1e-4, 32, 1e-8
"""Constants of Sinkhorn's algorithm; `_LEAST_SHARE` is added to sums before a division."""


@torch.no_grad()
def sinkhorn_offsets(logits: Tensor, *, sequence: Group) -> Tensor:
    """Return one number per sequence and expert [b, E] that, added to the logits [s_local, b, E], balances the choice.

    Sinkhorn's algorithm (arXiv 2202.01169) alternately scales the rows and columns of a sequence's exp(logits) [s, E]
    until each token and each expert has an equal share. A token chooses by the result, in which only the factors of the
    columns affect its order of experts; the numbers are their logarithms. A sequence is finished once its factors change
    by less than the tolerance on average, or after all iterations: very uneven logits may never reach the tolerance.

    Collectives: an all-gather of s_local·b·E numbers."""
    everything = logits.new_empty(logits.shape[0] * sequence.size, *logits.shape[1:])
    sequence.all_gather(everything, logits.contiguous())
    shares = (everything - everything.amax(dim=-1, keepdim=True)).exp_()  # a factor of a row changes no choice
    s, b, experts = shares.shape
    columns, active = shares.new_ones(b, experts), torch.ones(b, 1, dtype=torch.bool, device=shares.device)
    for _ in range(_ITERATIONS):  # a fixed number: the host never waits
        rows = 1 / (s * ((shares * columns).sum(dim=-1, keepdim=True) + _LEAST_SHARE))
        new = 1 / (experts * ((shares * rows).sum(dim=0) + _LEAST_SHARE))
        change = (new - columns).abs().mean(dim=-1, keepdim=True)
        columns = torch.where(active, new, columns)
        active = active & (change > _TOLERANCE)
    return columns.log()


_LEAST = 1e-20
"""Added to sums of sigmoids before a division."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Routing of this rank's tokens [s_local, b]."""

    weights: Tensor  # [s_local, b, k]: factor on each chosen expert's output, in fp32 (fp64 for fp64)
    chosen: Tensor  # [s_local, b, k]: the experts
    kept: Tensor | None  # [s_local, b, k]: false if the expert is full; None: no capacity limit
    slots: int | None  # rows that this rank sends to each expert, padded with zeros; None: no padding


class Router(Module):
    """Choose the k largest of logits = x·Wᵀ (+ a learned bias) in fp32; their softmax gives the weights (arXiv
    1701.06538, 2401.04088).

    With sigmoid scores (arXiv 2412.19437) the weights are the chosen scores divided by their sum. An optional bias per
    expert is added to its score (of a softmax over all experts, or a sigmoid) and affects only the choice; `balance`
    updates it after a step. With groups a token chooses among the experts of its best groups. In training Sinkhorn's
    algorithm may balance the choice (`sinkhorn_offsets`). Of equal scores the expert with the lower index is chosen.

    The load-balancing loss (arXiv 2101.03961) is computed per sequence, or per n consecutive sequences of the batch, so
    it does not depend on microbatch size or layout. f_e is the share of the sequence's k·s choices that fell on expert
    e, P_e the mean over its tokens of the softmax over all experts (or of sigmoids divided by their sum); the loss is
    E·Σ_e f_e·P_e. The z-loss (arXiv 2202.08906) is the square of a token's logsumexp. The objective contains their
    means over all sequences and all tokens of the global batch, masked or not, dropped or not.

    The weight [E, h] is replicated; its gradient is partial over tp, because each tp rank has its own tokens."""

    def __init__(self, name: str, config: ModelConfig, *, factory: ParameterFactory) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.experts, self.topk = config.num_experts, config.moe_router_topk
        self.pre_softmax, self.scaling = config.moe_router_pre_softmax, config.moe_router_topk_scaling_factor
        self.aux_coeff, self.z_coeff = config.moe_aux_loss_coeff, config.moe_z_loss_coeff
        self.capacity_of = None if config.moe_expert_capacity_factor is None else config.expert_capacity
        self.pads = config.moe_pad_expert_input_to_capacity
        self.drop_last = config.moe_token_drop_policy == "position"
        self.sigmoid = config.moe_router_score_function == "sigmoid"
        self.score_table, self.bias_rate = config.score_table, config.moe_router_bias_update_rate
        self.sinkhorn, self.forced = config.moe_router_sinkhorn, config.moe_router_force_load_balancing
        self.groups, self.group_topk = config.moe_router_num_groups, config.moe_router_group_topk
        self.layer = int(name.split(".")[1])
        self.sequence = factory.tp_cp
        shape = (config.num_experts, config.hidden_size)
        self.weight = factory.parameter(f"{name}.weight", shape, std=config.hidden_std, always_partial=True)
        self.linear_bias: ShardedParameter | None = None
        if config.moe_add_bias_linear:
            self.linear_bias = factory.parameter(f"{name}.linear_bias", shape[:1], decay=False, always_partial=True)
        self.bias: ShardedParameter | None = None
        if config.moe_router_enable_expert_bias:
            self.bias = factory.buffer(f"{name}.bias", shape[:1])

    def forward(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Routing:
        """Route x [s_local, b, h], rows at `positions` [s_local] of the sequence.

        Collectives: with a load-balancing loss an all-reduce of b·E/n counts over tp·cp; with a capacity an all-gather
        of s_local·(2·b·k + 1) numbers over it, and with Sinkhorn's algorithm of s_local·b·E / none."""
        logits = _RouterLinear.apply(x, as_sharded(self.weight))
        if self.linear_bias is not None:
            logits = logits + self.linear_bias.to(logits.dtype)
        probabilities = None
        if self.score_table:
            probabilities = logits.sigmoid() if self.sigmoid else logits.softmax(dim=-1)
        ranking = logits.detach() if probabilities is None else probabilities.detach()
        if probabilities is None and self.bias is not None:  # a bias is added to scores from 0 to 1
            ranking = ranking.softmax(dim=-1)
        if self.sinkhorn and self.training:
            ranking = logits.detach() + sinkhorn_offsets(logits.detach(), sequence=self.sequence)
        chosen = self._choose(ranking)
        if self.forced and self.training:
            offsets = torch.arange(self.topk, device=positions.device)
            chosen = ((positions[:, None] * self.topk + offsets) % self.experts)[:, None].expand_as(chosen).contiguous()
        if self.sigmoid or self.pre_softmax:
            assert probabilities is not None
            weights = probabilities.gather(-1, chosen)
            if self.sigmoid and self.topk > 1:
                weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST)
        else:
            weights = logits.gather(-1, chosen).softmax(dim=-1)
        weights = weights if self.scaling == 1.0 else weights * self.scaling
        weights = self._attach_losses(weights, logits, probabilities, chosen, context)
        kept = slots = None
        if self.capacity_of is not None and not context.generating:
            capacity, routing = self.capacity_of(context.seq_length), (weights.detach(), chosen, positions)
            kept = within_capacity(*routing, capacity=capacity, drop_last=self.drop_last, sequence=self.sequence)
            slots = min(capacity, x.shape[0]) * x.shape[1] if self.pads else None
        return Routing(weights=weights, chosen=chosen, kept=kept, slots=slots)

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the chosen experts [s, b, k] for scores [s, b, E], with expert bias and groups."""
        if self.bias is not None:
            scores = scores + self.bias
        if self.groups is not None and self.group_topk is not None:
            grouped = scores.unflatten(-1, (self.groups, -1))
            best = grouped.topk(self.topk // self.group_topk, dim=-1).values.sum(dim=-1)
            outside = torch.ones_like(best, dtype=torch.bool).scatter_(-1, _largest(best, self.group_topk), False)
            scores = grouped.masked_fill(outside.unsqueeze(-1), -math.inf).flatten(-2)
        return _largest(scores, self.topk)

    def balance(self, loads: Tensor) -> None:
        """Update the expert bias after a step: increase it for loads [E] below the mean, decrease it above."""
        assert self.bias is not None
        step = pinned(loads.shape, self.bias.dtype, self.bias.device).copy_((loads.mean() - loads).sign())
        self.bias.data.add_(step.to(self.bias.device, non_blocking=True), alpha=self.bias_rate)

    def _attach_losses(
        self, weights: Tensor, logits: Tensor, probabilities: Tensor | None, chosen: Tensor, context: ForwardContext
    ) -> Tensor:
        """Attach this rank's part of both losses: its own tokens' probabilities times the whole sequence's counts."""
        auxiliary = context.auxiliary
        if auxiliary is None:
            return weights
        if self.bias is not None:
            weights = auxiliary.count(weights, self.layer, chosen, self.experts)
        if self.aux_coeff:
            assert probabilities is not None
            if self.bias is not None or self.groups is not None:  # the loss uses the choice by scores alone
                chosen = _largest(probabilities.detach(), self.topk)
            if self.sigmoid:
                probabilities = probabilities / (probabilities.sum(dim=-1, keepdim=True) + _LEAST)
            together = auxiliary.sequences_per_loss
            choices = chosen.transpose(0, 1).reshape(chosen.shape[1] // together, -1)
            counts = probabilities.new_zeros(choices.shape[0], self.experts)
            counts.scatter_add_(1, choices, torch.ones_like(choices, dtype=counts.dtype))
            self.sequence.all_reduce(counts)
            # n·E·Σ_e f_e·P_e with f = counts/(k·s·n) and P = Σ probabilities/(s·n), weighted as n sequences
            factor = self.experts / (self.topk * context.seq_length**2 * together)
            sums = probabilities.sum(dim=0).unflatten(0, (-1, together)).sum(dim=1)
            loss = (sums * counts).sum() * factor
            weight = self.aux_coeff * auxiliary.per_sequence
            weights = auxiliary.attach(weights, LOAD_BALANCING_LOSS, loss * weight)
        if self.z_coeff:
            loss = logits.logsumexp(dim=-1).square().sum()
            weights = auxiliary.attach(weights, Z_LOSS, loss * (self.z_coeff * auxiliary.per_token))
        return weights


def _largest(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest along the last dimension, in descending order.

    A stable sort puts the lower index first among equals; topk guarantees no order."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


class _RouterLinear(Function):
    """x·Wᵀ with both cast to fp32 (fp64 stays); saves x in its own type, and adds the weight's gradient unrounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ShardedParameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.version = weight, weight._version
        compute = torch.promote_types(x.dtype, torch.float32)
        return x.to(compute) @ weight.to(compute).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        if weight._version != ctx.version:
            raise weight.changed(ctx.version)
        grad_x, x = (grad @ weight.to(grad.dtype)).to(x.dtype), x.detach()

        def product(main_grad: Tensor | None) -> Tensor | None:
            x_rows, grad_rows = x.to(grad.dtype).flatten(0, -2), grad.flatten(0, -2)
            if main_grad is None:
                return (grad_rows.t() @ x_rows).to(weight.dtype)
            accumulate_weight_grad(main_grad, grad_rows, x_rows)
            return None

        return grad_x, WeightGradient(weight, product).compute_or_defer(weight.deferred)
