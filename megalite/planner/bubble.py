"""How much of a step the pipeline idles, with each stage's own FLOPs as its cost."""

from megalite.config.run import RunConfig
from megalite.pipeline.ir.generators import build_schedule
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.simulate import Costs, simulate
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
    """Idle share of the busiest pipeline rank in one step; a backward counts as two forwards, messages as nothing.

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
    # Full recompute runs the forward again inside the backward.
    backward = 3.0 if config.training.recompute_granularity == "full" else 2.0
    costs = Costs(forward=forward, backward=tuple(backward * cost for cost in forward))
    timeline = simulate(lower(schedule_of(config, num_microbatches)), costs)
    return timeline.makespan, max(timeline.busy)


def _fewer(num_microbatches: int, actions_each: int, group: int) -> int:
    """The number of microbatches to simulate: less by whole groups, at least three groups, if there are too many."""
    excess = num_microbatches - max(3 * group, SIMULATED_ACTIONS // actions_each)
    return num_microbatches - max(0, excess) // group * group
