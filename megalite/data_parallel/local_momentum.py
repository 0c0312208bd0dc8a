"""Data parallelism for 0/1 Adam, whose replicas go apart between exchanges."""

import contextlib
from collections.abc import Iterator

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.momentum_exchange import MomentumExchange
from megalite.data_parallel.rank_mean import rank_mean
from megalite.data_parallel.states import FlatState, Placement


class LocalMomentumExchange(MomentumExchange):
    """`MomentumExchange` for an optimizer that steps without an exchange too. Replicas then have weights and states of
    their own, and checkpoints keep all of them: a run that goes on with as many replicas goes on to the bit. With another
    number each starts from their mean.

    Wire: as `MomentumExchange` in steps with an exchange; nothing in the others.
    """

    replicas_agree = False
    _own: dict[Bucket, torch.Tensor] | None = None

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the buckets' `data` is the mean of the replicas' main parameters, rounded once.

        Collectives: an exchange and a gather of all parameters over the replicas, in full precision.
        """
        assert self._own is None, "the mean would be taken for a replica's own weights"
        self.wait_for_parameters()
        with self.main_in_memory():
            try:
                self._own = {}
                for shard in self.shards:
                    bucket, mean = shard.bucket, shard.main_param.data.clone()
                    if not shard.is_copy:
                        self._own[bucket] = bucket.data.clone()
                    rank_mean(self.channel(bucket), mean, wire_dtype=None)
                    bucket.data.copy_(mean)
                yield
            finally:
                own, self._own = self._own, None
                for bucket, values in (own or {}).items():
                    bucket.data.copy_(values)
                self.publish_parameters()

    @property
    def optimizer_placement(self) -> Placement:
        """Each replica has its own."""
        return Placement.PRIVATE

    def states(self) -> list[FlatState]:
        """Also each replica's main parameters."""
        own = self._own or {}
        return super().states() + [
            FlatState(
                name="replica_param",
                bucket=shard.bucket,
                start=0,
                values=own.get(shard.bucket, shard.main_param.data),
                placement=Placement.PRIVATE,
                default="parameter",
            )
            for shard in self.shards
        ]

    def loaded(self) -> None:
        """The model's weights are this replica's own."""
        with self.main_in_memory():
            self.publish_parameters()
