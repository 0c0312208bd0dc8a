"""All-reduce gradients as they become ready, fused into large pieces."""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megalite.data_parallel.buckets import Bucket, awaited
from megalite.data_parallel.facts import ALIGNMENT
from megalite.data_parallel.shards import Norms
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.topology.group import Work, WorkList

Range = tuple[int, int]


class FusedAllReduce(DataParallelStrategy):
    """Keeps a queue of ready gradients with tensor fusion, as in Horovod (arXiv 1802.05799).

    A stage's parameters of one kind share one flat buffer, in the order of the backward. In the last backward, the queue
    records each parameter with a final gradient. As soon as neighbouring ready gradients make up
    `fusion_threshold_mb`, that slice of the buffer is all-reduced, without a copy. The rest is reduced when the backward
    ends.

    Horovod's ranks negotiate, every millisecond, which gradients are ready on all ranks. Here the fusion depends only on
    the order of gradients, which the program fixes. Each rank adds the slices that it reduces to a checksum that is sent
    with the norm; if the ranks of a group have different checksums, the step fails before any weight changes.

    Wire: 2·(d-1)/d of the gradient bytes per step and rank; d is the expert-dp size for experts."""

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        super().__init__(stages, **common)
        wire = self.options.wire_dtype or self.options.grad_dtype
        threshold = self.options.settings.fusion_threshold_mb * 1e6 / wire.itemsize
        self._queues = {
            bucket: ReadyQueue(bucket, threshold=threshold, align=ALIGNMENT * self.groups.replicas(bucket.kind).size)
            for bucket in self.all_buckets()
        }
        self._pieces: defaultdict[Bucket, list[Work]] = defaultdict(list)
        self._order: dict[bool, int] = {}
        """Checksums of the slices reduced in this step, for experts (True) and other parameters, which use other groups."""

    def zero_grad(self) -> None:
        for pieces in self._pieces.values():
            WorkList(pieces).wait()
        self._pieces.clear()
        self._order.clear()
        for queue in self._queues.values():
            queue.clear()
        super().zero_grad()

    def _start_when_full(self, bucket: Bucket, pending: Counter[torch.nn.Parameter] | None) -> None:
        for index, placed in enumerate(bucket.placed):
            placed.parameter.grad_ready = partial(self._on_ready, bucket, index)
        self._start_pieces(bucket, self._queues[bucket].start_counting(pending))

    def _on_ready(self, bucket: Bucket, index: int) -> None:
        self._start_pieces(bucket, self._queues[bucket].note(index))

    def _reduce(self, bucket: Bucket) -> Work:
        self._start_pieces(bucket, self._queues[bucket].rest())
        return WorkList(self._pieces.pop(bucket, []))

    def _start_pieces(self, bucket: Bucket, pieces: Iterable[Range]) -> None:
        name, expert = bucket.placed[0].parameter.info.spec.name, bucket.kind.expert
        for start, stop in pieces:
            self._pieces[bucket].append(self.channel(bucket).all_reduce_async(bucket.grad[start:stop]))
            self._order[expert] = zlib.crc32(f"{name} {start} {stop}".encode(), self._order.get(expert, 0))

    def norm_terms(self) -> torch.Tensor:
        """Return the norm's terms and a number that sums to 0 if the ranks of each group reduced the same slices in the
        same order: the first of d ranks adds (d-1) times its checksum, the others subtract theirs."""
        balance = 0
        for expert, checksum in self._order.items():
            group = self.groups.expert_dp if expert else self.groups.dp
            balance += checksum * (group.size - 1 if group.rank == 0 else -1)
        terms = super().norm_terms()
        return torch.cat([terms, terms.new_tensor([balance])])

    def norms(self, sums: Sequence[float]) -> Norms:
        """Return the norms. Raises RuntimeError, on every rank before any parameter changes: ranks reduced different
        slices."""
        *terms, balance = sums
        if balance != 0.0:
            raise RuntimeError(
                f"step {self.step}: gradients became ready in different orders on ranks with the same parameters, so "
                "the sum is not their gradient; use --dp-strategy all-reduce, and please report the model and the schedule"
            )
        return super().norms(terms)


class ReadyQueue:
    """The gradients of one bucket that are final and not yet in flight, as separate ranges. `threshold`: least number of
    elements of a returned range. `align`: returned ranges start and end at multiples of it; other ready elements stay in
    the queue. Neither applies to `rest`."""

    def __init__(self, bucket: Bucket, *, threshold: float, align: int) -> None:
        self._threshold, self._align = max(threshold, 1.0), align
        self._size = bucket.grad.numel()
        self._parameters = [placed.parameter for placed in bucket.placed]
        self._ranges = [(placed.start, placed.stop) for placed in bucket.placed]
        self._ranges[-1] = (self._ranges[-1][0], self._size)  # includes the padding
        self.clear()

    def clear(self) -> None:
        self._awaited = [0] * len(self._parameters)
        self._ready: list[Range] = []
        self._started: list[Range] = []

    def start_counting(self, pending: Counter[torch.nn.Parameter] | None) -> list[Range]:
        """Start to count gradients, like `Bucket.start_counting`; return the ranges to reduce now."""
        self._awaited = [awaited(parameter, pending) for parameter in self._parameters]
        final = [index for index, count in enumerate(self._awaited) if count == 0]
        return [piece for index in final for piece in self._add(index)]

    def note(self, index: int) -> list[Range]:
        """Count a contribution to parameter `index`; return the ranges to reduce now."""
        if self._awaited[index] == 0:
            return []
        self._awaited[index] -= 1
        return self._add(index) if self._awaited[index] == 0 else []

    def _add(self, index: int) -> list[Range]:
        start, stop = self._ranges[index]
        for piece in [piece for piece in self._ready if stop == piece[0] or piece[1] == start]:
            self._ready.remove(piece)
            start, stop = min(start, piece[0]), max(stop, piece[1])
        first = -(-start // self._align) * self._align
        last = stop // self._align * self._align
        if last - first < self._threshold:
            self._ready.append((start, stop))
            return []
        self._ready += [(a, b) for a, b in ((start, first), (last, stop)) if a < b]
        self._started.append((first, last))
        return [(first, last)]

    def rest(self) -> list[Range]:
        """Return all ranges that have not been returned yet; later calls return none."""
        ends = [0, *(end for piece in sorted(self._started) for end in piece), self._size]
        left = [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]
        self._started = [(0, self._size)]
        self._awaited = [0] * len(self._parameters)
        return left
