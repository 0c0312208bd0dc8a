"""What strategies share whose replicas have weights of their own: what is evaluated, and what is saved."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.rank_mean import rank_mean
from megalite.data_parallel.shards import OptimizerShard
from megalite.data_parallel.states import FlatState, Placement
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.data_parallel.wire import Channel, WireCounter


class OwnWeights(DataParallelStrategy):
    """The model is the mean of the replicas' weights; a checkpoint keeps every replica's own and the mean.

    A run that goes on with as many replicas goes on to the bit. With another number each starts from the mean.
    """

    replicas_agree = False

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        self._inside_consensus = False
        self._own: dict[Bucket, torch.Tensor] = {}
        self._means: dict[Bucket, torch.Tensor] = {}
        self._noted = 0
        super().__init__(stages, **common)
        assert not self.options.split_main, "a replica's own weights and the mean would need other low bits"
        self.alone = self.groups.dp.size == 1
        """There is no other replica, and nothing to exchange."""

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, `data` is the mean of the replicas' main parameters, rounded once: the same bits on every rank. The
        log gets the distance from it. What is sent for it is not counted: it is no part of any step.

        Collectives: an exchange and a gather of all parameters over the replicas, in full precision; one sum of two
        numbers over the world.
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
        uncounted = Channel(self.groups.replicas(bucket.kind), WireCounter(), self._background)
        if shard.is_copy:
            mean = self._means[bucket] = shard.main_param.data.clone()
            rank_mean(uncounted, mean, wire_dtype=None)
            bucket.data.copy_(mean)
        else:
            self._own[bucket] = bucket.data.clone()
            rank_mean(uncounted, bucket.data, wire_dtype=None)

    def _note_distance(self) -> None:
        """||x_i - mean|| of all replicas' weights, root mean square over replicas, as a share of ||mean||."""
        if self.alone or self._noted == self.step:
            return
        sums = torch.zeros(2, dtype=torch.float64, device=self.shards[0].main_param.device)
        for shard in self.shards:
            if self._counts(shard.bucket):
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
        return super().states() + found + self._shared_states("main_param", self._means)

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

    def loaded(self) -> None:
        """The model's weights are this replica's own."""
        self.publish_parameters()
