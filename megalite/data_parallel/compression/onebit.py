"""The mean over replicas by signs, with error feedback on both sides of the exchange."""

import math

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.compression.codec import Codec
from megalite.data_parallel.compression.signs import Signs
from megalite.data_parallel.states import FlatState, Placement
from megalite.data_parallel.wire import Channel


class OneBit(Codec):
    """Two-stage mean of signs, as in 1-bit Adam (arXiv 2102.02888), in 2 collectives instead of 4.

    The bucket is cut into one chunk a replica, which serves it. With sgn(0) = 1 and s the root mean square of a piece,

        x_i = values_i + e_i;  s_i, sgn(x_i) to the server of each chunk;  e_i = x_i - s_i·sgn(x_i)
        y = E + Σ_i s_i/n·sgn(x_i), in the order of ranks;  s, sgn(y) to all;  E = y - s·sgn(y)

    Sizes travel behind the signs they belong to. A piece is what of one tensor is in one chunk, so that neither large
    neighbours nor padding set a tensor's size; or, as in the paper, all of a chunk that is not padding.

    Wire: 2·(n-1)/n bits a value, 0.25·(n-1)/n bytes, and 2·(n-1) times the sizes of the chunk with the most pieces.

    Args:
        scale: `tensor`: one size for each tensor in a chunk; `bucket`: one for the chunk.
    """

    def __init__(self, bucket: Bucket, channel: Channel, *, scale: str = "tensor") -> None:
        super().__init__(bucket, channel)
        assert scale in ("tensor", "bucket")
        like = bucket.grad
        n, size = channel.size, like.numel()
        assert size % (64 * n) == 0, "chunks are whole bytes of signs, and sizes lie behind them aligned"
        self._used = bucket.placed[-1].stop
        self._chunk = chunk = size // n
        ends = [placed.stop for placed in bucket.placed] if scale == "tensor" else [self._used]
        self._pieces = [_pieces(ends, rank * chunk, (rank + 1) * chunk) for rank in range(n)]
        self._roots = [
            torch.tensor([math.sqrt(b - a) for a, b in pieces], dtype=like.dtype, device=like.device)
            for pieces in self._pieces
        ]
        self._row = chunk // 8 + max(len(pieces) for pieces in self._pieces) * like.element_size()
        held = size if n > 1 else 0
        self.error = torch.zeros(held, dtype=like.dtype, device=like.device)
        """What this rank still owes, element by element."""
        self.server_error = torch.zeros(held // n, dtype=like.dtype, device=like.device)
        """What is still owed of this rank's chunk by its server."""
        self._signs = Signs(chunk, like.dtype, like.device)
        self._unpacked = torch.empty_like(self.server_error)
        # Bytes that nobody looks at (of padding, and sizes that a chunk does not have) are sent all the same.
        self._sent = torch.zeros(n, self._row, dtype=torch.uint8, device=like.device)

    @property
    def wire_bytes(self) -> int:
        """That this rank sends for one mean."""
        return 2 * (self.channel.size - 1) * self._row

    @torch.no_grad()
    def mean(self, values: torch.Tensor) -> None:
        """In place: `values` [bucket size], of the gradient's type, become the mean of signs; 0 where there is padding.

        Collectives: an exchange and a gather of bytes over the replicas.
        """
        n, rank, chunk = self.channel.size, self.channel.rank, self._chunk
        if n == 1:
            return
        values.add_(self.error)
        for server in range(n):
            part = slice(server * chunk, (server + 1) * chunk)
            self._encode(server, values[part], self.error[part], self._sent[server])
        received = self.channel.exchange_raw(self._sent.view(-1)).view(n, -1)
        total = values[rank * chunk : (rank + 1) * chunk].copy_(self.server_error)
        for row in received:
            self._signs.unpack(row[: chunk // 8], self._unpacked)
            for (start, stop), size in zip(self._pieces[rank], self._sizes(row) / n, strict=False):
                total[start:stop].addcmul_(self._unpacked[start:stop], size)
        answer = self._sent[rank]
        self._encode(rank, total, self.server_error, answer)
        answers = torch.empty_like(self._sent)
        self.channel.gather_raw(answers.view(-1), answer)
        for server, row in enumerate(answers):
            self._decode(server, row, values[server * chunk : (server + 1) * chunk])
        values[self._used :].zero_()

    def _sizes(self, row: torch.Tensor) -> torch.Tensor:
        """The sizes behind a chunk's signs, as a view."""
        return row[self._chunk // 8 :].view(self.error.dtype)

    def _encode(self, server: int, values: torch.Tensor, error: torch.Tensor, row: torch.Tensor) -> None:
        """`row` becomes signs and sizes of a chunk, `error` what they leave out of `values`."""
        bits, sizes, pieces = row[: self._chunk // 8], self._sizes(row), self._pieces[server]
        if not pieces:
            return
        torch.stack([torch.linalg.vector_norm(values[a:b]) for a, b in pieces], out=sizes[: len(pieces)])
        sizes[: len(pieces)].div_(self._roots[server])
        self._signs.pack(values, bits)
        # The very signs that are sent, unpacked again: what is owed is then exact whatever becomes of -0.0.
        self._signs.unpack(bits, self._unpacked)
        for (a, b), size in zip(pieces, sizes, strict=False):
            torch.addcmul(values[a:b], self._unpacked[a:b], size, value=-1, out=error[a:b])

    def _decode(self, server: int, row: torch.Tensor, values: torch.Tensor) -> None:
        self._signs.unpack(row[: self._chunk // 8], values)
        for (a, b), size in zip(self._pieces[server], self._sizes(row), strict=False):
            values[a:b].mul_(size)

    def forget(self) -> None:
        """Owe nothing any more: values in another unit come next."""
        self.error.zero_()
        self.server_error.zero_()

    def states(self) -> list[FlatState]:
        """Both errors; alone there are none."""
        if self.channel.size == 1:
            return []
        start = self.channel.rank * self._chunk
        return [
            FlatState(
                name="onebit_error",
                bucket=self.bucket,
                start=0,
                values=self.error,
                placement=Placement.PRIVATE,
                default="zeros",
            ),
            FlatState(
                name="onebit_server_error",
                bucket=self.bucket,
                start=start,
                values=self.server_error,
                placement=Placement.SHARDED,
                default="zeros",
            ),
        ]


def _pieces(ends: list[int], first: int, last: int) -> list[tuple[int, int]]:
    """What of [0, ends[0]), [ends[0], ends[1]), ... lies in [first, last), counted from `first`."""
    starts = [0, *ends[:-1]]
    cut = [(max(start, first), min(stop, last)) for start, stop in zip(starts, ends, strict=True)]
    return [(start - first, stop - first) for start, stop in cut if start < stop]
