"""A plan for a chain: its stages, where they are, and how many microbatches a step has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.planner.chain.placement import Counts


class Stage(NamedTuple):
    """Layers `first` up to but without `last`, on some devices of each machine; each microbatch is cut into slices."""

    first: int
    last: int
    devices: Counts
    """Per machine, how many of its devices hold a replica."""

    @property
    def replicas(self) -> int:
        """Over all machines."""
        return sum(self.devices)

    @property
    def spans_machines(self) -> bool:
        """Its replicas reduce gradients over the network."""
        return sum(count > 0 for count in self.devices) > 1


Stages = tuple[Stage, ...]


@dataclass(frozen=True)
class ChainPlan:
    """How to train: the stages, and the schedule of a step."""

    stages: Stages
    microbatches: int
    microbatch_size: int
    """Samples, over all replicas of a stage."""
    warm_up: str = "pa"
    """Of 1F1B: "pa", or "pb" for about twice as many microbatches in flight."""

    def in_flight(self, stage: int) -> int:
        """Microbatches whose activations a stage holds at most."""
        left = len(self.stages) - stage
        return min(self.microbatches, left if self.warm_up == "pa" else 2 * left - 1)


def device_ids(stages: Sequence[Stage], gpus_per_machine: int) -> list[tuple[int, ...]]:
    """Per stage, the numbers of its devices: those of machine m begin at m x gpus_per_machine."""
    used = [0] * len(stages[0].devices)
    found = []
    for stage in stages:
        mine: list[int] = []
        for machine, count in enumerate(stage.devices):
            begin = machine * gpus_per_machine + used[machine]
            mine.extend(range(begin, begin + count))
            used[machine] += count
        found.append(tuple(mine))
    return found
