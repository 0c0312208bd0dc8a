"""Compress tensors to signs: a byte has 8 of them, the first in its highest bit; a set bit means a value >= 0."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.codec import Codec
from megalite.data_parallel.wire import Channel


class Signs:
    """Packs signs into bytes and unpacks them, at most `size` (a multiple of 8) at a time.

    The CPU version uses numpy: its comparison, packing and table lookup are several times as fast as torch's.

    `dtype`: of the values."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        assert size % 8 == 0
        self._on_cpu = device.type == "cpu"
        self._weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=device)
        every_byte = torch.arange(256, dtype=torch.uint8, device=device).view(-1, 1)
        self._table = ((every_byte & self._weights) > 0).to(dtype) * 2 - 1
        """[256, 8]: the signs ±1 of each byte."""
        self._flags = torch.empty(size, dtype=torch.bool, device=device)
        # Bytes in numpy's index type, to avoid a conversion in every lookup.
        self._places = np.empty(size // 8 if self._on_cpu else 0, dtype=np.intp)

    def pack(self, values: torch.Tensor, packed: torch.Tensor) -> None:
        """Write the signs of `values` [n] to `packed` [n/8], uint8; both zeros count as positive, NaN as negative."""
        flags = self._flags[: values.numel()]
        if self._on_cpu:
            np.greater_equal(values.numpy(), 0, out=flags.numpy())
            packed.numpy()[:] = np.packbits(flags.numpy())
            return
        torch.ge(values, 0, out=flags)
        torch.sum(flags.view(-1, 8) * self._weights, dim=1, dtype=torch.uint8, out=packed)

    def unpack(self, packed: torch.Tensor, signs: torch.Tensor) -> None:
        """Write ±1 for the bits of `packed` [n/8] to `signs` [n], of `dtype`."""
        if self._on_cpu:
            # Treat rows as single items: numpy copies items of 32 bytes without a call for each.
            row = np.dtype((np.void, 8 * signs.element_size()))
            table, target = self._table.numpy().view(row).reshape(-1), signs.numpy().view(row)
            places = self._places[: packed.numel()]
            np.copyto(places, packed.numpy())
            np.take(table, places, out=target, mode="clip")
            return
        torch.index_select(self._table, 0, packed.long(), out=signs.view(-1, 8))


WINDOWS = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Values that are coded at a time: on a CPU they fit into its cache together with their signs."""


@dataclass(frozen=True)
class Window:
    """Neighbouring values of a chunk, from one piece or several consecutive pieces."""

    start: int  # from the start of the chunk; like `stop` a multiple of 8
    used: int  # one past the last value that is not padding
    stop: int
    first: int  # index of the first value's piece
    lengths: torch.Tensor  # number of values of each piece in the window, int64 [pieces]

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the window of a tensor like the chunk, without padding."""
        return values[self.start : self.used]

    def bits(self, row: torch.Tensor) -> torch.Tensor:
        """Return the window's part of the chunk's signs."""
        return row[self.start // 8 : self.stop // 8]

    def squares(self, values: torch.Tensor) -> torch.Tensor:
        """Return Σx² of each piece's `values`, fp64 [pieces]: so exact that the order of addition cannot change fp32."""
        exact = values.double()
        if len(self.lengths) == 1:
            return torch.dot(exact, exact).view(1)
        return torch.segment_reduce(exact * exact, "sum", lengths=self.lengths, unsafe=True)

    def spread(self, sizes: torch.Tensor) -> torch.Tensor:
        """Return the element of the chunk's `sizes` for each value; [] if all have the same."""
        if len(self.lengths) == 1:
            return sizes[self.first]
        own = sizes[self.first : self.first + len(self.lengths)]
        return torch.repeat_interleave(own, self.lengths, output_size=self.used - self.start)


LARGE = 1 << 12
"""Least number of values of a piece that gets separate windows: there the size is one scalar for all values."""


@dataclass(frozen=True)
class Chunk:
    """The part of a bucket that one replica serves: its pieces, and the windows in which it is coded."""

    windows: list[Window]
    parts: torch.Tensor  # number of windows of each piece, int64 [pieces]
    lengths: torch.Tensor  # values of each piece, fp64 [pieces]

    @classmethod
    def of(cls, ends: list[int], first: int, last: int, device: torch.device) -> "Chunk":
        """Cut the pieces [0, ends[0]), [ends[0], ends[1]), ... to [first, last), with offsets from `first`."""
        cut = [(max(a, first) - first, min(b, last) - first) for a, b in itertools.pairwise([0, *ends])]
        pieces = [(a, b) for a, b in cut if a < b]
        width = WINDOWS["cpu" if device.type == "cpu" else "cuda"]
        windows, parts = [], [0] * len(pieces)
        for start, stop in _spans(pieces, last - first, width):
            inside = [(index, min(b, stop) - max(a, start)) for index, (a, b) in enumerate(pieces)]
            inside = [(index, length) for index, length in inside if length > 0]
            if not inside:
                break  # only padding follows
            for index, _ in inside:
                parts[index] += 1
            lengths = torch.tensor([length for _, length in inside], device=device)
            used = min(stop, pieces[inside[-1][0]][1])
            windows.append(Window(start, used, stop, inside[0][0], lengths))
        sizes = torch.tensor([b - a for a, b in pieces], dtype=torch.float64, device=device)
        return cls(windows, torch.tensor(parts, dtype=torch.int64, device=device), sizes)

    def sizes(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the root mean square of each piece, fp64 [pieces], from the concatenated `squares` of the windows."""
        if len(squares) != len(self.parts):
            squares = torch.segment_reduce(squares, "sum", lengths=self.parts, unsafe=True)
        return (squares / self.lengths).sqrt_()


def _spans(pieces: list[tuple[int, int]], size: int, width: int) -> list[tuple[int, int]]:
    """Cut [0, size) into steps of at most `width`, and at the borders of large pieces that are on a byte boundary."""
    borders = {border for piece in pieces if piece[1] - piece[0] >= LARGE for border in piece if border % 8 == 0}
    return [
        (start, min(start + width, last))
        for first, last in itertools.pairwise(sorted({0, size} | borders))
        for start in range(first, last, width)
    ]


class OneBit(Codec):
    """Computes a two-stage mean of signs, as in 1-bit Adam (arXiv 2102.02888), in 2 collectives instead of 4.

    The bucket is cut into one chunk per replica, which serves it. With sgn(0) = 1 and s the root mean square of a piece,

        x_i = values_i + e_i;  s_i, sgn(x_i) to the server of each chunk;  e_i = x_i - s_i·sgn(x_i)
        y = E + Σ_i s_i/n·sgn(x_i), in the order of ranks;  s, sgn(y) to all;  E = y - s·sgn(y)

    The sizes s are sent after their signs. With `scale` tensor, a piece is the part of one tensor in one chunk, so that
    neither large neighbours nor padding affect its size. With bucket, as in the paper, it is a whole chunk without
    padding. With buffer, as in DeepSpeed, the x_i of a whole bucket have one size.

    Wire: 2·(n-1)/n bits per value, 0.25·(n-1)/n bytes, and 2·(n-1) times the sizes of the chunk with the most pieces.
    """

    name = "onebit"

    def __init__(self, bucket: Bucket, channel: Channel, *, scale: str = "tensor") -> None:
        super().__init__(bucket, channel)
        assert scale in ("tensor", "bucket", "buffer")
        like = bucket.grad
        n, size = channel.size, like.numel()
        assert size % (64 * n) == 0, "chunks are whole bytes of signs, and the sizes after them are aligned"
        self._used, self._one_size = bucket.placed[-1].stop, scale == "buffer"
        self._chunk = chunk = size // n
        ends = [placed.stop for placed in bucket.placed] if scale == "tensor" else [self._used]
        self._chunks = [Chunk.of(ends, rank * chunk, (rank + 1) * chunk, like.device) for rank in range(n)]
        most = max(len(each.lengths) for each in self._chunks)
        self._row = chunk // 8 + most * like.element_size()
        widest = max((window.stop - window.start for each in self._chunks for window in each.windows), default=0)
        self._signs = Signs(widest, like.dtype, like.device)
        self._unpacked = torch.empty(widest, dtype=like.dtype, device=like.device)
        # Bytes that no rank reads (padding, and unused sizes of chunks with fewer pieces) are sent too.
        self._sent = torch.zeros(n, self._row, dtype=torch.uint8, device=like.device)
        self.wire_bytes = 2 * (n - 1) * self._row

    def _mean(self, values: torch.Tensor) -> None:
        n, rank, chunk = self.channel.size, self.channel.rank, self._chunk
        values.add_(self.error)
        size = None
        if self._one_size:
            exact = values[: self._used].double()
            size = (torch.dot(exact, exact) / self._used).sqrt_()
        for server in range(n):
            part = slice(server * chunk, (server + 1) * chunk)
            self._encode(server, values[part], self.error[part], self._sent[server], size)
        received = self.channel.exchange_raw(self._sent.view(-1)).view(n, -1)
        total = values[rank * chunk : (rank + 1) * chunk].copy_(self.server_error)
        shares = [self._sizes(row) / n for row in received]
        for window in self._chunks[rank].windows:
            own = window.of(total)
            for row, sizes in zip(received, shares, strict=True):
                own.addcmul_(self._unpack(window, row), window.spread(sizes))
        answer = self._sent[rank]
        self._encode(rank, total, self.server_error, answer)
        answers = torch.empty_like(self._sent)
        self.channel.gather_raw(answers.view(-1), answer)
        for server, row in enumerate(answers):
            self._decode(server, row, values[server * chunk : (server + 1) * chunk])
        values[self._used :].zero_()

    def _sizes(self, row: torch.Tensor) -> torch.Tensor:
        return row[self._chunk // 8 :].view(self.error.dtype)

    def _unpack(self, window: Window, row: torch.Tensor) -> torch.Tensor:
        signs = self._unpacked[: window.stop - window.start]
        self._signs.unpack(window.bits(row), signs)
        return signs[: window.used - window.start]

    def _encode(
        self,
        server: int,
        values: torch.Tensor,
        error: torch.Tensor,
        row: torch.Tensor,
        size: torch.Tensor | None = None,
    ) -> None:
        """Write signs and sizes (`size`, if it is passed) of a chunk to `row`, and the error of `values` to `error`."""
        chunk, squares = self._chunks[server], []
        for window in chunk.windows:
            squares.append(window.squares(window.of(values)))
            self._signs.pack(values[window.start : window.stop], window.bits(row))
        if not squares:
            return
        sizes = self._sizes(row)
        sizes[: len(chunk.lengths)] = chunk.sizes(torch.cat(squares)) if size is None else size
        for window in chunk.windows:
            # Unpack the signs that are sent, so that the error is exact also for -0.0.
            signs = self._unpack(window, row)
            torch.addcmul(window.of(values), signs, window.spread(sizes), value=-1, out=window.of(error))

    def _decode(self, server: int, row: torch.Tensor, values: torch.Tensor) -> None:
        sizes = self._sizes(row)
        for window in self._chunks[server].windows:
            torch.mul(self._unpack(window, row), window.spread(sizes), out=window.of(values))
