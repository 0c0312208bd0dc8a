"""The mean over replicas of their largest elements, with error feedback."""

import math

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.compression.codec import Codec
from megalite.data_parallel.compression.largest import largest
from megalite.data_parallel.states import FlatState, Placement
from megalite.data_parallel.wire import Channel

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

    def __init__(self, bucket: Bucket, channel: Channel, *, density: float) -> None:
        super().__init__(bucket, channel)
        like, n = bucket.grad, channel.size
        assert 0.0 < density <= 1.0 and like.numel() < 1 << 31, "places are 32-bit integers"
        self.count = max(1, math.ceil(density * bucket.placed[-1].stop))
        self.error = torch.zeros_like(like) if n > 1 else like.new_zeros(0)
        """What this rank still owes, element by element."""
        self._format = channel.wire_dtype or like.dtype
        self._split = self.count * INDEX.itemsize
        self._row = self._split + self.count * self._format.itemsize
        self._rows = torch.empty(n, self._row, dtype=torch.uint8, device=like.device)

    @property
    def wire_bytes(self) -> int:
        """That this rank sends for one mean."""
        return (self.channel.size - 1) * self._row

    @torch.no_grad()
    def mean(self, values: torch.Tensor) -> None:
        """In place: `values` [bucket size], of the gradient's type, become the mean of their largest, 0 elsewhere.

        Collectives: a gather of bytes over the replicas.
        """
        n = self.channel.size
        if n == 1:
            return
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

    def states(self) -> list[FlatState]:
        """The error; alone there is none."""
        if self.channel.size == 1:
            return []
        return [
            FlatState(
                name="topk_error",
                bucket=self.bucket,
                start=0,
                values=self.error,
                placement=Placement.PRIVATE,
                default="zeros",
            )
        ]
