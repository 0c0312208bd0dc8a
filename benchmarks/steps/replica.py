"""One rank's replica, data and step, as in pretrain_gpt.py without its log, for timing within a process."""

from typing import Any

import torch

from megalite.config.run import RunConfig
from megalite.data.loader import Microbatch
from megalite.optimizers.schedules import Progress, Schedules
from megalite.partition.pipeline import layout_of
from megalite.topology.group import ProcessGroups
from megalite.topology.topology import Topology
from megalite.training.evaluation import ReadAhead, read_batches
from megalite.training.replica import Replica, build_replica
from megalite.training.setup import open_data
from megalite.training.step import Stepper, StepResult


class Run:
    """A replica, its data and its progress.

    Args:
        reuse: process groups of earlier runs of this process, to be used again."""

    def __init__(self, config: RunConfig, *, rank: int, device: torch.device, reuse: ProcessGroups | None = None) -> None:
        self.config, self.device = config, device
        groups: dict[str, Any] = {} if reuse is None else {"reuse": reuse}
        memory = config.parallel.shared_memory_collectives
        self.topology = Topology.create(layout_of(config), rank=rank, device=device, shared_memory=memory, **groups)
        self.replica: Replica = build_replica(config, self.topology)
        self.stepper = Stepper(self.replica, Schedules(config))
        self.data = open_data(self.replica, None)
        self.progress = Progress(0, 0)

    @property
    def batch_size(self) -> int:
        assert self.config.training.global_batch_size is not None
        return self.config.training.global_batch_size

    def read(self, size: int) -> list[Microbatch]:
        """This rank's part of the next `size` samples."""
        scope, first = self.replica.strategy.scope, self.progress.samples
        return read_batches(self.data.train, first, size, topology=self.topology, scope=scope)[0]

    def train(self, batches: list[Microbatch], size: int) -> StepResult:
        """Train a step; the next batch is read meanwhile, as in training."""

        def read_next() -> None:
            if self.data.train is not None:
                self.data.train.prefetch(self.progress.samples + size, size)

        if ReadAhead(self.device).early:
            read_next()
        result = self.stepper.step(batches, before=self.progress, batch_size=size, meanwhile=read_next)
        self.progress = Progress(self.progress.step + 1, self.progress.samples + size)
        return result

    def close(self) -> None:
        self.replica.strategy.finish()
        self.replica.strategy.close()
        for loader in (self.data.train, self.data.valid, self.data.test):
            if loader is not None:
                loader.close()
