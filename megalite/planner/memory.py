"""Bytes of one rank: parameters, gradients, optimizer state, activations.

What fragments, kernels' workspaces and communication buffers take comes on top and is not estimated.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config.run import RunConfig
from megalite.models.shapes import ParameterShape
from megalite.pipeline.ir.memory import memory_peaks
from megalite.pipeline.ir.schedule import Program, Schedule
from megalite.planner.activations import ELEMENT_BYTES, recompute_workspace_bytes
from megalite.planner.sizes import stage_sizes
from megalite.planner.stages import StagePlan, shapes_of_rank


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
    """What recomputation brings back at once in the backward."""

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


def local_size(shape: ParameterShape, config: RunConfig) -> int:
    """Elements of a parameter on one rank."""
    p = config.parallel
    if shape.expert:
        return shape.size // (p.ep * p.expert_tp)
    return shape.size if shape.shard_dim is None else shape.size // p.tp


def state_bytes_per_parameter(precision: str) -> tuple[int, int, int]:
    """(parameter, gradient, optimizer) bytes an element, nothing sharded.

    bf16 and fp16: 2 + 4 (fp32 gradients) + 12 (fp32 main parameter and two moments) = 18; fp32: 4 + 4 + 8; fp64: twice
    that.
    """
    element = ELEMENT_BYTES[precision]
    return (2, 4, 12) if element == 2 else (element, element, 2 * element)


def activation_peaks(config: RunConfig, stages: tuple[StagePlan, ...], schedule: Schedule) -> list[int]:
    """Per pipeline rank, the most bytes that activations (and what a W waits for) take; messages and workspace not counted."""
    sizes = dataclasses.replace(stage_sizes(config, stages), message=0.0, workspace=None)
    # Without messages the computations alone decide, and they need no lowering.
    peaks = memory_peaks(Program(schedule, schedule.actions), sizes)
    return [round(peak.size) for peak in peaks]


def rank_memory(config: RunConfig, stages: Sequence[StagePlan], activation_bytes: int) -> RankMemory:
    """Memory of a rank that holds `stages`.

    With the distributed optimizer its state is divided by dp·cp (for experts by their own data-parallel size), which
    gives the usual 6 + 12/dp bytes a parameter in bf16.

    Args:
        config: validated, vocabulary known.
        stages: the virtual stages of this pipeline rank.
        activation_bytes: at the peak of the schedule (`activation_peaks`).
    """
    p = config.parallel
    assert p.dp is not None, "validate() resolves dp"
    shapes = shapes_of_rank(config, list(stages))
    dense = sum(local_size(shape, config) for shape in shapes if not shape.expert)
    expert = sum(local_size(shape, config) for shape in shapes if shape.expert)
    parameter, gradient, optimizer = state_bytes_per_parameter(config.training.precision)
    sharded = p.dp_strategy == "distributed-optimizer"
    dense_parts = p.dp * p.cp if sharded else 1
    expert_parts = p.tp * p.cp * p.dp // (p.expert_tp * p.ep) if sharded else 1
    return RankMemory(
        parameters=dense + expert,
        parameter_bytes=parameter * (dense + expert),
        gradient_bytes=gradient * (dense + expert),
        optimizer_bytes=-(-optimizer * dense // dense_parts) + -(-optimizer * expert // expert_parts),
        activation_bytes=activation_bytes,
        workspace_bytes=max(recompute_workspace_bytes(config, plan) for plan in stages),
    )
