"""Data parallelism by parameter servers on all ranks: each adds, steps and hands out the keys that it serves."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from megalite.config.data_parallel import DataParallelConfig
from megalite.data_parallel.buckets import Bucket, make_buckets
from megalite.data_parallel.distributed_optimizer import DistributedOptimizer
from megalite.data_parallel.parameter_server import AHEAD, chunk_bytes, chunk_elements
from megalite.data_parallel.shards import ALIGNMENT
from megalite.data_parallel.wire import Channel
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.group import DONE, Group, Work
from megalite.topology.rank_sum import add_in_order


class ShardedParameterServer(DistributedOptimizer):
    """Every rank is a worker and serves its share of the keys, as co-located servers of BytePS do (OSDI 2020).

    A key is a chunk of `server_chunk_mb` at most, and keys are dealt out in turn: key k is served by rank k mod d. In a
    bucket the keys of one server lie side by side, so that what a rank steps is one range. A bucket is about as long as
    d keys, one for each server; one that is longer, since it holds a longer tensor, has several rounds of d keys, and
    the next round is under way while one is added.

    Push: an exchange of one round's keys (all-to-all) and a sum of the parts in the order of ranks. Pull: an all-gather
    of each bucket, first-needed layers first. Gradients are pushed as the last backward makes them: none may overtake,
    since no server steps before the norm of all of them is known.

    The sums, the range that each rank steps and the bytes are those of ZeRO-1 (`distributed-optimizer`). What differs
    is the grain: buckets of d keys instead of `ddp_bucket_size`, so pushes start earlier and parameters arrive in
    smaller pieces, at most two rounds of keys are buffered where ZeRO-1 buffers a bucket, and the order of the sum is
    that of the ranks on every backend.

    Wire: (d-1)/d of the gradient bytes plus (d-1)/d of the parameter bytes a step and rank. For experts d is the
    expert-dp size.
    """

    def __init__(
        self, stages: Mapping[int, torch.nn.Module], *, settings: DataParallelConfig, **common: Any
    ) -> None:
        self._chunk_bytes = chunk_bytes(settings)
        super().__init__(stages, **common)

    def _key_elements(self) -> int:
        return chunk_elements(self._chunk_bytes, self.options.wire_dtype or self.options.grad_dtype)

    def _make_buckets(self, parameters: list[ShardedParameter]) -> list[Bucket]:
        return make_buckets(
            parameters,
            bucket_size=self.groups.dp.size * self._key_elements(),
            align=lambda kind: ALIGNMENT * self.groups.replicas(kind).size,
            grad_dtype=self.options.grad_dtype,
        )

    def role(self, group: Group, index: int) -> str:
        """What rank `index` of a group with the same buckets is in it."""
        return f"parameter server {index}"

    def _reduce(self, bucket: Bucket) -> Work:
        channel = self.channel(bucket)
        if channel.size == 1:
            return DONE
        return channel.in_background(lambda: self._push(bucket.grad, channel))

    def _push(self, grad: torch.Tensor, channel: Channel) -> None:
        """Exchange keys round after round, and add up those of this server."""
        served = grad.view(channel.size, -1)
        own = served[channel.rank].split(self._key_elements())
        coming: deque[tuple[torch.Tensor, torch.Tensor, Work]] = deque()
        for key, keys in zip(own, served.split(self._key_elements(), dim=1), strict=True):
            parts, work = channel.exchange_raw_async(channel.rounded(keys).contiguous())
            coming.append((key, parts, work))
            if len(coming) == AHEAD:
                _add(*coming.popleft())
        while coming:
            _add(*coming.popleft())


def _add(key: torch.Tensor, parts: torch.Tensor, work: Work) -> None:
    work.wait()
    add_in_order(key, parts.view(-1, key.numel()))
