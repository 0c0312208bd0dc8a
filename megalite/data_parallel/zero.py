"""Shard optimizer states over data-parallel ranks (ZeRO-1, distributed optimizer), and gradients too (ZeRO-2)."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch

from megalite.data_parallel.buckets import Bucket, ParameterWaits, alloc_storage, awaited, free_storage, has_memory
from megalite.data_parallel.facts import Placement
from megalite.data_parallel.shards import PIECE, OptimizerShard, StrategyGroups, StrategyOptions
from megalite.data_parallel.strategy import DataParallelStrategy, FlatState
from megalite.data_parallel.wire import Channel
from megalite.kernels.quantization import E4M3, cast
from megalite.topology.group import DONE, Work


class GradientShards:
    """Stores only this rank's range of gradients. A whole bucket's gradient has memory only while it is filled by one
    microbatch and reduce-scattered.

    The buffer gets memory when a layer requests it, and is freed after its reduce-scatter. A bucket is sent when each of
    its parameters has reported as many gradients as one microbatch gives. If the program splits the backward, these may
    belong to several microbatches, which does not change the sum.

    `overlap`: buckets may be in flight while the backward fills others. They are sent in order. The elements in flight
    are at most 5/4 of the largest bucket, so that the small buckets of a layer need not wait for its large one.
    `completed`: called with a bucket, once or twice, when its total contains all gradients."""

    def __init__(self, *, overlap: bool, completed: Callable[[Bucket], None]) -> None:
        self._overlap, self._completed = overlap, completed
        self._own: dict[Bucket, tuple[torch.Tensor, Channel]] = {}
        """Owned range of each bucket, summed over ranks and the microbatches so far, and the bucket's channel."""
        self._started: set[Bucket] = set()  # buckets with gradients in their total
        self._sending: dict[Bucket, tuple[torch.Tensor, Work]] = {}
        """Buckets in flight, in order; the received part is added to the total, unless it is the total."""
        self._last: set[Bucket] = set()  # the next send of these buckets is their last
        self._final: set[Bucket] = set()
        """Buckets with all gradients in flight or in the total."""
        self._room = 0  # most elements in flight

    def add(self, bucket: Bucket, total: torch.Tensor, channel: Channel) -> None:
        """Add a bucket; its gradients accumulate in `total`, this rank's range."""
        self._own[bucket] = total, channel
        self._room = max(self._room, bucket.grad.numel() * 5 // 4)
        free_storage(bucket.grad)
        bucket.take_at_once()
        for placed in bucket.placed:
            placed.parameter.before_accumulation = lambda: self._allocate(bucket)
        self._await(bucket)

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket in self._own

    def total(self, bucket: Bucket) -> torch.Tensor:
        return self._own[bucket][0]

    def reset(self) -> None:
        """Discard all gradients, also of a step that failed half way."""
        self._last.clear()
        self._final.clear()
        self.collect()
        self._started.clear()
        for bucket, (total, _) in self._own.items():
            free_storage(bucket.grad)
            total.zero_()
            self._await(bucket)

    def expect_last(self, bucket: Bucket) -> None:
        """Declare that the next gradients of this bucket are the last of the step."""
        self._last.add(bucket)

    def complete(self, bucket: Bucket) -> None:
        """Send the gradients that have arrived since the last send; called when all of the bucket's have arrived."""
        self._final.add(bucket)
        if bucket not in self._sending:
            if has_memory(bucket.grad):
                self._send(bucket)
            else:
                self._completed(bucket)

    def finish(self) -> None:
        for bucket in self._own:
            self.complete(bucket)
        self.collect()

    def collect(self) -> None:
        while self._sending:
            self._finish_first()

    def _await(self, bucket: Bucket) -> None:
        bucket.start_counting(lambda: self._send(bucket))

    def _allocate(self, bucket: Bucket) -> None:
        while bucket in self._sending:
            self._finish_first()
        if not has_memory(bucket.grad):
            alloc_storage(bucket.grad)
            bucket.grad.zero_()

    def _send(self, bucket: Bucket) -> None:
        self._await(bucket)
        while self._sending and sum(other.grad.numel() for other in (bucket, *self._sending)) > self._room:
            self._finish_first()
        total, channel = self._own[bucket]
        part = torch.empty_like(total) if bucket in self._started else total
        self._started.add(bucket)
        if bucket in self._last:
            self._final.add(bucket)
        self._sending[bucket] = part, channel.reduce_scatter_async(part, bucket.grad)
        if not self._overlap:
            self._finish_first()

    def _finish_first(self) -> None:
        bucket = next(iter(self._sending))
        part, work = self._sending.pop(bucket)
        work.wait()
        total, _ = self._own[bucket]
        if part is not total:
            total.add_(part)
        free_storage(bucket.grad)
        if bucket in self._final:
            self._completed(bucket)


class DistributedOptimizer(DataParallelStrategy):
    """Reduce-scatters gradients, steps the owned part and gathers the parameters again (arXiv 1910.02054).

    The gather overlaps with the next forward: each module waits for its buckets just before it computes.
    Wire: (d-1)/d of the gradient bytes plus (d-1)/d of the parameter bytes per step and rank. Optimizer state and main
    parameters take 1/d of the memory. For experts d is the expert-dp size.

    With `shard_gradients` (ZeRO-2) gradients take 1/d of the memory too, except for buckets that are being filled or
    sent. They are sent for each of m microbatches: m·(d-1)/d of their bytes.

    With n instances (`dp_instances`) d is the number of ranks in one. Gradients are reduce-scattered inside an instance
    and then all-reduced between instances: 2·(n-1)/n of 1/d of the gradient bytes per step and rank. Parameters are
    gathered inside an instance. Source: Megatron-LM's num_distributed_optimizer_instances; hybrid sharding of arXiv
    2304.11277.

    Buckets gathered in fp8 contain rounded weights until exact ones are requested; each rank keeps its part exact."""

    shards_over_dp = True
    always_shards_gradients = False

    def __init__(
        self, stages: Mapping[int, torch.nn.Module], *, groups: StrategyGroups, options: StrategyOptions
    ) -> None:
        # Before the shards are made.
        shards = self.always_shards_gradients or options.settings.shard_gradients
        self._sharded = GradientShards(overlap=options.overlap, completed=self._completed) if shards else None
        self._own: dict[Bucket, torch.Tensor] = {}
        """This rank's exact part of the weights, for buckets that may be freed or rounded."""
        self._scales: Mapping[Bucket, Mapping[int, torch.Tensor]] | None = None
        """Scales of the last fp8 gather; None: the weights have changed since, or the buckets are exact."""
        super().__init__(stages, groups=groups, options=options)
        self._watch(stages, overlap=options.overlap_param_gather and self.has_replicas)

    def _watch(self, stages: Mapping[int, torch.nn.Module], *, overlap: bool) -> None:
        self._arrivals = ParameterWaits(stages, self.all_buckets(), overlap=overlap)

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        group = self.groups.replicas(bucket.kind)
        size = bucket.data.numel() // group.size
        return group.rank * size, (group.rank + 1) * size

    def _make_shard(self, bucket: Bucket) -> OptimizerShard:
        shard, channel = super()._make_shard(bucket), self.channel(bucket)
        if self._sharded is not None and channel.size > 1:
            shard.main_param.grad = total = bucket.grad.new_zeros(shard.stop - shard.start)
            self._sharded.add(bucket, total, channel)
        if channel.size > 1 and self._keeps_own(bucket):
            own = bucket.data[shard.start : shard.stop].clone()
            if not shard.is_copy:
                shard.main_param.data = own
            self._own[bucket] = own
        return shard

    def _keeps_own(self, bucket: Bucket) -> bool:
        return bucket.kind.fp8

    def _weights(self, shard: OptimizerShard) -> torch.Tensor:
        own = self._own.get(shard.bucket)
        return super()._weights(shard) if own is None else own

    def weights(self, shard: OptimizerShard) -> FlatState:
        if shard.bucket not in self._own:
            return super().weights(shard)
        return FlatState("weight", shard.bucket, self._own[shard.bucket], Placement.SHARDED, shard.start)

    def zero_grad(self) -> None:
        if self._sharded is None:
            super().zero_grad()
            return
        self._finish_reductions()
        self._sharded.reset()
        for bucket in self.all_buckets():
            if bucket not in self._sharded:
                bucket.stop_counting()
                bucket.grad.zero_()

    def _start_when_full(self, bucket: Bucket, pending: Counter[torch.nn.Parameter] | None) -> None:
        if self._sharded is None or bucket not in self._sharded:
            super()._start_when_full(bucket, pending)
        elif any(awaited(placed.parameter, pending) for placed in bucket.placed):
            self._sharded.expect_last(bucket)

    def _completed(self, bucket: Bucket) -> None:
        """Start the remaining reduction: for sharded gradients, the sum over instances."""
        if not bucket.kind.in_parts:
            self._start(bucket)

    def start_grad_sync(self, stage: int) -> None:
        for bucket in self.buckets[stage]:
            if self._sharded is not None and bucket in self._sharded:
                self._sharded.complete(bucket)
            else:
                self._completed(bucket)

    def finish_grad_sync(self) -> None:
        """Wait for the sums. Sharded gradients with `in_parts` are summed over tp or tied copies last: equal buckets are
        sharded equally, so the owned ranges correspond."""
        if self._sharded is None:
            super().finish_grad_sync()
            return
        self._sharded.finish()
        for shard in self.shards:
            self._add_parts(shard.bucket.kind, shard.grad)
            self._start(shard.bucket)
        self._finish_reductions()

    def _reduce(self, bucket: Bucket) -> Work:
        if self._sharded is not None and bucket in self._sharded:
            own, work = self._sharded.total(bucket), DONE
        else:
            start, stop = self.owned_range(bucket)
            own = bucket.grad[start:stop]
            work = self.channel(bucket).reduce_scatter_async(own, bucket.grad)
        return self._channel(self.groups.instances(bucket.kind)).all_reduce_after(work, own)

    def publish_parameters(self) -> None:
        super().publish_parameters()
        self._scales = None
        for bucket in self._arrivals.first_needed_first:
            self._arrivals.expect(bucket, self._gather(bucket))
        self._arrivals.wait_unless_overlapped()

    def _gather(self, bucket: Bucket, *, exact: bool = False) -> Work:
        """Start to gather the whole bucket from the ranks' parts; `exact`: not in fp8."""
        start, stop = self.owned_range(bucket)
        own = self._own.get(bucket, bucket.data[start:stop])
        channel, gather = self._gathers(bucket), functools.partial(self._start_gather, bucket)
        if exact or not bucket.kind.fp8:
            return gather(bucket.data, own)
        if self._scales is None:
            self._scales = fp8_scales(
                self._own, rank=channel.group.rank, largest_of_all=functools.partial(self._largest_of_all, bucket)
            )
        return Fp8Gather(bucket, self._scales[bucket], own, start, gather)

    def _start_gather(self, bucket: Bucket, whole: torch.Tensor, own: torch.Tensor) -> Work:
        channel = self._gathers(bucket)
        if self._in_background(bucket):
            return channel.in_background(lambda: channel.gather_raw(whole, own))
        return channel.gather_raw_async(whole, own)

    def _largest_of_all(self, bucket: Bucket, numbers: torch.Tensor) -> None:
        channel = self._gathers(bucket)
        if self._in_background(bucket):
            channel.in_background(lambda: channel.group.all_reduce(numbers, op="max")).wait()
        else:
            channel.group.all_reduce(numbers, op="max")

    def _gathers(self, bucket: Bucket) -> Channel:
        return self.channel(bucket)

    def _in_background(self, bucket: Bucket) -> bool:
        return False

    def wait_for_parameters(self) -> None:
        self.wait_until_idle()
        if self._scales is not None:
            self._gather_exactly()

    def _gather_exactly(self) -> None:
        for bucket in self._own:
            self._gather(bucket, exact=True).wait()
        self._scales = None

    def wait_until_idle(self) -> None:
        self._arrivals.wait()

    def consensus(self) -> contextlib.AbstractContextManager[None]:
        self.wait_until_idle()
        return self.main_in_memory()

    def after_load(self) -> None:
        super().after_load()
        self._gather_exactly()

    def gather(self, shard: OptimizerShard, values: torch.Tensor) -> torch.Tensor:
        whole = values.new_empty(shard.bucket.data.numel())
        self.groups.replicas(shard.bucket.kind).all_gather(whole, values.contiguous())
        return whole


def fp8_scales(
    own: Mapping[Bucket, torch.Tensor], *, rank: int, largest_of_all: Callable[[torch.Tensor], None]
) -> dict[Bucket, dict[int, torch.Tensor]]:
    """Return, for each bucket gathered in fp8: start of a tensor in it -> inverse of the tensor's scale, fp32 [].
    `own`: the parts of buckets on rank `rank`. `largest_of_all`: replaces numbers by their maxima over ranks."""
    buckets = [bucket for bucket in own if bucket.kind.fp8]
    places = [(bucket, placed.start) for bucket in buckets for placed in bucket.placed]
    largest = torch.zeros(len(places), dtype=torch.float32, device=own[buckets[0]].device)
    numbers = dict(zip(places, largest, strict=True))
    for bucket in buckets:
        start = rank * own[bucket].numel()
        for placed, first, last in bucket.within(start, start + own[bucket].numel()):
            part = own[bucket][first - start : last - start]
            numbers[bucket, placed.start].copy_(torch.linalg.vector_norm(part, torch.inf, dtype=torch.float32))
    largest_of_all(largest)
    found: dict[Bucket, dict[int, torch.Tensor]] = {bucket: {} for bucket in buckets}
    for (bucket, start), number in numbers.items():
        # The same rule as in the fp8 matmul, which rounds the weights again, to the same values.
        found[bucket][start] = cast(number, number, E4M3).undo
    return found


class Fp8Gather:
    """A gather of a bucket in fp8 (e4m3) without extra memory: the bytes arrive in the second half of the bucket and are
    converted to bf16 from its start on, so that writes never reach bytes that are still to be read.

    `undo`: see `fp8_scales`. `own`: this rank's weights, from element `start` of the bucket on, in separate memory.
    `gather`: starts to gather all ranks' parts into a tensor."""

    def __init__(
        self,
        bucket: Bucket,
        undo: Mapping[int, torch.Tensor],
        own: torch.Tensor,
        start: int,
        gather: Callable[[torch.Tensor, torch.Tensor], Work],
    ) -> None:
        self._bucket, self._undo = bucket, undo
        self._whole = bucket.data.view(torch.uint8)[bucket.data.numel() :]
        self._work = gather(self._whole, self._round(own, start))

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        for placed, first, last in self._bucket.within(start, stop):
            undo = self._undo[placed.start]
            yield from ((undo, piece, min(piece + PIECE, last)) for piece in range(first, last, PIECE))

    def _round(self, own: torch.Tensor, start: int) -> torch.Tensor:
        """Write this rank's bytes into the buffer and return that part of it."""
        place = self._whole[start : start + own.numel()]
        place.zero_()  # padding
        for undo, first, last in self._pieces(start, start + own.numel()):
            scaled = own[first - start : last - start] * undo.reciprocal().to(own.dtype)
            place[first - start : last - start] = scaled.to(E4M3).view(torch.uint8)
        return place

    def wait(self) -> None:
        """Wait for all bytes and convert them to the bucket's weights."""
        self._work.wait()
        data = self._bucket.data
        for undo, first, last in self._pieces(0, data.numel()):
            data[first:last] = self._whole[first:last].view(E4M3).to(data.dtype) * undo.to(data.dtype)
        data[self._bucket.placed[-1].stop :] = 0.0
