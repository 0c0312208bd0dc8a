"""Data parallelism by a parameter server: one rank of each group adds gradients, steps, and hands out parameters."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megalite.data_parallel.buckets import Arrivals, Bucket, first_needed_first
from megalite.data_parallel.facts import message_elements
from megalite.data_parallel.shards import OptimizerShard
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.data_parallel.wire import Channel, Several
from megalite.data_parallel.zero import DistributedOptimizer
from megalite.optimizers.base import Optimizer, Update
from megalite.topology.group import DONE, Group, Work, add_in_order

SERVER = 0
"""Index of the server in its group."""

AHEAD = 2
"""Chunks of a bucket that are in flight at a time: while one is added the next comes."""


class ParameterServer(DataParallelStrategy):
    """Workers push gradients to a server and pull parameters from it, in chunks (as in Li et al., OSDI 2014).

    The first rank of each group with the same buckets is worker and server at once: it alone has main parameters and
    optimizer states. A bucket is pushed as soon as the last backward has filled it; the server adds chunk after chunk,
    in the order of ranks, its own part rounded like those that travel. Once the norm is known it steps all it has and
    sends the parameters, first-needed first; workers continue into the next forward and wait for each module's own.

    Wire, of B bytes of gradients and P of parameters: a worker sends B, the server (d-1)·P, and receives (d-1)·B; its
    link is what all wait for. d is the expert-dp size for experts, which have other servers.
    """

    shards_over_dp = True

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        super().__init__(stages, **common)
        self._sending: list[Work] = []
        """What the server has in flight to its workers."""
        shared = any(self.groups.replicas(bucket.kind).size > 1 for bucket in self.all_buckets())
        self._arrivals = Arrivals(stages, self.all_buckets(), overlap=self.options.overlap_param_gather and shared)

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        size = bucket.data.numel()
        return (0 if self._serves(bucket) else size), size

    def role(self, group: Group, index: int) -> str:
        return "the parameter server" if index == SERVER else "a worker"

    def _serves(self, bucket: Bucket) -> bool:
        return self.groups.replicas(bucket.kind).rank == SERVER

    def _reduce(self, bucket: Bucket) -> Work:
        channel = self.channel(bucket)
        if channel.size == 1:
            return DONE
        if self._serves(bucket):
            return channel.in_background(lambda: self._take_pushes(bucket.grad, channel))
        sent = [channel.rounded(chunk) for chunk in self._gradient_chunks(bucket.grad, channel)]
        return Several([channel.send_async(chunk, to=SERVER) for chunk in sent], sent)

    def _gradient_chunks(self, grad: torch.Tensor, channel: Channel) -> Iterator[torch.Tensor]:
        return self._chunks(grad, channel.wire_dtype or grad.dtype)

    def _chunks(self, tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """A flat tensor in messages of `server_chunk_mb`, if its elements are sent as `dtype`."""
        size = message_elements(self.options.settings.server_chunk_mb, dtype.itemsize)
        return iter(tensor.split(size))

    def _take_pushes(self, grad: torch.Tensor, channel: Channel) -> None:
        """Add what the workers push to the server's own part, chunk after chunk."""
        coming: deque[tuple[torch.Tensor, torch.Tensor, Work]] = deque()
        for chunk in self._gradient_chunks(grad, channel):
            coming.append(_receive_parts(chunk, channel))
            if len(coming) == AHEAD:
                _add(*coming.popleft())
        while coming:
            _add(*coming.popleft())

    def update(self, optimizer: Optimizer, update: Update) -> None:
        # The parameters of the step before may still be on their way from where the optimizer writes now.
        self.wait_for_parameters()
        super().update(optimizer, update)

    def publish_parameters(self) -> None:
        super().publish_parameters()
        for bucket in first_needed_first(self.buckets):
            channel = self.channel(bucket)
            parts = list(self._chunks(bucket.data, bucket.data.dtype))
            if self._serves(bucket):
                workers = range(1, channel.size)
                self._sending += [channel.send_async(part, to=worker) for part in parts for worker in workers]
            else:
                works = [channel.receive_async(part, source=SERVER) for part in parts]
                self._arrivals.expect(bucket, Several(works))
        self._arrivals.wait_unless_overlapped()

    def wait_for_parameters(self) -> None:
        self._arrivals.wait()
        for work in self._sending:
            work.wait()
        self._sending.clear()

    def gather(self, shard: OptimizerShard, values: torch.Tensor) -> torch.Tensor:
        whole = values.contiguous()
        if not self._serves(shard.bucket):
            whole = values.new_empty(shard.bucket.data.numel())
        self.groups.replicas(shard.bucket.kind).broadcast(whole, source=SERVER)
        return whole


def _receive_parts(chunk: torch.Tensor, channel: Channel) -> tuple[torch.Tensor, torch.Tensor, Work]:
    """The chunk, all ranks' parts of it [size, m] as the wire has them, and when they are there."""
    parts = chunk.new_empty(channel.size, chunk.numel(), dtype=channel.wire_dtype or chunk.dtype)
    works = [channel.receive_async(parts[rank], source=rank) for rank in range(1, channel.size)]
    parts[SERVER].copy_(chunk)
    return chunk, parts, Several(works)


def _add(chunk: torch.Tensor, parts: torch.Tensor, work: Work) -> None:
    work.wait()
    add_in_order(chunk, parts)


class ShardedParameterServer(DistributedOptimizer):
    """Every rank is a worker and serves its share of the keys, as co-located servers of BytePS do (OSDI 2020).

    A key is a chunk of `server_chunk_mb` at most, and keys are dealt out in turn: key k is served by rank k mod d. In a
    bucket the keys of one server lie side by side, so that what a rank steps is one range. A bucket is about as long as
    d keys, one for each server; one that is longer, since it holds a longer tensor, has several rounds of d keys, and
    the next round is in flight while one is added.

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

    def _key_elements(self) -> int:
        width = (self.options.wire_dtype or self.options.grad_dtype).itemsize
        return message_elements(self.options.settings.server_chunk_mb, width)

    def role(self, group: Group, index: int) -> str:
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
                _add_parts(*coming.popleft())
        while coming:
            _add_parts(*coming.popleft())


def _add_parts(key: torch.Tensor, parts: torch.Tensor, work: Work) -> None:
    work.wait()
    add_in_order(key, parts.view(-1, key.numel()))
