"""Data parallelism by a parameter server: one rank of each group adds gradients, steps, and hands out parameters."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megalite.config.data_parallel import DataParallelConfig
from megalite.data_parallel.arrivals import Arrivals, first_needed_first
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.shards import ALIGNMENT, OptimizerShard
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.data_parallel.wire import Channel, Several
from megalite.optimizers.base import Optimizer
from megalite.optimizers.flat import Update
from megalite.topology.group import DONE, Group, Work
from megalite.topology.rank_sum import add_in_order

SERVER = 0
"""Index of the server in its group."""

AHEAD = 2
"""Chunks of a bucket that are under way at a time: while one is added the next comes."""


class ParameterServer(DataParallelStrategy):
    """Workers push gradients to a server and pull parameters from it, in chunks (as in Li et al., OSDI 2014).

    The first rank of each group with the same buckets is worker and server at once: it alone has main parameters and
    optimizer states. A bucket is pushed as soon as the last backward has filled it; the server adds chunk after chunk,
    in the order of ranks, its own part rounded like those that travel. Once the norm is known it steps all it has and
    sends the parameters, first-needed first; workers go on into the next forward and wait for each module's own.

    Wire, of B bytes of gradients and P of parameters: a worker sends B, the server (d-1)·P, and receives (d-1)·B; its
    link is what all wait for. d is the expert-dp size for experts, whose servers are other ranks.
    """

    shards_over_dp = True

    def __init__(
        self,
        stages: Mapping[int, torch.nn.Module],
        *,
        settings: DataParallelConfig,
        overlap_param_gather: bool,
        **common: Any,
    ) -> None:
        super().__init__(stages, **common)
        self._chunk_bytes = chunk_bytes(settings)
        self._sending: list[Work] = []
        """What the server has under way to its workers."""
        shared = any(self.groups.replicas(bucket.kind).size > 1 for bucket in self.all_buckets())
        self._arrivals = Arrivals(stages, self.all_buckets(), overlap=overlap_param_gather and shared)

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        """Everything on the server, nothing elsewhere."""
        size = bucket.data.numel()
        return (0 if self._serves(bucket) else size), size

    def role(self, group: Group, index: int) -> str:
        """What rank `index` of a group with the same buckets is in it."""
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
        return chunks(grad, self._chunk_bytes, channel.wire_dtype or grad.dtype)

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
        """The server steps; everybody gets what it has made."""
        # The parameters of the step before may still be on their way from where the optimizer writes now.
        self.wait_for_parameters()
        super().update(optimizer, update)

    def publish_parameters(self) -> None:
        """Round the server's main parameters to the model's precision and send them, first-needed first."""
        super().publish_parameters()
        for bucket in first_needed_first(self.buckets):
            channel = self.channel(bucket)
            parts = list(chunks(bucket.data, self._chunk_bytes, bucket.data.dtype))
            if self._serves(bucket):
                workers = range(1, channel.size)
                self._sending += [channel.send_async(part, to=worker) for part in parts for worker in workers]
            else:
                works = [channel.receive_async(part, source=SERVER) for part in parts]
                self._arrivals.expect(bucket, Several(works))
        self._arrivals.wait_unless_overlapped()

    def wait_for_parameters(self) -> None:
        """Until all have arrived; on the server, until all have left."""
        self._arrivals.wait()
        for work in self._sending:
            work.wait()
        self._sending.clear()

    def gather(self, shard: OptimizerShard, values: torch.Tensor) -> torch.Tensor:
        """Broadcast by the server."""
        whole = values.contiguous()
        if not self._serves(shard.bucket):
            whole = values.new_empty(shard.bucket.data.numel())
        self.groups.replicas(shard.bucket.kind).broadcast(whole, source=SERVER)
        return whole


def chunk_bytes(settings: DataParallelConfig) -> float:
    """Of one message to or from a server, at most."""
    return settings.server_chunk_mb * 1e6


def chunk_elements(nbytes: float, dtype: torch.dtype) -> int:
    """Elements in a message of so many bytes, from whole aligned blocks."""
    return max(1, int(nbytes / dtype.itemsize) // ALIGNMENT) * ALIGNMENT


def chunks(tensor: torch.Tensor, nbytes: float, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """A flat tensor in messages of at most so many bytes, if its elements are sent as `dtype`."""
    return iter(tensor.split(chunk_elements(nbytes, dtype)))


def _receive_parts(chunk: torch.Tensor, channel: Channel) -> tuple[torch.Tensor, torch.Tensor, Work]:
    """The chunk, all ranks' parts of it [size, m] as the wire has them, and when they are there."""
    parts = chunk.new_empty(channel.size, chunk.numel(), dtype=channel.wire_dtype or chunk.dtype)
    works = [channel.receive_async(parts[rank], source=rank) for rank in range(1, channel.size)]
    parts[SERVER].copy_(chunk)
    return chunk, parts, Several(works)


def _add(chunk: torch.Tensor, parts: torch.Tensor, work: Work) -> None:
    work.wait()
    add_in_order(chunk, parts)
