"""How much of a step the pipeline idles, with each stage's own FLOPs as its cost."""

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.pipeline.ir.generators.interleaved import smallest_group
from megalite.pipeline.ir.simulate import simulate
from megalite.planner.pipeline import costs_of, lowered, schedule_of
from megalite.planner.stages import StagePlan

SIMULATED_ACTIONS = 12_000
"""Schedules with more forwards and backwards are simulated with fewer microbatches and extended (about 0.5 s)."""


def bubble_fraction(config: RunConfig, stages: tuple[StagePlan, ...], num_microbatches: int) -> float:
    """Idle share of the busiest pipeline rank in one step; messages count as nothing.

    A backward counts as two forwards and what it recomputes.

    A step of very many microbatches is extended from two shorter ones, a group apart: past the ramp-up a schedule is
    periodic, and each further group takes as long as the one before. Schedules that are built or read are simulated
    whole.
    """
    p, simulated, group = config.parallel, num_microbatches, _period(config, num_microbatches)
    if p.schedule_name not in ("auto", "file"):
        simulated = _fewer(num_microbatches, 2 * len(stages), group)
    if p.schedule_name == "interleaved":
        config = replace(config, microbatch_group_size_per_virtual_pipeline_stage=group)
    makespan, busy = _times(config, stages, simulated)
    if simulated < num_microbatches:
        shorter, _ = _times(config, stages, simulated - group)
        makespan += (makespan - shorter) / group * (num_microbatches - simulated)
        busy *= num_microbatches / simulated
    return 1.0 - busy / makespan


def _period(config: RunConfig, num_microbatches: int) -> int:
    """Microbatches after which a schedule repeats itself."""
    p = config.parallel
    if p.schedule_name != "interleaved":
        return p.pp
    given = p.microbatch_group_size_per_virtual_pipeline_stage
    return given or smallest_group(p.pp, num_microbatches)


def _times(config: RunConfig, stages: tuple[StagePlan, ...], num_microbatches: int) -> tuple[float, float]:
    """(makespan, busy time of the busiest rank) of a step, in FLOPs of one token's worth of work."""
    program = lowered(config, schedule_of(config, num_microbatches))
    timeline = simulate(program, costs_of(config, stages))
    return timeline.makespan, max(timeline.busy)


def _fewer(num_microbatches: int, actions_each: int, group: int) -> int:
    """The number of microbatches to simulate: less by whole groups, at least three groups, if there are too many."""
    excess = num_microbatches - max(3 * group, SIMULATED_ACTIONS // actions_each)
    return num_microbatches - max(0, excess) // group * group
