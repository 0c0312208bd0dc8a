"""How much of a step the pipeline idles, with each stage's own FLOPs as its cost."""

from megalite.config.run import RunConfig
from megalite.models.shapes import attention_core_flops, layer_forward_flops, layer_shapes
from megalite.pipeline.ir.generators import build_schedule
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.simulate import Costs, simulate
from megalite.planner.activations import recompute_units
from megalite.planner.stages import StagePlan, stage_forward_flops

SIMULATED_ACTIONS = 12_000
"""Schedules with more forwards and backwards are simulated with fewer microbatches and extended (about 0.5 s)."""


def schedule_of(config: RunConfig, num_microbatches: int) -> Schedule:
    """The training schedule of a validated config for a step of that many microbatches.

    Raises:
        ConfigError: the schedule does not take that number; the message names numbers that it takes.
    """
    p = config.parallel
    return build_schedule(
        p.pipeline_schedule,
        num_ranks=p.pp,
        num_chunks=p.vpp,
        num_microbatches=num_microbatches,
        group=p.microbatch_group_size_per_virtual_pipeline_stage,
    )


def bubble_fraction(config: RunConfig, stages: tuple[StagePlan, ...], num_microbatches: int) -> float:
    """Idle share of the busiest pipeline rank in one step; messages count as nothing.

    A backward counts as two forwards and what it recomputes.

    A step of very many microbatches is extended from two shorter ones, a group apart: past the ramp-up a schedule is
    periodic, and each further group takes as long as the one before.
    """
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage or config.parallel.pp
    simulated = _fewer(num_microbatches, 2 * len(stages), group)
    makespan, busy = _times(config, stages, simulated)
    if simulated < num_microbatches:
        shorter, _ = _times(config, stages, simulated - group)
        makespan += (makespan - shorter) / group * (num_microbatches - simulated)
        busy *= num_microbatches / simulated
    return 1.0 - busy / makespan


def _times(config: RunConfig, stages: tuple[StagePlan, ...], num_microbatches: int) -> tuple[float, float]:
    """(makespan, busy time of the busiest rank) of a step, in FLOPs of one token's worth of work."""
    forward = tuple(float(stage_forward_flops(config, plan)) for plan in stages)
    backward = tuple(
        2.0 * cost + _recompute_flops(config, plan) for cost, plan in zip(forward, stages, strict=True)
    )
    costs = Costs(forward=forward, backward=backward)
    timeline = simulate(lower(schedule_of(config, num_microbatches)), costs)
    return timeline.makespan, max(timeline.busy)


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


def _fewer(num_microbatches: int, actions_each: int, group: int) -> int:
    """The number of microbatches to simulate: less by whole groups, at least three groups, if there are too many."""
    excess = num_microbatches - max(3 * group, SIMULATED_ACTIONS // actions_each)
    return num_microbatches - max(0, excess) // group * group
