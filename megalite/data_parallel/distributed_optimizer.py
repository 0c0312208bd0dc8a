"""Data parallelism with a distributed optimizer: each rank updates a part of every bucket (ZeRO-1)."""

from collections.abc import Mapping
from typing import Any

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.strategy import DataParallelStrategy, OptimizerShard
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.group import Work


class DistributedOptimizer(DataParallelStrategy):
    """Gradients are reduce-scattered, the owned part stepped, parameters gathered again (arXiv 1910.02054).

    The gather runs under the next forward: each module waits for its own buckets just before it computes.
    Wire: (d-1)/d of the gradient bytes plus (d-1)/d of the parameter bytes a step and rank. Optimizer state and main
    parameters take 1/d of the memory. For experts d is the expert-dp size.
    """

    shards_over_dp = True

    def __init__(
        self, stages: Mapping[int, torch.nn.Module], *, overlap_param_gather: bool, **common: Any
    ) -> None:
        super().__init__(stages, **common)
        self._gathering: dict[Bucket, Work] = {}
        shared = any(self.groups.replicas(bucket.kind).size > 1 for bucket in self.all_buckets())
        self._overlap_gather = overlap_param_gather and shared
        if self._overlap_gather:
            bucket_of = {
                placed.parameter: bucket for bucket in self.all_buckets() for placed in bucket.placed
            }
            for stage in stages.values():
                for module in stage.modules():
                    self._wait_before(module, bucket_of)

    def _wait_before(self, module: torch.nn.Module, bucket_of: dict[Any, Bucket]) -> None:
        own = [p for p in module.parameters(recurse=False) if isinstance(p, ShardedParameter)]
        buckets = tuple(dict.fromkeys(bucket_of[parameter] for parameter in own))
        if buckets:
            module.register_forward_pre_hook(lambda *_: self._wait_for(buckets))

    def _wait_for(self, buckets: tuple[Bucket, ...]) -> None:
        if self._gathering:
            for bucket in buckets:
                work = self._gathering.pop(bucket, None)
                if work is not None:
                    work.wait()

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        """This rank's equal part."""
        group = self.groups.replicas(bucket.kind)
        size = bucket.data.numel() // group.size
        return group.rank * size, (group.rank + 1) * size

    def _reduce(self, bucket: Bucket) -> Work:
        start, stop = self.owned_range(bucket)
        group = self.groups.replicas(bucket.kind)
        return group.reduce_scatter_async(bucket.grad[start:stop], bucket.grad)

    def publish_parameters(self) -> None:
        """Round the owned part to the model's precision and start gathering all parts, first-needed first."""
        # Stages are in the order in which the next forward comes to them, the buckets of each in the backward's.
        shards = {shard.bucket: shard for shard in self.shards}
        for shard in (shards[bucket] for buckets in self.buckets.values() for bucket in reversed(buckets)):
            data = shard.bucket.data
            own = data[shard.start : shard.stop]
            if shard.is_copy:
                own.copy_(shard.main_param.data)
            group = self.groups.replicas(shard.bucket.kind)
            self._gathering[shard.bucket] = group.all_gather_async(data, own)
        if not self._overlap_gather:
            self.wait_for_parameters()

    def wait_for_parameters(self) -> None:
        """Finish every gather."""
        for work in self._gathering.values():
            work.wait()
        self._gathering.clear()

    def gather(self, shard: OptimizerShard, values: torch.Tensor) -> torch.Tensor:
        """All-gather over the ranks that hold the bucket too."""
        whole = values.new_empty(shard.bucket.data.numel())
        self.groups.replicas(shard.bucket.kind).all_gather(whole, values.contiguous())
        return whole
