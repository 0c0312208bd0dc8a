"""What the planner says of a configuration before it runs."""

import dataclasses
from dataclasses import dataclass

from megalite.config.batch import microbatch_counts
from megalite.config.run import RunConfig
from megalite.planner.cost.step import predict
from megalite.planner.hardware.cluster import Cluster, load_cluster
from megalite.planner.hardware.stack import SoftwareStack, load_stack
from megalite.planner.memory import activation_peaks, rank_memory
from megalite.planner.pipeline import lowered, plan_stages, proved, schedule_of

__all__ = ["Machine", "Predicted", "predicted_memory", "predicted_step", "read_machine"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware and software that times are predicted for."""

    cluster: Cluster
    stack: SoftwareStack


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A step as the planner sees it."""

    memory_bytes: int
    """Of the fullest rank."""
    first_rank_bytes: int
    """Of rank 0, whose memory is measured."""
    step_seconds: float | None = None
    """None where no cluster is given."""


def read_machine(cluster: str | None, stack: str) -> Machine | None:
    """The machine that a sweep names, or None.

    Raises:
        ConfigError: there is no such cluster or stack, or its file is not legal.
    """
    if cluster is None:
        return None
    return Machine(cluster=load_cluster(cluster), stack=load_stack(stack))


def predicted_memory(config: RunConfig) -> Predicted:
    """Bytes of a rank for a validated config with a known vocabulary.

    Raises:
        ConfigError: the schedule does not take the number of microbatches, or not within pipeline_memory_limit.
    """
    stages = plan_stages(config)
    schedule = schedule_of(config, microbatch_counts(config)[-1])
    if config.parallel.pipeline_memory_limit is not None:
        proved(config, lowered(config, schedule), stages)
    totals = [
        rank_memory(config, [plan for plan in stages if plan.rank == rank], peak).total_bytes
        for rank, peak in enumerate(activation_peaks(config, stages, schedule))
    ]
    return Predicted(memory_bytes=max(totals), first_rank_bytes=totals[0])


def predicted_step(memory: Predicted, config: RunConfig, machine: Machine | None) -> Predicted:
    """The same with the seconds of a step on `machine`.

    Raises:
        ConfigError: the cluster cannot run the config, as where it has no such precision.
    """
    if machine is None:
        return memory
    seconds = float(predict(config, machine.cluster, machine.stack, with_memory=False).step_seconds)
    return dataclasses.replace(memory, step_seconds=seconds)
