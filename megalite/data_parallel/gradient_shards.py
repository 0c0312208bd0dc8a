"""Gradients of which a rank keeps its own range alone: the second stage of ZeRO."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megalite.data_parallel.buckets import Bucket, give_memory, has_memory, take_memory
from megalite.data_parallel.wire import Channel
from megalite.topology.group import Work


@dataclass(eq=False)
class _Own:
    """What a rank keeps of a bucket's gradient."""

    total: torch.Tensor
    """The owned range, summed over ranks and the microbatches so far."""
    channel: Channel
    is_empty: bool = True
    """Nothing has been added yet."""


@dataclass(eq=False)
class _Sending:
    """A reduce-scatter under way; `part` is added to the total when it has come, unless it is the total."""

    bucket: Bucket
    own: _Own
    part: torch.Tensor
    work: Work


class GradientShards:
    """The whole of a bucket's gradient has memory only while one microbatch's come in and are reduce-scattered.

    Layers add where they always do: the buffer gets its memory when a layer asks for it, and gives it back once what is
    in it has gone to its owners. A bucket is sent when each of its parameters has reported as often as one microbatch
    makes it. Where the program splits the backward these may be reports of several microbatches; since sums are linear,
    that changes nothing in the end.

    Args:
        overlap: a bucket may be on its way while the backward fills others. They are sent one after the other, and no
            more wait than 5/4 of the largest has room for: the small ones of a layer need not wait for the large one.
    """

    def __init__(self, *, overlap: bool) -> None:
        self._overlap = overlap
        self._own: dict[Bucket, _Own] = {}
        self._sending: deque[_Sending] = deque()
        self._room = 0
        """Elements of all that may be under way."""

    def add(self, bucket: Bucket, total: torch.Tensor, channel: Channel) -> None:
        """Take charge of a bucket: `total`, this rank's range, is where its gradients end up."""
        self._own[bucket] = _Own(total, channel)
        self._room = max(self._room, bucket.grad.numel() * 5 // 4)
        give_memory(bucket.grad)
        for placed in bucket.placed:
            placed.parameter.grad_wanted = lambda: self._provide(bucket)
        self._await(bucket)

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket in self._own

    def reset(self) -> None:
        """Forget all gradients, also those of a step that failed half way."""
        self.collect()
        for bucket, own in self._own.items():
            give_memory(bucket.grad)
            own.total.zero_()
            own.is_empty = True
            self._await(bucket)

    def send(self, buckets: Iterable[Bucket]) -> None:
        """Send what has come of these since they were last sent."""
        for bucket in buckets:
            if bucket in self._own and self._holds(bucket):
                self._send(bucket)

    def finish(self) -> None:
        """Send what is left and return with all totals complete."""
        self.send(self._own)
        self.collect()

    def collect(self) -> None:
        """Take in all that is on its way."""
        while self._sending:
            self._finish_first()

    def _await(self, bucket: Bucket) -> None:
        bucket.arm(lambda: self._send(bucket))

    def _holds(self, bucket: Bucket) -> bool:
        """The buffer has something in it that has not been sent."""
        return has_memory(bucket.grad) and not self._is_sending(bucket)

    def _is_sending(self, bucket: Bucket) -> bool:
        return any(sending.bucket is bucket for sending in self._sending)

    def _provide(self, bucket: Bucket) -> None:
        while self._is_sending(bucket):
            self._finish_first()
        if not has_memory(bucket.grad):
            take_memory(bucket.grad)
            bucket.grad.zero_()

    def _send(self, bucket: Bucket) -> None:
        self._await(bucket)
        room = self._room - bucket.grad.numel()
        while self._sending and sum(sending.bucket.grad.numel() for sending in self._sending) > room:
            self._finish_first()
        own = self._own[bucket]
        part = own.total if own.is_empty else torch.empty_like(own.total)
        own.is_empty = False
        work = own.channel.reduce_scatter_async(part, bucket.grad)
        self._sending.append(_Sending(bucket, own, part, work))
        if not self._overlap:
            self._finish_first()

    def _finish_first(self) -> None:
        sending = self._sending.popleft()
        sending.work.wait()
        if sending.part is not sending.own.total:
            sending.own.total.add_(sending.part)
        give_memory(sending.bucket.grad)
