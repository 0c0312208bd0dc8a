"""Lossy means over replicas: what all have in common, and 8 bits, the largest elements and low rank."""

import math
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from megalite.data_parallel.buckets import Bucket, Placed
from megalite.data_parallel.facts import STATES, low_rank_pays
from megalite.data_parallel.strategy import FlatState, TensorState, kept
from megalite.data_parallel.wire import Channel
from megalite.kernels.integers import Integers


class Codec(ABC):
    """The mean over replicas of flat tensors like one bucket, with far fewer bytes than the whole takes.

    Error feedback: what rounding has left out of this rank's values is added to the next ones, so that over many calls
    nothing is lost: Σ results + mean of the errors left = Σ means, but for rounding in fp32.

    Errors are in the unit of the values: a caller that multiplies values with a loss scale divides by it before.

    `bucket`: gives the places of tensors; its data and grad are not touched. `channel`: the replicas."""

    name: str
    """Of the codec in `grad_compression`; its states are those of `facts.STATES` that begin with it."""
    wire_bytes: int  # that this rank sends for one mean

    def __init__(self, bucket: Bucket, channel: Channel) -> None:
        self.bucket, self.channel = bucket, channel
        size = bucket.grad.numel() if channel.size > 1 else 0
        self.error = bucket.grad.new_zeros(size)  # what this rank still owes, element by element
        self.server_error = bucket.grad.new_zeros(size // channel.size)
        """Where each rank serves a chunk of the bucket: what is still owed of this rank's."""

    @torch.no_grad()
    def mean(self, values: torch.Tensor) -> None:
        """In place: this rank's `values` [bucket size], of the gradient's type, become the lossy mean, the same bits on
        every replica. It blocks; run it with `channel.in_background` to overlap it.

        Collectives: over the replicas.
        """
        if self.channel.size > 1:
            self._mean(values)

    @abstractmethod
    def _mean(self, values: torch.Tensor) -> None:
        """`mean`, with several replicas."""

    def states(self) -> list[FlatState]:
        if self.channel.size == 1:
            return []
        found = [kept(f"{self.name}_error", self.bucket, self.error)]
        if f"{self.name}_server_error" in STATES:
            start = self.channel.rank * self.server_error.numel()
            found.append(kept(f"{self.name}_server_error", self.bucket, self.server_error, start))
        return found

    def tensor_states(self) -> list[TensorState]:
        return []


STRIDE = 61
"""Every so many'th element is looked at first. Odd, so that it passes through all columns of the usual matrices."""

SMALL = 1 << 14  # elements of a tensor that is not worth a sample

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def largest(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` largest of `magnitudes` [n], none of them negative: int64 [count], ascending.

    Of equal ones the first count as larger; NaN counts as largest. The result does not depend on how it is found: on a CPU
    a threshold from a sample leaves few candidates, and where it leaves too few, all are. Elsewhere the host reads nothing.
    """
    places = _candidates(magnitudes, count) if magnitudes.device.type == "cpu" else None
    # As integers they have the same order, and NaN is above all.
    among = (magnitudes if places is None else magnitudes[places]).view(_INTEGERS[magnitudes.dtype])
    last = torch.topk(among, count, sorted=False).values.min()
    chosen, equal = torch.gt(among, last), torch.eq(among, last)
    chosen |= equal & (equal.cumsum(0) <= count - chosen.sum())
    indices = torch.nonzero_static(chosen, size=count).view(-1)
    return indices if places is None else places[indices]


def _candidates(magnitudes: torch.Tensor, count: int) -> torch.Tensor | None:
    """Places that hold the `count` largest, ascending; None: it may be any."""
    size = magnitudes.numel()
    sample = magnitudes[::STRIDE]
    expected = count * sample.numel() / size
    rank = math.ceil(1.1 * expected + 4 * math.sqrt(expected) + 4)
    if size < SMALL or rank >= sample.numel():
        return None
    threshold = torch.topk(sample, rank).values[-1].item()
    # numpy compares and finds four times as fast as torch.
    places = torch.from_numpy(np.flatnonzero(~np.less(magnitudes.numpy(), threshold)))
    return places if places.numel() >= count else None


class TopK(Codec):
    """Each replica sends the k largest elements of what it owes and their places, all to all; the rest waits.

        x_i = values_i + e_i;  out = Σ_i top_k(x_i)/n, in the order of ranks;  e_i = x_i - top_k(x_i)

    They are the largest of the whole bucket, not of each tensor: a tensor of small gradients waits until its errors have
    grown. Elements have the wire format, else the type of the values; what rounding leaves out stays in the error.

    Wire: 8·k·(n-1) bytes, 6·k·(n-1) with bf16. Above a density of 1/n the whole gradient takes less.

    `density`: k is this share of the bucket's elements, at least 1."""

    name = "topk"

    def __init__(self, bucket: Bucket, channel: Channel, *, density: float) -> None:
        super().__init__(bucket, channel)
        like = bucket.grad
        assert 0.0 < density <= 1.0 and like.numel() < 1 << 31, "places are 32-bit integers"
        self.count = max(1, math.ceil(density * bucket.placed[-1].stop))
        self._format = channel.wire_dtype or like.dtype
        self._split = self.count * torch.int32.itemsize
        row = self._split + self.count * self._format.itemsize
        self._rows = torch.empty(channel.size, row, dtype=torch.uint8, device=like.device)
        self.wire_bytes = (channel.size - 1) * row

    def _mean(self, values: torch.Tensor) -> None:
        self.error.add_(values)
        places = largest(torch.abs(self.error, out=values), self.count)
        owed = self.error[places]
        sent = owed.to(self._format)
        self.error[places] = owed - sent
        row = torch.cat([places.to(torch.int32).view(torch.uint8), sent.view(torch.uint8)])
        self.channel.gather_raw(self._rows.view(-1), row)
        values.zero_()
        for row in self._rows:
            # Copies, as rows need not start where numbers may.
            where = row[: self._split].clone().view(torch.int32)
            parts = row[self._split :].clone().view(self._format).to(values.dtype)
            # No place occurs twice in a row, so that the order of additions is that of rows on every device.
            values.index_add_(0, where, parts.div_(self.channel.size))


class Uint8(Codec):
    """Two-stage mean of 8-bit integers, after ByteGrad (arXiv 2107.01499) but with error feedback.

    The bucket is cut into one chunk a replica, which serves it. With C(x) what is left of x in 8 bits,

        x_i = values_i + e_i;  C(x_i) to the server of each chunk;  e_i = x_i - C(x_i)
        y = E + Σ_i C(x_i)/n, in the order of ranks;  C(y) to all;  E = y - C(y)

    Wire: 2·(n-1)/n bytes per value and a scale for every 2048 of them.
    """

    name = "uint8"

    def __init__(self, bucket: Bucket, channel: Channel) -> None:
        super().__init__(bucket, channel)
        like, n = bucket.grad, channel.size
        self._integers = Integers(like.numel() // n, like.dtype, like.device)
        self._rows = torch.empty(n, self._integers.nbytes, dtype=torch.uint8, device=like.device)
        self.wire_bytes = 2 * (n - 1) * self._integers.nbytes

    def _mean(self, values: torch.Tensor) -> None:
        n, mine = self.channel.size, self._rows[self.channel.rank]
        for owed, part, row in zip(self.error.view(n, -1), values.view(n, -1), self._rows, strict=True):
            self._integers.encode(owed, row, more=part)
        for row in self.channel.exchange_raw(self._rows.view(-1)).view(n, -1):
            self._integers.decode(row, self.server_error, factor=1.0 / n)
        self._integers.encode(self.server_error, mine)
        self.channel.gather_raw(self._rows.view(-1), mine)
        for part, row in zip(values.view(n, -1), self._rows, strict=True):
            self._integers.decode(row, part)


@dataclass(frozen=True, eq=False)
class _Matrices:
    """One tensor of the bucket, as a batch of matrices, and its factors, rows of which are contiguous: products with
    columns of a few elements are several times slower."""

    placed: Placed
    p: torch.Tensor  # [batch, r, a], inside the flat tensor of all left factors
    q: torch.Tensor  # [batch, r, b], inside that of all right factors

    def __post_init__(self) -> None:
        """The first right factor is random, the same on every replica and in every run."""
        seed = zlib.crc32(self.placed.parameter.info.spec.name.encode())
        self.q.copy_(torch.randn(self.q.shape, generator=torch.Generator().manual_seed(seed)))

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """[batch, a, b], a <= b, in a flat tensor like the bucket."""
        tensor = self.tensor(flat)
        return tensor.mT if tensor.shape[-2] > tensor.shape[-1] else tensor

    def tensor(self, flat: torch.Tensor) -> torch.Tensor:
        """The matrices as they lie in a flat tensor."""
        return flat[self.placed.start : self.placed.stop].view(-1, *self.placed.parameter.shape[-2:])

    def product(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two factors; their product lies like the tensor."""
        rows, columns = self.placed.parameter.shape[-2:]
        return (self.q.mT, self.p) if rows > columns else (self.p.mT, self.q)

    def normalize(self) -> None:
        """Each right factor to a largest element of 1: its range is all that counts, and products with tiny gradients
        must not underflow."""
        top = self.q.abs().amax(dim=(1, 2), keepdim=True)
        self.q.div_(top.clamp_min_(torch.finfo(self.q.dtype).tiny))


class PowerSGD(Codec):
    """Rank-r means, one power iteration a call (arXiv 1905.13727). For each matrix [a, b], a <= b, of the bucket,

        M_i = values_i + e_i;  P = orthonormal basis of Σ_i M_i·Q;  Q_i = M_iᵀ·P;  Q = Σ_i Q_i/n
        out = P·Qᵀ;  e_i = M_i - P·Q_iᵀ

    and the next call starts from Q. Every rank keeps what its own matrix has outside P, and the mean of that is what the
    mean matrix has there. To keep M_i - out instead, as is usual, adds up how replicas differ for as long as they do.

    A tensor's last two dimensions are the matrix (of this rank's slice, where tp splits it), transposed if need be, and
    those before a batch. Tensors with 2·r·(a+b) >= a·b, and vectors, are sent whole with the right factors, and owe
    nothing.

    Sums are made in the order of ranks and in the type of the values, whatever the wire format.

    Wire: 2·(n-1)/n times the bytes of r·(a+b) values a matrix, and of the tensors sent whole.
    """

    name = "powersgd"

    def __init__(self, bucket: Bucket, channel: Channel, *, rank: int) -> None:
        super().__init__(bucket, channel)
        like, n = bucket.grad, channel.size
        low: list[Placed] = []
        self._whole: list[Placed] = []
        for placed in bucket.placed:
            pays = placed.parameter.dim() > 1 and low_rank_pays(rank, *_shape(placed))
            (low if pays else self._whole).append(placed)
        # Matrices of one shape lie together: their left factors are made orthonormal in one go.
        low.sort(key=_shape)
        left = [rank * placed.parameter.numel() // _shape(placed)[1] for placed in low]
        right = [rank * placed.parameter.numel() // _shape(placed)[0] for placed in low]
        right += [placed.parameter.numel() for placed in self._whole]
        self._p, self._q = (like.new_zeros(-(-sum(sizes) // n) * n) for sizes in (left, right))
        ps, qs = self._p[: sum(left)].split(left), self._q[: sum(right)].split(right)
        self._whole_parts = qs[len(low) :]
        self._matrices = [
            _Matrices(placed, p.view(-1, rank, _shape(placed)[0]), q.view(-1, rank, _shape(placed)[1]))
            for placed, p, q in zip(low, ps, qs, strict=False)
        ]
        self._bases: list[torch.Tensor] = []  # the left factors of each height together, [batch, r, a]
        heights, start = [_shape(placed)[0] for placed in low], 0
        for height in sorted(set(heights)):
            stop = start + sum(size for size, other in zip(left, heights, strict=True) if other == height)
            self._bases.append(self._p[start:stop].view(-1, rank, height))
            start = stop
        self.wire_bytes = 2 * (n - 1) * (self._p.nbytes + self._q.nbytes) // n

    def _mean(self, values: torch.Tensor) -> None:
        self.error.add_(values)
        for matrices in self._matrices:
            torch.bmm(matrices.q, matrices.of(self.error).mT, out=matrices.p)
        self._sum(self._p)
        for basis in self._bases:
            basis.copy_(torch.linalg.qr(basis.mT).Q.mT)
        for matrices in self._matrices:
            torch.bmm(matrices.p, matrices.of(self.error), out=matrices.q)
            matrices.tensor(self.error).baddbmm_(*matrices.product(), alpha=-1.0)
        for placed, room in zip(self._whole, self._whole_parts, strict=True):
            room.copy_(self.error[placed.start : placed.stop])
            self.error[placed.start : placed.stop].zero_()
        self._sum(self._q)
        self._q.div_(self.channel.size)
        for matrices in self._matrices:
            torch.bmm(*matrices.product(), out=matrices.tensor(values))
            matrices.normalize()
        for placed, room in zip(self._whole, self._whole_parts, strict=True):
            values[placed.start : placed.stop].copy_(room)

    def _sum(self, flat: torch.Tensor) -> None:
        """In place, over the replicas and in their order. Not the channel's all-reduce: that would round to the wire
        format, which error feedback does not know of, and would wait for the thread that this runs on."""
        first, *others = self.channel.exchange_raw(flat).view(self.channel.size, -1)
        for part in others:
            first.add_(part)
        self.channel.gather_raw(flat, first)

    def tensor_states(self) -> list[TensorState]:
        several = self._matrices if self.channel.size > 1 else []
        return [TensorState("powersgd_q", self.bucket, each.placed, each.q, per_slice=True) for each in several]


def _shape(placed: Placed) -> tuple[int, int]:
    """(a, b) of its matrices."""
    short, long = sorted(placed.parameter.shape[-2:])
    return short, long
