"""All-reduce of lossy gradients with error feedback."""

from collections.abc import Mapping
from typing import Any

import torch

from megalite.config.parallel import DataParallelConfig
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.more.break_even import BreakEven
from megalite.data_parallel.more.codec import Codec
from megalite.data_parallel.more.onebit import OneBit
from megalite.data_parallel.more.powersgd import PowerSGD
from megalite.data_parallel.more.topk import TopK
from megalite.data_parallel.more.uint8 import Uint8
from megalite.data_parallel.strategy import AllReduce, FlatState, TensorState
from megalite.data_parallel.wire import Channel
from megalite.topology.group import DONE, Work


def build_codec(name: str, bucket: Bucket, channel: Channel, settings: DataParallelConfig) -> Codec:
    """What `grad_compression` names, other than `none`."""
    if name == "onebit":
        return OneBit(bucket, channel)
    if name == "uint8":
        return Uint8(bucket, channel)
    if name == "topk":
        return TopK(bucket, channel, density=settings.topk_density)
    assert name == "powersgd", name
    return PowerSGD(bucket, channel, rank=settings.powersgd_rank)


class CompressedAllReduce(AllReduce):
    """All-reduce in which, after the first steps, buckets of weight matrices become lossy means (1-bit, 8-bit, top-k,
    low rank) behind the backward that fills them.

    A rank's estimate of the gradient is n times its part; `codec.mean` makes of all estimates, and of what earlier steps
    still owe, the gradient that every rank goes by. Its norm, by which it is clipped, is that of what comes out. Errors
    are in the gradient's own unit: without the loss scale, and for as many samples however many ranks there are.

    Biases and the weights of norms, under 1 % of the bytes, travel whole. What tp ranks or the ends of a pipeline hold
    copies of has separate buckets, which hold the same bits on each of them, so their results cannot drift apart.

    With fp16 an overflow must leave errors as they are: there, all ranks first agree that no gradient has overflowed,
    and nothing compressed overlaps the backward.

    Wire: see the codecs; with `wire_dtype` for what travels whole.
    """

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        super().__init__(stages, **common)
        settings = self.options.settings
        self._warmup = settings.compression_warmup_steps
        self._codecs: dict[Bucket, Codec] = {
            bucket: build_codec(settings.grad_compression, bucket, self.channel(bucket), settings)
            for bucket in self.all_buckets()
            if bucket.kind.decay and self.channel(bucket).size > 1
        }
        self._break_even = BreakEven(
            *(self, self._codecs),
            lambda bucket, channel: build_codec(settings.grad_compression, bucket, channel, settings),
            warmup=0.0,
            name=f"grad_compression {settings.grad_compression}",
            all_alike=True,
        )
        self._may_overflow = self.all_buckets()[0].data.dtype == torch.float16
        self._full: list[Bucket] = []
        """Waiting for all ranks to agree that nothing has overflowed."""

    def phase(self, step: int) -> str:
        return "gradients" if step <= self._warmup else "compressed"

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        super().begin_step(step, loss_scale=loss_scale)
        line = self._break_even.begin(whole=self.phase(step) == "gradients")
        if line is not None:
            self.notes.append(line)

    def zero_grad(self) -> None:
        super().zero_grad()
        self._full.clear()

    def _reduce(self, bucket: Bucket) -> Work:
        channel = self.channel(bucket)
        if channel.size == 1 or self.phase(self.step) == "gradients":
            return super()._reduce(bucket)
        if bucket not in self._codecs:
            return self._reduce_whole(bucket)
        if self._may_overflow:
            self._full.append(bucket)
            return DONE
        return channel.in_background(lambda: self._compress(bucket))

    def _reduce_whole(self, bucket: Bucket) -> Work:
        """An all-reduce among means: two threads must not use one group, so it takes its turn on theirs."""
        channel = self.channel(bucket)
        if self.options.by_rank or self.options.wire_dtype not in (None, bucket.grad.dtype):
            return channel.all_reduce_async(bucket.grad)  # goes there by itself
        return channel.in_background(lambda: channel.all_reduce_async(bucket.grad).wait())

    def _compress(self, bucket: Bucket) -> None:
        bucket.grad.mul_(self.channel(bucket).size / self.loss_scale)
        self._codecs[bucket].mean(bucket.grad)
        if self.loss_scale != 1.0:
            bucket.grad.mul_(self.loss_scale)

    def finish_grad_sync(self) -> None:
        self._break_even.wait(super().finish_grad_sync)
        if not self._may_overflow or self.phase(self.step) == "gradients":
            return
        finite = self._all_finite()
        for bucket in self._full:
            if finite:
                self._compress(bucket)
            else:
                # An overflow may be on one rank alone; every rank's norm has to tell of it.
                bucket.grad.fill_(torch.nan)
        self._full.clear()

    def _all_finite(self) -> bool:
        """On every rank of the world. Infinities and NaN make a sum infinite or NaN."""
        sums = torch.stack([bucket.grad.sum() for bucket in self.all_buckets()])
        overflow = sums.isfinite().logical_not_().any().float()
        self.groups.world.all_reduce(overflow, op="max")
        return not overflow.item()

    def states(self) -> list[FlatState]:
        return super().states() + [state for codec in self._codecs.values() for state in codec.states()]

    def tensor_states(self) -> list[TensorState]:
        codecs = self._codecs.values()
        return super().tensor_states() + [state for codec in codecs for state in codec.tensor_states()]
