"""Bytes of one rank: parameters, gradients, optimizer state, activations.

What fragments, kernels' workspaces and communication buffers take comes on top and is not estimated.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config.run import RunConfig
from megalite.pipeline.ir.memory import memory_peaks
from megalite.pipeline.ir.schedule import Program, Schedule
from megalite.planner.activations import recompute_workspace_bytes
from megalite.planner.pipeline import plan_stages
from megalite.planner.sharing import local_size
from megalite.planner.sizes import stage_sizes
from megalite.planner.stages import StagePlan, shapes_of_rank
from megalite.planner.states import element_bytes
from megalite.planner.whole import whole_bytes


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank, by what holds them."""

    parameters: int
    """Elements, not bytes: what this rank holds after tensor, pipeline and expert parallelism."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """Moments and, below fp32, the fp32 main parameters."""
    activation_bytes: int
    """Of all microbatches in flight at the peak."""
    workspace_bytes: int
    """What recomputation brings back at once in the backward, and what is whole for a while of sharded parameters and
    gradients."""

    @property
    def total_bytes(self) -> int:
        """The sum of the parts."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.workspace_bytes
        )


def activation_peaks(config: RunConfig, stages: tuple[StagePlan, ...], schedule: Schedule) -> list[int]:
    """Per pipeline rank, the most bytes that activations (and what a W waits for) take; messages and workspace not counted."""
    sizes = dataclasses.replace(stage_sizes(config, stages), message=0.0, workspace=None)
    # Without messages the computations alone decide, and they need no lowering.
    peaks = memory_peaks(Program(schedule, schedule.actions), sizes)
    return [round(peak.size) for peak in peaks]


def rank_memory(config: RunConfig, stages: Sequence[StagePlan], activation_bytes: int) -> RankMemory:
    """Memory of a rank that holds `stages`.

    With the distributed optimizer its state is divided by dp·cp (for experts by their own data-parallel size), which
    gives the usual 6 + 12/dp bytes a parameter in bf16. With a parameter server it is the server's.

    Args:
        config: validated, vocabulary known.
        stages: the virtual stages of this pipeline rank.
        activation_bytes: at the peak of the schedule (`activation_peaks`).
    """
    p = config.parallel
    assert p.dp is not None, "validate() resolves dp"
    dense, expert = p.dp * p.cp, p.tp * p.cp * p.dp // (p.expert_tp * p.ep)
    everywhere = plan_stages(config)
    parameters = 0
    parameter = gradient = optimizer = 0.0
    for shape in shapes_of_rank(config, list(stages)):
        count = local_size(shape, config)
        each = element_bytes(config, shape, expert if shape.expert else dense)
        parameters += count
        parameter += each.parameter * count
        gradient += each.gradient * count
        optimizer += each.optimizer * count
    return RankMemory(
        parameters=parameters,
        parameter_bytes=math.ceil(parameter),
        gradient_bytes=math.ceil(gradient),
        optimizer_bytes=math.ceil(optimizer),
        activation_bytes=activation_bytes,
        workspace_bytes=max(
            recompute_workspace_bytes(config, plan) + whole_bytes(config, plan, everywhere) for plan in stages
        ),
    )
