"""Compute lossy means over replicas: the base class of codecs, 8-bit integers, top-k and low rank (PowerSGD)."""

import math
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from megalite.data_parallel.buckets import Bucket, Placed
from megalite.data_parallel.facts import STATES, low_rank_pays
from megalite.data_parallel.strategy import FlatState, TensorState, flat_state
from megalite.data_parallel.wire import Channel
from megalite.kernels.quantization import Integers


class Codec(ABC):
    """Computes the mean over replicas of flat tensors like one bucket, with far fewer bytes than the whole takes.

    Error feedback: the compression error of this rank's values is added to the next values, so that nothing is lost over
    many calls: Σ results + mean of the remaining errors = Σ means, except for rounding in fp32.

    Errors are in the unit of the values: a caller with a loss scale must divide values by it first.

    `bucket`: gives the offsets of tensors; its data and grad are not used. `channel`: the replicas."""

    name: str
    """Name in `grad_compression`; prefix of the codec's states in `facts.STATES`."""
    wire_bytes: int  # bytes that this rank sends for one mean

    def __init__(self, bucket: Bucket, channel: Channel) -> None:
        self.bucket, self.channel = bucket, channel
        size = bucket.grad.numel() if channel.size > 1 else 0
        self.error = bucket.grad.new_zeros(size)  # compression error of this rank's values, per element
        self.server_error = bucket.grad.new_zeros(size // channel.size)
        """If each rank serves a chunk of the bucket: the error of this rank's chunk."""

    @torch.no_grad()
    def mean(self, values: torch.Tensor) -> None:
        """Replace this rank's `values` [bucket size], of the gradient's type, by the lossy mean, the same bits on every
        replica. It blocks; run it with `channel.in_background` to overlap it.

        Collectives: over the replicas."""
        if self.channel.size > 1:
            self._mean(values)

    @abstractmethod
    def _mean(self, values: torch.Tensor) -> None:
        """Do the work of `mean`, with several replicas."""

    def states(self) -> list[FlatState]:
        if self.channel.size == 1:
            return []
        found = [flat_state(f"{self.name}_error", self.bucket, self.error)]
        if f"{self.name}_server_error" in STATES:
            start = self.channel.rank * self.server_error.numel()
            found.append(flat_state(f"{self.name}_server_error", self.bucket, self.server_error, start))
        return found

    def tensor_states(self) -> list[TensorState]:
        return []


STRIDE = 61
"""Distance of sampled elements. It is odd, so that the sample covers all columns of the usual matrices."""

SMALL = 1 << 14  # tensors with fewer elements are not sampled

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def largest(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` largest of `magnitudes` [n], which are not negative: int64 [count], ascending.

    Of equal elements the first counts as larger; NaN is the largest. On a CPU, a threshold from a sample leaves few
    candidates; if it leaves too few, all elements are candidates. The result does not depend on the sample. On other
    devices the host reads nothing."""
    places = _candidates(magnitudes, count) if magnitudes.device.type == "cpu" else None
    # Their bits as integers have the same order, with NaN above all.
    among = (magnitudes if places is None else magnitudes[places]).view(_INTEGERS[magnitudes.dtype])
    last = torch.topk(among, count, sorted=False).values.min()
    chosen, equal = torch.gt(among, last), torch.eq(among, last)
    chosen |= equal & (equal.cumsum(0) <= count - chosen.sum())
    indices = torch.nonzero_static(chosen, size=count).view(-1)
    return indices if places is None else places[indices]


def _candidates(magnitudes: torch.Tensor, count: int) -> torch.Tensor | None:
    """Return indices that include the `count` largest, ascending; None: no restriction was found."""
    size = magnitudes.numel()
    sample = magnitudes[::STRIDE]
    expected = count * sample.numel() / size
    rank = math.ceil(1.1 * expected + 4 * math.sqrt(expected) + 4)
    if size < SMALL or rank >= sample.numel():
        return None
    threshold = torch.topk(sample, rank).values[-1].item()
    # numpy is four times as fast here as torch.
    places = torch.from_numpy(np.flatnonzero(~np.less(magnitudes.numpy(), threshold)))
    return places if places.numel() >= count else None


class TopK(Codec):
    """Sends the k largest elements of each replica, with their indices, to all replicas; the rest stays in the error.

        x_i = values_i + e_i;  out = Σ_i top_k(x_i)/n, in the order of ranks;  e_i = x_i - top_k(x_i)

    They are the largest of the whole bucket, not of each tensor: a tensor with small gradients waits until its errors have
    grown. Elements are sent in the wire's format, else in the values' type; the rounding error stays in the error.

    Wire: 8·k·(n-1) bytes, 6·k·(n-1) with bf16. Above a density of 1/n the whole gradient takes less.

    `density`: k is this share of the bucket's elements, at least 1 element."""

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
        exact = self.error[places]
        sent = exact.to(self._format)
        self.error[places] = exact - sent
        row = torch.cat([places.to(torch.int32).view(torch.uint8), sent.view(torch.uint8)])
        self.channel.gather_raw(self._rows.view(-1), row)
        values.zero_()
        for row in self._rows:
            # Clone, as the row may not be aligned for these types.
            where = row[: self._split].clone().view(torch.int32)
            parts = row[self._split :].clone().view(self._format).to(values.dtype)
            # No index occurs twice in a row, so additions are in the order of rows on every device.
            values.index_add_(0, where, parts.div_(self.channel.size))


class Uint8(Codec):
    """Computes a two-stage mean of 8-bit integers, after ByteGrad (arXiv 2107.01499) but with error feedback.

    The bucket is cut into one chunk per replica, which serves it. With x rounded to 8 bits as C(x),

        x_i = values_i + e_i;  C(x_i) to the server of each chunk;  e_i = x_i - C(x_i)
        y = E + Σ_i C(x_i)/n, in the order of ranks;  C(y) to all;  E = y - C(y)

    Wire: 2·(n-1)/n bytes per value and a scale for every 2048 of them."""

    name = "uint8"

    def __init__(self, bucket: Bucket, channel: Channel) -> None:
        super().__init__(bucket, channel)
        like, n = bucket.grad, channel.size
        self._integers = Integers(like.numel() // n, like.dtype, like.device)
        self._rows = torch.empty(n, self._integers.nbytes, dtype=torch.uint8, device=like.device)
        self.wire_bytes = 2 * (n - 1) * self._integers.nbytes

    def _mean(self, values: torch.Tensor) -> None:
        n, own = self.channel.size, self._rows[self.channel.rank]
        for error, part, row in zip(self.error.view(n, -1), values.view(n, -1), self._rows, strict=True):
            self._integers.encode(error, row, more=part)
        for row in self.channel.exchange_raw(self._rows.view(-1)).view(n, -1):
            self._integers.decode(row, self.server_error, factor=1.0 / n)
        self._integers.encode(self.server_error, own)
        self.channel.gather_raw(self._rows.view(-1), own)
        for part, row in zip(values.view(n, -1), self._rows, strict=True):
            self._integers.decode(row, part)


@dataclass(frozen=True, eq=False)
class _Matrices:
    """One tensor of the bucket, as a batch of matrices, and its factors. The rows of factors are contiguous: products with
    short columns are several times slower."""

    placed: Placed
    p: torch.Tensor  # [batch, r, a], a view of the flat tensor of all left factors
    q: torch.Tensor  # [batch, r, b], a view of the flat tensor of all right factors

    def __post_init__(self) -> None:
        """Draw the first right factor, the same on every replica and in every run."""
        seed = zlib.crc32(self.placed.parameter.info.spec.name.encode())
        self.q.copy_(torch.randn(self.q.shape, generator=torch.Generator().manual_seed(seed)))

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the matrices [batch, a, b], a <= b, as a view of a flat tensor like the bucket."""
        tensor = self.tensor(flat)
        return tensor.mT if tensor.shape[-2] > tensor.shape[-1] else tensor

    def tensor(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the matrices in the tensor's orientation, as a view of a flat tensor."""
        return flat[self.placed.start : self.placed.stop].view(-1, *self.placed.parameter.shape[-2:])

    def product(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two factors with a product in the tensor's orientation."""
        rows, columns = self.placed.parameter.shape[-2:]
        return (self.q.mT, self.p) if rows > columns else (self.p.mT, self.q)

    def normalize(self) -> None:
        """Scale each right factor to a largest element of 1: only its range matters, and products with tiny gradients
        must not underflow."""
        top = self.q.abs().amax(dim=(1, 2), keepdim=True)
        self.q.div_(top.clamp_min_(torch.finfo(self.q.dtype).tiny))


class PowerSGD(Codec):
    """Computes rank-r means with one power iteration per call (arXiv 1905.13727). For each matrix [a, b], a <= b:

        M_i = values_i + e_i;  P = orthonormal basis of Σ_i M_i·Q;  Q_i = M_iᵀ·P;  Q = Σ_i Q_i/n
        out = P·Qᵀ;  e_i = M_i - P·Q_iᵀ

    The next call starts from Q. The error of a rank is the part of its matrix outside P; the mean of these errors is the
    error of the mean. The usual error, M_i - out, would also accumulate the differences between replicas.

    A tensor's last two dimensions are the matrix (of this rank's slice if tp splits it), transposed if a > b; the other
    dimensions are a batch. Tensors with 2·r·(a+b) >= a·b, and vectors, are sent whole with the right factors, without
    error.

    Sums add in the order of ranks and in the type of the values, whatever the wire format.

    Wire: 2·(n-1)/n times the bytes of r·(a+b) values per matrix, and of the tensors sent whole."""

    name = "powersgd"

    def __init__(self, bucket: Bucket, channel: Channel, *, rank: int) -> None:
        super().__init__(bucket, channel)
        like, n = bucket.grad, channel.size
        low: list[Placed] = []
        self._whole: list[Placed] = []
        for placed in bucket.placed:
            pays = placed.parameter.dim() > 1 and low_rank_pays(rank, *_shape(placed))
            (low if pays else self._whole).append(placed)
        # Matrices of one shape are neighbours, so that one call makes their left factors orthonormal.
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
        self._bases: list[torch.Tensor] = []  # the left factors of each height, [batch, r, a]
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
        """Sum over replicas in place, in rank order. The channel's all-reduce would round to the wire's format without
        error feedback, and would wait for the thread that runs this method."""
        first, *others = self.channel.exchange_raw(flat).view(self.channel.size, -1)
        for part in others:
            first.add_(part)
        self.channel.gather_raw(flat, first)

    def tensor_states(self) -> list[TensorState]:
        several = self._matrices if self.channel.size > 1 else []
        return [TensorState("powersgd_q", self.bucket, each.placed, each.q, per_slice=True) for each in several]


def _shape(placed: Placed) -> tuple[int, int]:
    """Return (a, b) of the tensor's matrices."""
    short, long = sorted(placed.parameter.shape[-2:])
    return short, long
