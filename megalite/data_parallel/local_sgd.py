"""Local SGD: replicas go their own way for some steps, then meet at the mean of their weights."""

from collections.abc import Mapping
from typing import Any

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.local_weights import LocalWeights
from megalite.data_parallel.rank_mean import rank_mean
from megalite.data_parallel.states import FlatState
from megalite.optimizers.base import Optimizer
from megalite.optimizers.flat import Update


class LocalSGD(LocalWeights):
    """Every `sync_interval` updates x = mean over ranks of x_i (arXiv 1805.09767); any optimizer takes the steps between.

    With `sync_warmup_steps` it is post-local SGD (arXiv 1808.07217). With `average_optimizer_state` the optimizer's
    states become their mean too; else each rank keeps its own.

    A bf16 wire would round the weights themselves; so what travels is each rank's difference from the last common
    weights a: x = a + mean(bf16(x_i - a)), the mean rounded to bf16 too. That costs a copy of the weights. Averaged
    states of the optimizer are rounded to bf16 by it.

    Wire: 2·(d-1)/d of the bytes of the main parameters (in the wire's format) once in `sync_interval` steps; twice more
    for Adam's averaged moments. After an exchange replicas are equal to the bit.
    """

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        super().__init__(stages, **common)
        self._anchors: dict[Bucket, torch.Tensor] = {}
        if self.options.wire_dtype is not None and not self.alone:
            self._anchors = self._copies()

    def _local_phase(self, local: int) -> str:
        return "weights" if local % self.settings.sync_interval == 0 else "local"

    def _step(self, optimizer: Optimizer, update: Update) -> None:
        optimizer.step(update)
        if self.local == 0:
            self._set_anchors()
        if self.local > 0 and self.local % self.settings.sync_interval == 0 and not self.alone:
            self._average(optimizer)

    def _set_anchors(self) -> None:
        for shard in self.shards:
            if shard.bucket in self._anchors:
                self._anchors[shard.bucket].copy_(shard.main_param.data)

    def _average(self, optimizer: Optimizer) -> None:
        for shard in self.shards:
            channel, main = self.channel(shard.bucket), shard.main_param.data
            anchor = self._anchors.get(shard.bucket)
            if anchor is None:
                rank_mean(channel, main, wire_dtype=None)
            else:
                difference = main - anchor
                rank_mean(channel, difference, wire_dtype=self.options.wire_dtype)
                anchor += difference
                main.copy_(anchor)
            if self.settings.average_optimizer_state:
                for values in optimizer.state(shard.main_param).values():
                    rank_mean(channel, values, wire_dtype=self.options.wire_dtype)

    def states(self) -> list[FlatState]:
        """As all with own weights; and the last common ones, if they are needed."""
        return super().states() + self._shared_states("anchor", self._anchors, "parameter")
