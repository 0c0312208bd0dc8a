"""What strategies share whose replicas have weights of their own and exchange weights instead of gradients."""

import contextlib
import dataclasses
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megalite.config.data_parallel import DataParallelConfig
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.rank_mean import rank_mean
from megalite.data_parallel.states import FlatState, Placement
from megalite.data_parallel.strategy import DataParallelStrategy, Norms, OptimizerShard
from megalite.optimizers.base import Optimizer
from megalite.optimizers.flat import Update
from megalite.topology.group import DONE, Work


class LocalWeights(DataParallelStrategy):
    """Each data-parallel rank (with its tp and pp ranks: a replica) steps weights of its own by its own gradient.

    A rank's gradient is its part of the global mean's times the number of replicas: what the mean over its own samples
    gives where every sample has as many tokens. It is clipped by the replica's own norm; the log shows the root mean
    square of all. Each rank hears all replicas' norms, so an overflow anywhere skips the step everywhere.

    Time is counted in updates: a step that fp16 skips is none, and what was due in it happens in the next one. In the
    first `sync_warmup_steps` updates gradients are all-reduced, and replicas stay equal.

    Needs the same replicas for every bucket (no context or expert parallelism), whole main parameters (not split ones),
    and an optimizer that goes by gradients and takes no sums over the world.
    """

    replicas_agree = False

    def __init__(
        self, stages: Mapping[int, torch.nn.Module], *, settings: DataParallelConfig, **common: Any
    ) -> None:
        super().__init__(stages, **common)
        assert not self.options.split_main, "a replica's own weights and the mean would need other low bits"
        self.settings = settings
        self.alone = self.groups.dp.size == 1
        """There is no other replica, and nothing to exchange."""
        self._updates: int | None = None
        self._skipped = 0
        self._inside_consensus = False
        self._own: dict[Bucket, torch.Tensor] = {}
        self._means: dict[Bucket, torch.Tensor] = {}
        self._noted = 0

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
        self._scale_gradients(update.factor)
        self._step(optimizer, update)
        self.publish_parameters()
        self._updates += 1

    @abstractmethod
    def _step(self, optimizer: Optimizer, update: Update) -> None:
        """Step the optimizer and exchange what is due."""

    def _copies(self) -> dict[Bucket, torch.Tensor]:
        """The main parameters as they are now, in memory of their own."""
        return {shard.bucket: shard.main_param.data.clone() for shard in self.shards}

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, `data` is the mean of the replicas' main parameters, rounded once: the same bits on every rank. The
        log gets the distance from it.

        Collectives: an exchange and a gather of all parameters over dp, in full precision; one sum of two numbers over
        the world.
        """
        assert not self._inside_consensus, "the mean would be taken for a replica's own weights"
        self._inside_consensus = True
        try:
            for shard in self.shards:
                self._put_mean(shard)
            self._note_distance()
            yield
        finally:
            self.publish_parameters()
            for bucket, own in self._own.items():
                bucket.data.copy_(own)
            self._own.clear()
            self._means.clear()
            self._inside_consensus = False

    def _put_mean(self, shard: OptimizerShard) -> None:
        bucket = shard.bucket
        if shard.is_copy:
            mean = self._means[bucket] = shard.main_param.data.clone()
            rank_mean(self.channel(bucket), mean, wire_dtype=None)
            bucket.data.copy_(mean)
        else:
            self._own[bucket] = bucket.data.clone()
            rank_mean(self.channel(bucket), bucket.data, wire_dtype=None)

    def _note_distance(self) -> None:
        """||x_i - mean|| of all replicas' weights, root mean square over replicas, as a share of ||mean||."""
        if self.alone or self._noted == self.step:
            return
        sums = torch.zeros(2, dtype=torch.float64, device=self.shards[0].main_param.device)
        for shard in self.shards:
            if shard.counts_in_norm:
                own = self._own.get(shard.bucket, shard.main_param.data)
                mean = self._means.get(shard.bucket, shard.bucket.data)
                sums[0] += torch.linalg.vector_norm(own - mean).double().square()
                sums[1] += torch.linalg.vector_norm(mean).double().square()
        self.groups.world.all_reduce(sums)
        apart, whole = sums.tolist()
        self._noted = self.step
        if apart > 0.0 and whole > 0.0:
            share = math.sqrt(apart / whole)
            self.notes.append(f"consensus distance after step {self.step}: {share:.3e} of the weights' norm")

    # ---- what is saved

    @property
    def optimizer_placement(self) -> Placement:
        """Each replica has its own."""
        return Placement.PRIVATE

    def states(self) -> list[FlatState]:
        """Each replica's main parameters; inside `consensus` also their mean, which other strategies start from."""
        found = [
            FlatState(
                name="replica_param",
                bucket=shard.bucket,
                start=0,
                values=self._own.get(shard.bucket, shard.main_param.data),
                placement=Placement.PRIVATE,
                default="parameter",
            )
            for shard in self.shards
        ]
        return found + self._shared_states("main_param", self._means)

    def _shared_states(
        self, name: str, values: Mapping[Bucket, torch.Tensor], default: str = "required"
    ) -> list[FlatState]:
        """Of what all replicas have alike."""
        return [
            FlatState(
                name=name,
                bucket=bucket,
                start=0,
                values=each,
                placement=Placement.REPLICATED,
                default=default,
            )
            for bucket, each in values.items()
        ]

    def counters(self) -> dict[str, Any]:
        """Updates made; the rest of the steps were skipped."""
        return {} if self._updates is None else {"local_updates": self._updates}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Without any, the steps before were all updates."""
        self._updates = int(counters["local_updates"]) if "local_updates" in counters else None

    def loaded(self) -> None:
        """The model's weights are this replica's own."""
        self.publish_parameters()
