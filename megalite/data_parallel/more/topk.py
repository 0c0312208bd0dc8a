"""The largest elements of a tensor, without sorting it."""

import math

import numpy as np
import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.more.codec import Codec
from megalite.data_parallel.wire import Channel

STRIDE = 61
"""Every so many'th element is looked at first. Odd, so that it passes through all columns of the usual matrices."""

SMALL = 1 << 14
"""Elements of a tensor that is not worth a sample."""


def largest(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` largest of `magnitudes` [n], none of them negative: int64 [count], ascending.

    Of equal ones the first count as larger; NaN counts as largest. The result does not depend on how it is found: a
    threshold from a sample leaves few candidates, and where it leaves too few, all are.
    """
    places = _candidates(magnitudes, count)
    among = magnitudes if places is None else magnitudes[places]
    # kthvalue counts from the smallest.
    last = torch.kthvalue(among, among.numel() - count + 1).values
    if last.isnan():
        chosen = among.isnan()
    else:
        chosen = torch.le(among, last).logical_not_()  # larger, or NaN: fewer than `count`
        equal = torch.eq(among, last).nonzero().view(-1)
        chosen[equal[: count - int(chosen.sum())]] = True
    indices = chosen.nonzero().view(-1)[:count]
    return indices if places is None else places[indices]


def _candidates(magnitudes: torch.Tensor, count: int) -> torch.Tensor | None:
    """Places that hold the `count` largest, ascending; None: it may be any."""
    size = magnitudes.numel()
    if size < SMALL:
        return None
    sample = magnitudes[::STRIDE]
    expected = count * sample.numel() / size
    rank = math.ceil(1.1 * expected + 4 * math.sqrt(expected) + 4)
    if rank >= sample.numel():
        return None
    threshold = torch.topk(sample, rank).values[-1]
    places = _at_least(magnitudes, threshold)
    return places if places.numel() >= count else None


def _at_least(magnitudes: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """The places of what is not smaller than the threshold; NaN is not."""
    if magnitudes.device.type != "cpu":
        return torch.lt(magnitudes, threshold).logical_not_().nonzero().view(-1)
    # numpy compares and finds four times as fast as torch.
    return torch.from_numpy(np.flatnonzero(~np.less(magnitudes.numpy(), threshold.item())))


INDEX = torch.int32


class TopK(Codec):
    """Each replica sends the k largest elements of what it owes and their places, all to all; the rest waits.

        x_i = values_i + e_i;  out = Σ_i top_k(x_i)/n, in the order of ranks;  e_i = x_i - top_k(x_i)

    They are the largest of the whole bucket, not of each tensor: a tensor of small gradients waits until its errors have
    grown. Elements have the wire format, else the type of the values; what rounding leaves out stays in the error.

    Wire: 8·k·(n-1) bytes, 6·k·(n-1) with bf16. Above a density of 1/n the whole gradient takes less.

    Args:
        density: k is this share of the bucket's elements, at least 1.
    """

    name = "topk"

    def __init__(self, bucket: Bucket, channel: Channel, *, density: float) -> None:
        super().__init__(bucket, channel)
        like, n = bucket.grad, channel.size
        assert 0.0 < density <= 1.0 and like.numel() < 1 << 31, "places are 32-bit integers"
        self.count = max(1, math.ceil(density * bucket.placed[-1].stop))
        self._format = channel.wire_dtype or like.dtype
        self._split = self.count * INDEX.itemsize
        self._row = self._split + self.count * self._format.itemsize
        self._rows = torch.empty(n, self._row, dtype=torch.uint8, device=like.device)
        self.wire_bytes = (self.channel.size - 1) * self._row

    def _mean(self, values: torch.Tensor) -> None:
        n = self.channel.size
        self.error.add_(values)
        places = largest(torch.abs(self.error, out=values), self.count)
        owed = self.error[places]
        sent = owed.to(self._format)
        self.error[places] = owed - sent
        row = torch.cat([places.to(INDEX).view(torch.uint8), sent.view(torch.uint8)])
        self.channel.gather_raw(self._rows.view(-1), row)
        values.zero_()
        for row in self._rows:
            # Copies, as rows need not start where numbers may.
            where = row[: self._split].clone().view(INDEX)
            parts = row[self._split :].clone().view(self._format).to(values.dtype)
            # No place occurs twice in a row, so that the order of additions is that of rows on every device.
            values.index_add_(0, where, parts.div_(n))
