"""Data parallelism by all-reduce: every rank has all gradients and updates all parameters."""

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.strategy import DataParallelStrategy, OptimizerShard
from megalite.topology.group import Work


class AllReduce(DataParallelStrategy):
    """Buckets are all-reduced as the last backward fills them, as in PyTorch DDP (arXiv 2006.15704).

    Wire: 2·(d-1)/d of the gradient bytes a step and rank; d is the expert-dp size for experts.
    """

    shards_over_dp = False

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        """All of it."""
        return 0, bucket.data.numel()

    def _reduce(self, bucket: Bucket) -> Work:
        return self.groups.replicas(bucket.kind).all_reduce_async(bucket.grad)

    def publish_parameters(self) -> None:
        """Round the main parameters to the model's precision; nothing to do where they are the model's."""
        for shard in self.shards:
            if shard.is_copy:
                shard.bucket.data.copy_(shard.main_param.data)

    def wait_for_parameters(self) -> None:
        """Nothing is ever under way."""

    def gather(self, shard: OptimizerShard, values: torch.Tensor) -> torch.Tensor:
        """Already whole."""
        return values
