"""Data parallelism by all-reduce: every rank has all gradients and updates all parameters."""

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.topology.group import Work


class AllReduce(DataParallelStrategy):
    """Buckets are all-reduced as the last backward fills them, as in PyTorch DDP (arXiv 2006.15704).

    Wire: 2·(d-1)/d of the gradient bytes a step and rank; d is the expert-dp size for experts.
    """

    def _reduce(self, bucket: Bucket) -> Work:
        return self.channel(bucket).all_reduce_async(bucket.grad)
