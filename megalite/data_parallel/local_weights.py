"""What strategies share whose replicas have weights of their own and exchange weights instead of gradients."""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megalite.config.data_parallel import DataParallelConfig
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.own_weights import OwnWeights
from megalite.data_parallel.shards import Norms, OptimizerShard
from megalite.optimizers.base import Optimizer
from megalite.optimizers.flat import Update
from megalite.topology.group import DONE, Work


class LocalWeights(OwnWeights):
    """Each data-parallel rank (with its tp and pp ranks: a replica) steps weights of its own by its own gradient.

    A rank's gradient is its part of the global mean's times the number of replicas: what the mean over its own samples
    gives where every sample has as many tokens. It is clipped by the replica's own norm; the log shows the root mean
    square of all. Each rank hears all replicas' norms, so an overflow anywhere skips the step everywhere.

    Time is counted in updates: a step that fp16 skips is none, and what was due in it happens in the next one. In the
    first `sync_warmup_steps` updates gradients are all-reduced, and replicas stay equal.

    Needs the same replicas for every bucket (no context or expert parallelism), whole main parameters (not split ones),
    and an optimizer that goes by gradients and takes no sums over the world.
    """

    def __init__(
        self, stages: Mapping[int, torch.nn.Module], *, settings: DataParallelConfig, **common: Any
    ) -> None:
        super().__init__(stages, **common)
        self.settings = settings
        self._updates: int | None = None
        self._skipped = 0

    def _make_shard(self, bucket: Bucket) -> OptimizerShard:
        # Every replica's gradient counts, in a norm of its own.
        return dataclasses.replace(super()._make_shard(bucket), counts_in_norm=self._counts(bucket))

    # ---- what it does when

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        """As all strategies; and see whether steps have been skipped."""
        super().begin_step(step, loss_scale=loss_scale)
        if self._updates is None:  # a new run, or one that another strategy began
            self._updates = step - 1
        self._skipped = step - 1 - self._updates

    def phase(self, step: int) -> str:
        """`gradients` in the warm-up; then what the strategy says."""
        local = self._local_updates(step)
        return "gradients" if local <= 0 else self._local_phase(local)

    def _local_updates(self, step: int) -> int:
        """Updates by own gradients, with that of `step`; 0 or less in the warm-up."""
        return step - self._skipped - self.settings.sync_warmup_steps

    @abstractmethod
    def _local_phase(self, local: int) -> str:
        """What is exchanged in the update with the number `local` after the warm-up, from 1."""

    @property
    def local(self) -> int:
        """`_local_updates` of the step under way."""
        return self._local_updates(self.step)

    # ---- gradients

    def _reduce(self, bucket: Bucket) -> Work:
        return self.channel(bucket).all_reduce_async(bucket.grad) if self.local <= 0 else DONE

    def norm_terms(self) -> torch.Tensor:
        """One number in the warm-up; then one for each replica."""
        own, dp = self.local_norm_squared(), self.groups.dp
        if self.local <= 0:
            return own.view(1) if dp.rank == 0 else torch.zeros_like(own).view(1)
        terms = own.new_zeros(dp.size)
        terms[dp.rank] = own
        return terms

    def norms(self, sums: Sequence[float]) -> Norms:
        """The root mean square of the replicas' norms, and this one's own."""
        if self.local <= 0:
            return super().norms(sums)
        size = self.groups.dp.size
        shown, own = size * sum(sums), sums[self.groups.dp.rank]
        return Norms(
            shown=math.sqrt(shown) if shown >= 0.0 else math.nan,
            clipping=size * math.sqrt(own) if own >= 0.0 else math.nan,
        )

    # ---- weights

    def update(self, optimizer: Optimizer, update: Update) -> None:
        """Step by the reduced gradient or this replica's own, exchange weights if it is time, and round them."""
        assert self._updates is not None, "begin_step comes first"
        if self.local > 0:
            update = dataclasses.replace(update, factor=update.factor * self.groups.dp.size)
        self._step(optimizer, self._scale_gradients(update))
        self.publish_parameters()
        self._updates += 1

    @abstractmethod
    def _step(self, optimizer: Optimizer, update: Update) -> None:
        """Step the optimizer and exchange what is due."""

    def _copies(self) -> dict[Bucket, torch.Tensor]:
        """The main parameters as they are now, in memory of their own."""
        return {shard.bucket: shard.main_param.data.clone() for shard in self.shards}

    # ---- what is saved

    def counters(self) -> dict[str, Any]:
        """Updates made; the rest of the steps were skipped."""
        return {} if self._updates is None else {"local_updates": self._updates}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Without any, the steps before were all updates."""
        self._updates = int(counters["local_updates"]) if "local_updates" in counters else None
