"""Data parallelism with a distributed optimizer: each rank updates a part of every bucket (ZeRO-1 and ZeRO-2)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megalite.data_parallel.arrivals import Arrivals, first_needed_first
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.gradient_shards import GradientShards
from megalite.data_parallel.shards import OptimizerShard
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.topology.group import Work


class DistributedOptimizer(DataParallelStrategy):
    """Gradients are reduce-scattered, the owned part stepped, parameters gathered again (arXiv 1910.02054).

    The gather runs under the next forward: each module waits for its own buckets just before it computes.
    Wire: (d-1)/d of the gradient bytes plus (d-1)/d of the parameter bytes a step and rank. Optimizer state and main
    parameters take 1/d of the memory. For experts d is the expert-dp size.

    Args:
        shard_gradients: gradients take 1/d of the memory too, but for the buckets that are being filled or sent (ZeRO-2).
            Then they are on the wire once for each microbatch: m·(d-1)/d of their bytes.
    """

    shards_over_dp = True

    def __init__(
        self,
        stages: Mapping[int, torch.nn.Module],
        *,
        overlap_param_gather: bool,
        shard_gradients: bool = False,
        **common: Any,
    ) -> None:
        # Before the shards are made.
        self._sharded = GradientShards(overlap=common["options"].overlap) if shard_gradients else None
        super().__init__(stages, **common)
        shared = any(self.groups.replicas(bucket.kind).size > 1 for bucket in self.all_buckets())
        self._watch(stages, overlap=overlap_param_gather and shared)

    def _watch(self, stages: Mapping[int, torch.nn.Module], *, overlap: bool) -> None:
        """Have the modules say when they need their parameters."""
        self._arrivals = Arrivals(stages, self.all_buckets(), overlap=overlap)

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        """This rank's equal part."""
        group = self.groups.replicas(bucket.kind)
        size = bucket.data.numel() // group.size
        return group.rank * size, (group.rank + 1) * size

    def _make_shard(self, bucket: Bucket) -> OptimizerShard:
        shard, channel = super()._make_shard(bucket), self.channel(bucket)
        if self._sharded is not None and channel.size > 1:
            shard.main_param.grad = total = bucket.grad.new_zeros(shard.stop - shard.start)
            self._sharded.add(bucket, total, channel)
        return shard

    def zero_grad(self) -> None:
        """Forget the last step's gradients."""
        if self._sharded is None:
            super().zero_grad()
            return
        self._sharded.reset()
        for bucket in self.all_buckets():
            if bucket not in self._sharded:
                bucket.grad.zero_()

    def arm(self, stage: int, pending: Sequence[torch.nn.Parameter] | None = None) -> None:
        """With sharded gradients nothing: each microbatch's are sent as they come."""
        if self._sharded is None:
            super().arm(stage, pending)

    def launch(self, stage: int) -> None:
        """Send what has not been."""
        if self._sharded is None:
            super().launch(stage)
        else:
            self._sharded.send(self.buckets[stage])

    def finish_gradients(self) -> None:
        """Return with the sums of the owned ranges complete.

        Sharded gradients that tp ranks or the two copies of a tied embedding hold in parts are summed over those last:
        equal buckets are cut alike, so that the owned ranges lie on one another.
        """
        if self._sharded is None:
            super().finish_gradients()
            return
        self._sharded.finish()
        for shard in self.shards:
            kind, total = shard.bucket.kind, shard.main_param.grad
            assert total is not None
            if kind.partial_over_tp:
                self.groups.tp.all_reduce(total)
            if kind.tied and self.groups.embedding is not None:
                self.groups.embedding.all_reduce(total)

    def _reduce(self, bucket: Bucket) -> Work:
        start, stop = self.owned_range(bucket)
        return self.channel(bucket).reduce_scatter_async(bucket.grad[start:stop], bucket.grad)

    def publish_parameters(self) -> None:
        """Round the owned part to the model's precision and start gathering all parts, first-needed first."""
        super().publish_parameters()
        for bucket in first_needed_first(self.buckets):
            start, stop = self.owned_range(bucket)
            work = self.channel(bucket).gather_raw_async(bucket.data, bucket.data[start:stop])
            self._arrivals.expect(bucket, work)
        self._arrivals.wait_unless_overlapped()

    def wait_for_parameters(self) -> None:
        """Finish every gather."""
        self._arrivals.wait()

    def gather(self, shard: OptimizerShard, values: torch.Tensor) -> torch.Tensor:
        """All-gather over the ranks that hold the bucket too."""
        whole = values.new_empty(shard.bucket.data.numel())
        self.groups.replicas(shard.bucket.kind).all_gather(whole, values.contiguous())
        return whole
