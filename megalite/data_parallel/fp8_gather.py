"""Weights that multiply in fp8 are gathered in it: half the bytes, and the bits that the product would make of them."""

from collections.abc import Callable, Iterator, Mapping

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.shards import PIECE
from megalite.kernels.fp8 import E4M3, cast
from megalite.topology.group import Work


def fp8_scales(
    own: Mapping[Bucket, torch.Tensor], *, rank: int, largest_of_all: Callable[[torch.Tensor], None]
) -> dict[Bucket, dict[int, torch.Tensor]]:
    """Of each bucket that is gathered in fp8: start of a tensor in it -> what undoes the tensor's scale, fp32 [].
    `own`: the part of each bucket that rank `rank` has. `largest_of_all`: numbers become the largest of all ranks'
    numbers."""
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
        # The product's own rule: it rounds the weights once more, to the same values.
        found[bucket][start] = cast(number, number, E4M3).undo
    return found


class Fp8Gather:
    """A bucket on its way in fp8 (e4m3), which takes no more memory: the bytes come into the second half of the bucket,
    and become bf16 from its start on, where what is written never reaches what is still to be read.

    `undo`: see `fp8_scales`. `own`: this rank's weights, from element `start` of the bucket on; in other memory.
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
        """This rank's bytes, in their place."""
        place = self._whole[start : start + own.numel()]
        place.zero_()  # padding
        for undo, first, last in self._pieces(start, start + own.numel()):
            scaled = own[first - start : last - start] * undo.reciprocal().to(own.dtype)
            place[first - start : last - start] = scaled.to(E4M3).view(torch.uint8)
        return place

    def wait(self) -> None:
        """Once all bytes are there make them the bucket's weights."""
        self._work.wait()
        data = self._bucket.data
        for undo, first, last in self._pieces(0, data.numel()):
            data[first:last] = self._whole[first:last].view(E4M3).to(data.dtype) * undo.to(data.dtype)
        data[self._bucket.placed[-1].stop :] = 0.0
