"""What a microbatch costs on each stage, by FLOPs; messages count as nothing."""

from megalite.config.run import RunConfig
from megalite.models.shapes import attention_core_flops, layer_forward_flops, layer_shapes
from megalite.pipeline.ir.simulate import Costs
from megalite.planner.activations import recompute_units
from megalite.planner.stages import StagePlan, stage_forward_flops


def flop_costs(config: RunConfig, stages: tuple[StagePlan, ...], *, ahead: bool = False) -> Costs:
    """FLOPs of one token's worth of work on each stage.

    A backward counts as two forwards, of which the weight gradients are as much as the forward's matrix products with
    weights; products of activations (the attention core) have both their gradients in the input half.
    """
    forward = tuple(float(stage_forward_flops(config, plan)) for plan in stages)
    core = attention_core_flops(config.model, config.training.seq_length)
    return Costs(
        forward=forward,
        backward=tuple(2.0 * cost for cost in forward),
        weight_grad=tuple(cost - core * plan.num_layers for cost, plan in zip(forward, stages, strict=True)),
        # An R runs the stage as a whole, head and loss too.
        recompute=forward if ahead else tuple(float(_recompute_flops(config, plan)) for plan in stages),
    )


def _recompute_flops(config: RunConfig, plan: StagePlan) -> int:
    """FLOPs of one token's forward that a stage runs again in the backward; norms and activations count as nothing."""
    model, training = config.model, config.training
    if training.recompute_granularity == "full":
        again = (index for unit in recompute_units(config, plan) for index in unit)
        return sum(layer_forward_flops(model, index, training.seq_length) for index in again)
    if training.recompute_granularity == "none":
        return 0
    modules = set(training.recompute_modules)
    return sum(_module_flops(config, index, modules) for index in range(plan.first_layer, plan.last_layer))


def _module_flops(config: RunConfig, layer_index: int, modules: set[str]) -> int:
    """FLOPs of one token's forward through those modules of a layer that have matrix products."""
    model, seq_length = config.model, config.training.seq_length
    core = attention_core_flops(model, seq_length)
    projections = sum(
        2 * shape.size
        for shape in layer_shapes(model, layer_index)
        if shape.decay and ".attention." in shape.name
    )
    feed_forward = layer_forward_flops(model, layer_index, seq_length) - core - projections
    again = core if "core_attn" in modules else 0
    return again + (feed_forward if ("moe" if model.is_moe_layer(layer_index) else "mlp") in modules else 0)
