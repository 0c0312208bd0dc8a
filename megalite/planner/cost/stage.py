"""Compute the seconds of a microbatch on a stage: forward, input gradient, weight gradient and recompute."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from megalite.config.run import IdentityKey, RunConfig, cache_by_object
from megalite.partition.activations import offloaded_activation_bytes, recompute_units
from megalite.partition.pipeline import has_recompute_actions
from megalite.partition.stages import StagePlan
from megalite.pipeline.ir.simulate import Costs, Link
from megalite.planner.cost import operations
from megalite.planner.cost.rates import Number, Parts, Workload, workload_of
from megalite.planner.hardware import Cluster, SoftwareStack


class StageKind(NamedTuple):
    """The properties in which stages of a config differ: the arguments of `stage_cost`."""

    dense: float
    moe: float
    has_embedding: float
    has_head: float
    kept: float
    copied: float


def stage_kind(config: RunConfig, plan: StagePlan) -> StageKind:
    moe = sum(config.model.is_moe_layer(index) for index in range(plan.first_layer, plan.last_layer))
    kept = plan.num_layers - sum(map(len, recompute_units(config, plan)))
    counts = (
        plan.num_layers - moe,
        moe,
        plan.has_embedding,
        plan.has_head,
        kept,
        offloaded_activation_bytes(config, plan),
    )
    return StageKind(*map(float, counts))


@dataclass(frozen=True, eq=False)
class StageCost:
    """Seconds of a microbatch on a stage, with their parts. Numbers, or arrays over layouts."""

    forward: Number
    input_gradient: Number
    weight_gradient: Number
    recompute: Number
    forward_parts: Parts
    backward_parts: Parts  # both gradients
    recompute_parts: Parts

    @property
    def backward(self) -> Number:
        """Both gradients, without recompute."""
        return self.input_gradient + self.weight_gradient

    @property
    def total(self) -> Number:
        """All seconds of a microbatch on the stage."""
        return self.forward + self.backward + self.recompute

    def __add__(self, other: "StageCost") -> "StageCost":
        return StageCost(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def parts(self) -> Parts:
        return self.forward_parts + self.backward_parts + self.recompute_parts


@cache_by_object()
def layer_parts(price: operations.Pricing, *, moe: bool = False) -> tuple[operations.PassCosts, Parts]:
    """Price a block (`moe`: with experts) for a microbatch, and its recomputed part (selective or full)."""
    work = price.work
    branches = 2.0 if moe else 1.0 + work.has_mlp  # by their mean
    norms = operations.norm(price, work.hidden / work.split) * (work.norms * (branches / 2.0))
    core, projections = operations.attention_core(price), operations.attention_projections(price)
    if np.any(np.asarray(work.linear) > 0):  # layers are priced by their mean
        core, softmax = core * (1.0 - work.linear), projections * (1.0 - work.linear)
        projections = softmax + operations.linear_attention(price) * work.linear
    entering = operations.latent_width(work) if np.any(np.asarray(work.latent) > 0) else None
    communication = price.block_communication(projections.weight_gradient, entering)
    total = norms + core + projections + communication + operations.residual(price) * branches
    if moe:
        products, nonlinearity, exchange = operations.experts(price)
        total = total + products + nonlinearity + exchange
        feed_forward = products.forward + nonlinearity.forward + exchange.forward
        shared = Parts()
        if np.any(np.asarray(work.shared_ffn) > 0):
            products, nonlinearity = operations.dense_mlp(price, work.shared_ffn)
            communication = price.block_communication(products.weight_gradient)
            communication = communication + operations.under_shared_expert(price, exchange, products)
            total = total + products + nonlinearity + communication
            shared = products.forward + nonlinearity.forward + communication.forward
        again = (feed_forward + shared) * work.recompute_moe + shared * work.recompute_shared
        whole = total.forward
    else:
        products, nonlinearity = operations.dense_mlp(price, work.ffn)
        mlp = products + nonlinearity + price.block_communication(products.weight_gradient)
        total = total + mlp * work.has_mlp
        # No backward reads the last product's output, unless a dropout mask follows it.
        early = float(price.stack.recompute_stops_early)
        last = price.gemm(work.tokens, work.hidden, work.ffn / work.tp, times=price.stack.float8_rate or 1.0)
        again = (products.forward + nonlinearity.forward + price.enter() + last * -early) * work.recompute_mlp
        again = again + nonlinearity.forward * (work.recompute_activation * (1.0 - work.recompute_mlp))
        again, last = again * work.has_mlp, last + operations.residual(price).forward + price.leave()
        whole = total.forward + last * (-early * (1.0 - work.hidden_dropout))
    if np.any(np.asarray(work.recompute_up) > 0):
        up = operations.latent_up(price).forward + price.enter(operations.latent_width(work))
        again = again + up * (work.recompute_up * (1.0 - work.linear))
    again = again + core.forward * (work.recompute_core * (work.index_heads == 0)) + norms.forward * work.recompute_norm
    again = again * (1.0 - work.recompute_full) + whole * work.recompute_full
    return total, again


def stage_cost(
    price: operations.Pricing,
    *,
    dense: Number = 0.0,
    moe: Number = 0.0,
    has_embedding: Number = 0.0,
    has_head: Number = 0.0,
    kept: Number = 0.0,
    copied: Number = 0.0,
) -> StageCost:
    """Price a stage with `dense` layers and `moe` layers with experts. Full recompute omits `kept` of them (method
    block). `copied`: bytes of activations that move to host memory during the forward and back during the backward."""
    total, again = operations.embedding(price) * has_embedding, Parts()
    count = dense + moe
    for number, with_experts in ((dense, False), (moe, True)):
        if np.any(np.asarray(number) > 0):
            piece, recomputed = layer_parts(price, moe=with_experts)
            total = total + piece * number
            share = 1.0 - price.work.recompute_full * kept / np.maximum(count, 1.0)
            again = again + recomputed * (number * share)
    mtp, end = price.work.mtp_layers * has_head, operations.head(price) * has_head
    if np.any(np.asarray(mtp) > 0):  # same kind as the last layer
        piece, recomputed = layer_parts(price, moe=bool(np.any(np.asarray(price.work.experts) > 0)))
        total = total + (piece + operations.mtp_inputs(price)) * mtp
        again, end = again + recomputed * mtp, end + operations.head(price) * mtp
    # The loss reads its label mask on the host, which waits for the device: head and layers do not overlap.
    end = _seconds(price, end, Parts())
    cost = _seconds(price, total, again) + end
    constant, device = price.stack.microbatch_seconds, price.cluster.accelerator
    forward, inner, copies = cost.forward + constant, cost.input_gradient + constant, copied / price.cluster.host_share
    if device.asynchronous:
        late = np.maximum(copies - forward, 0.0), np.maximum(copies - inner - cost.weight_gradient, 0.0)
    else:
        late = copies, copies
    return replace(cost, forward=forward + late[0], input_gradient=inner + late[1])


def _seconds(price: operations.Pricing, total: operations.PassCosts, again: Parts) -> StageCost:
    """Combine parts without the constant of a microbatch. Recompute and backward alternate by layer: the host may be
    late in one and catch up in the other."""
    cluster, stack = price.cluster, price.stack
    gradients = total.input_gradient + total.weight_gradient
    backward, recompute = gradients.seconds(cluster, stack), again.seconds(cluster, stack)
    separate = backward + recompute
    both = (gradients + again).seconds(cluster, stack)
    ratio = np.divide(both, separate, out=np.ones(np.shape(separate)), where=np.asarray(separate) > 0)
    backward, recompute = backward * ratio, recompute * ratio
    whole = gradients.device_seconds(cluster, stack)
    part = total.weight_gradient.device_seconds(cluster, stack)
    share = np.divide(part, whole, out=np.zeros(np.shape(whole)), where=np.asarray(whole) > 0)
    weight = backward * share
    return StageCost(
        forward=total.forward.seconds(cluster, stack),
        input_gradient=backward - weight,
        weight_gradient=weight,
        recompute=recompute,
        forward_parts=total.forward,
        backward_parts=gradients,
        recompute_parts=again,
    )


def layer_seconds(work: Workload, cluster: Cluster, stack: SoftwareStack, *, moe: bool = False) -> StageCost:
    """Price a single layer, without the constant of a microbatch."""
    price = operations.Pricing.of(work, cluster, stack)
    return _seconds(price, *layer_parts(price, moe=moe))


def stage_costs(
    config: RunConfig, stages: tuple[StagePlan, ...], cluster: Cluster, stack: SoftwareStack
) -> list[StageCost]:
    """Price each virtual stage of a validated config. Raises ConfigError if the accelerator lacks the precision."""
    # Stages of one kind are priced once, also across configs of a sweep or plan.
    numbers = vars(workload_of(config)) | unread(stack)
    price = _pricing(IdentityKey(cluster), IdentityKey(stack), tuple(numbers.items()))
    return [_priced(price, stage_kind(config, plan)) for plan in stages]


def unread(stack: SoftwareStack) -> dict[str, Any]:
    """Return the fields of a workload that stage prices do not read, as NaN: a price that did read one would be NaN too."""
    names = ("dp", "pp", "order_dp_first", "message_share", "scatters_messages")
    return dict.fromkeys((*names, *(() if stack.float8_rate else ("weight_uses",))), math.nan)


@lru_cache(maxsize=64)
def _pricing(
    cluster: IdentityKey[Cluster], stack: IdentityKey[SoftwareStack], numbers: tuple[tuple[str, Any], ...]
) -> operations.Pricing:
    return operations.Pricing.of(Workload(**dict(numbers)), cluster.value, stack.value)


@cache_by_object(maxsize=256)
def _priced(price: operations.Pricing, kind: StageKind) -> StageCost:
    return stage_cost(price, **kind._asdict())


def simulator_costs(
    costs: list[StageCost], config: RunConfig, links: Mapping[tuple[int, int], Link] | None = None
) -> Costs:
    """Return costs for the simulator. With recompute_ahead (or R in a schedule file), R repeats the whole forward."""
    ahead = has_recompute_actions(config)
    return Costs(
        forward=tuple(float(cost.forward) for cost in costs),
        backward=tuple(float(cost.backward) for cost in costs),
        weight_grad=tuple(float(cost.weight_gradient) for cost in costs),
        recompute=tuple(float(cost.forward if ahead else cost.recompute) for cost in costs),
        links=links or {},
    )
