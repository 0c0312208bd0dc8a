"""The mean over replicas in 8-bit integers, with error feedback on both sides of the exchange."""

from dataclasses import dataclass, field

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.more.codec import Codec
from megalite.data_parallel.wire import Channel

BLOCK = 2048
"""Elements that share a scale."""

CHUNK = 128 * BLOCK
"""Elements that go through all passes before the next ones come, so that a CPU has them in its cache."""

LARGEST = 127

TINY = 1e-30
"""A block without a larger value is sent as zeros: the inverse of its scale could overflow."""


@dataclass
class Integers:
    """Turns `size` values into bytes and back.

    In a block of x, s = max|x|/127 and q = round(x/s), so that |x - s·q| <= s/2 and 0 stays 0. Bytes are all q, then all
    s in the type of the values.
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    _chunks: list[tuple[int, int, int]] = field(init=False)
    """(start, stop, elements of a block)."""
    _scratch: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        whole = self.size // BLOCK * BLOCK
        step = CHUNK if self.device.type == "cpu" else max(whole, 1)
        self._chunks = [(start, min(start + step, whole), BLOCK) for start in range(0, whole, step)]
        if whole < self.size:
            self._chunks.append((whole, self.size, self.size - whole))
        self._scratch = torch.empty(
            max(stop - start for start, stop, _ in self._chunks), dtype=self.dtype, device=self.device
        )

    @property
    def nbytes(self) -> int:
        """Of the bytes for all values."""
        return self.size + -(-self.size // BLOCK) * self.dtype.itemsize

    def encode(self, values: torch.Tensor, row: torch.Tensor, *, more: torch.Tensor | None = None) -> None:
        """`row` [nbytes], uint8, becomes the integers and scales of `values` [size], and `values` what they leave out.

        Args:
            more: is added to `values` before.
        """
        codes, scales = row[: self.size].view(torch.int8), row[self.size :].view(self.dtype)
        for start, stop, block in self._chunks:
            x = values[start:stop].view(-1, block)
            y = self._scratch[: stop - start].view(-1, block)
            if more is not None:
                x.add_(more[start:stop].view(-1, block))
            torch.abs(x, out=y)
            scale = y.amax(dim=1, keepdim=True).div_(LARGEST)
            # Not ">=": a NaN must stay one, so that the gradient's norm shows it.
            scale.masked_fill_(scale < TINY / LARGEST, 0.0)
            inverse = scale.reciprocal()
            inverse.masked_fill_(scale == 0.0, 0.0)
            torch.mul(x, inverse, out=y)
            codes[start:stop].view(-1, block).copy_(y.round_())
            x.sub_(y.mul_(scale))
            scales[start // BLOCK : -(-stop // BLOCK)].copy_(scale.view(-1))

    def decode(self, row: torch.Tensor, values: torch.Tensor, *, factor: float | None = None) -> None:
        """`values` [size] become what a row says; with a factor, that much of it is added to them."""
        codes, scales = row[: self.size].view(torch.int8), row[self.size :].view(self.dtype)
        if factor is not None:
            scales = scales * factor
        for start, stop, block in self._chunks:
            x = values[start:stop].view(-1, block)
            y = x if factor is None else self._scratch[: stop - start].view(-1, block)
            y.copy_(codes[start:stop].view(-1, block))
            y.mul_(scales[start // BLOCK : -(-stop // BLOCK)].view(-1, 1))
            if factor is not None:
                x.add_(y)


class Uint8(Codec):
    """Two-stage mean of 8-bit integers, after ByteGrad (arXiv 2107.01499) but with error feedback.

    The bucket is cut into one chunk a replica, which serves it. With C(x) what is left of x in 8 bits,

        x_i = values_i + e_i;  C(x_i) to the server of each chunk;  e_i = x_i - C(x_i)
        y = E + Σ_i C(x_i)/n, in the order of ranks;  C(y) to all;  E = y - C(y)

    Wire: 2·(n-1)/n bytes a value and a scale for every 2048 of them.
    """

    name = "uint8"

    def __init__(self, bucket: Bucket, channel: Channel) -> None:
        super().__init__(bucket, channel)
        like, n = bucket.grad, channel.size
        self._integers = Integers(like.numel() // n, like.dtype, like.device)
        self._rows = torch.empty(n, self._integers.nbytes, dtype=torch.uint8, device=like.device)
        self.wire_bytes = 2 * (self.channel.size - 1) * self._integers.nbytes

    def _mean(self, values: torch.Tensor) -> None:
        n, rank = self.channel.size, self.channel.rank
        for owed, part, row in zip(self.error.view(n, -1), values.view(n, -1), self._rows, strict=True):
            self._integers.encode(owed, row, more=part)
        for row in self.channel.exchange_raw(self._rows.view(-1)).view(n, -1):
            self._integers.decode(row, self.server_error, factor=1.0 / n)
        self._integers.encode(self.server_error, self._rows[rank])
        self.channel.gather_raw(self._rows.view(-1), self._rows[rank])
        for part, row in zip(values.view(n, -1), self._rows, strict=True):
            self._integers.decode(row, part)
