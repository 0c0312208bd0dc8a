"""The mean over replicas in low rank, with error feedback."""

import zlib
from dataclasses import dataclass

import torch

from megalite.data_parallel.buckets import Bucket, Placed
from megalite.data_parallel.facts import low_rank_pays
from megalite.data_parallel.more.codec import Codec
from megalite.data_parallel.strategy import TensorState
from megalite.data_parallel.wire import Channel


@dataclass(frozen=True, eq=False)
class _Matrices:
    """One tensor of the bucket, as a batch of matrices, and its factors, rows of which are contiguous: products with
    columns of a few elements are several times slower."""

    placed: Placed
    p: torch.Tensor
    """[batch, r, a], inside the flat tensor of all left factors."""
    q: torch.Tensor
    """[batch, r, b], inside that of all right factors."""

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """[batch, a, b], a <= b, in a flat tensor like the bucket."""
        tensor = self._tensor(flat)
        return tensor.mT if self._lies else tensor

    def product(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two factors; their product lies like the tensor."""
        return (self.q.mT, self.p) if self._lies else (self.p.mT, self.q)

    def put(self, flat: torch.Tensor) -> None:
        """The matrices in `flat` become P·Qᵀ."""
        torch.bmm(*self.product(), out=self._tensor(flat))

    def take(self, flat: torch.Tensor) -> None:
        """P·Qᵀ is subtracted from the matrices in `flat`."""
        self._tensor(flat).baddbmm_(*self.product(), alpha=-1.0)

    @property
    def _lies(self) -> bool:
        return self.placed.parameter.shape[-2] > self.placed.parameter.shape[-1]

    def _tensor(self, flat: torch.Tensor) -> torch.Tensor:
        rows, columns = self.placed.parameter.shape[-2:]
        return flat[self.placed.start : self.placed.stop].view(-1, rows, columns)


class PowerSGD(Codec):
    """Rank-r means, one power iteration a call (arXiv 1905.13727). For each matrix [a, b], a <= b, of the bucket,

        M_i = values_i + e_i;  P = orthonormal basis of Σ_i M_i·Q;  Q_i = M_iᵀ·P;  Q = Σ_i Q_i/n
        out = P·Qᵀ;  e_i = M_i - P·Q_iᵀ

    and the next call starts from Q. Every rank keeps what its own matrix has outside P, and the mean of that is what the
    mean matrix has there. To keep M_i - out instead, as is usual, adds up how replicas differ for as long as they do;
    and so would a basis of the longer side, which a matrix of full rank does not fill.

    A tensor's last two dimensions are the matrix (of this rank's slice, where tp splits it), transposed if need be, and
    those before a batch.
    Tensors with 2·r·(a+b) >= a·b, and vectors, are sent whole with the right factors, and owe nothing.

    Sums are made in the order of ranks and in the type of the values, whatever the wire format.

    Wire: 2·(n-1)/n times the bytes of r·(a+b) values a matrix, and of the tensors sent whole.

    Args:
        rank: r.
    """

    name = "powersgd"

    def __init__(self, bucket: Bucket, channel: Channel, *, rank: int) -> None:
        super().__init__(bucket, channel)
        like, n = bucket.grad, channel.size
        low = [placed for placed in bucket.placed if _pays(placed, rank)]
        # Matrices of one shape lie together: their left factors are made orthonormal in one go.
        low.sort(key=_shape)
        self._whole = [placed for placed in bucket.placed if not _pays(placed, rank)]
        left = [rank * placed.parameter.numel() // _shape(placed)[1] for placed in low]
        right = [rank * placed.parameter.numel() // _shape(placed)[0] for placed in low]
        whole_sizes = [placed.parameter.numel() for placed in self._whole]
        self._p = like.new_zeros(-(-sum(left) // n) * n)
        self._q = like.new_zeros(-(-sum(right + whole_sizes) // n) * n)
        ps, qs = (
            self._p.split([*left, self._p.numel() - sum(left)]),
            self._q.split([*right, *whole_sizes, self._q.numel() - sum(right + whole_sizes)]),
        )
        self._whole_parts = list(qs[len(low) : len(low) + len(whole_sizes)])
        self._matrices = [
            _Matrices(placed, p.view(-1, rank, _shape(placed)[0]), q.view(-1, rank, _shape(placed)[1]))
            for placed, p, q in zip(low, ps, qs, strict=False)
        ]
        for matrices in self._matrices:
            _start(matrices)
        self._bases = self._by_height(left, rank)
        self.wire_bytes = 2 * (self.channel.size - 1) * (self._p.nbytes + self._q.nbytes) // self.channel.size

    def _by_height(self, sizes: list[int], rank: int) -> list[torch.Tensor]:
        heights = [matrices.p.shape[2] for matrices in self._matrices]
        found, start = [], 0
        for height in sorted(set(heights)):
            size = sum(size for size, other in zip(sizes, heights, strict=True) if other == height)
            found.append(self._p[start : start + size].view(-1, rank, height))
            start += size
        return found

    def _mean(self, values: torch.Tensor) -> None:
        n = self.channel.size
        self.error.add_(values)
        for matrices in self._matrices:
            torch.bmm(matrices.q, matrices.of(self.error).mT, out=matrices.p)
        self._sum(self._p)
        for basis in self._bases:
            basis.copy_(torch.linalg.qr(basis.mT).Q.mT)
        for matrices in self._matrices:
            torch.bmm(matrices.p, matrices.of(self.error), out=matrices.q)
            matrices.take(self.error)
        for placed, room in zip(self._whole, self._whole_parts, strict=True):
            room.copy_(self.error[placed.start : placed.stop])
            self.error[placed.start : placed.stop].zero_()
        self._sum(self._q)
        self._q.div_(n)
        for matrices in self._matrices:
            matrices.put(values)
            _normalize(matrices.q)
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
        if self.channel.size == 1:
            return []
        return [
            TensorState("powersgd_q", self.bucket, matrices.placed, matrices.q, per_slice=True)
            for matrices in self._matrices
        ]


def _shape(placed: Placed) -> tuple[int, int]:
    rows, columns = placed.parameter.shape[-2:]
    return min(rows, columns), max(rows, columns)


def _pays(placed: Placed, rank: int) -> bool:
    if placed.parameter.dim() < 2:
        return False
    return low_rank_pays(rank, *_shape(placed))


def _start(matrices: _Matrices) -> None:
    """The first right factor: random, the same on every replica and in every run."""
    seed = zlib.crc32(matrices.placed.parameter.info.spec.name.encode())
    drawn = torch.randn(matrices.q.shape, generator=torch.Generator().manual_seed(seed))
    matrices.q.copy_(drawn)


def _normalize(q: torch.Tensor) -> None:
    """Each matrix to a largest element of 1. Its range is all that counts, and products with tiny gradients must not
    underflow."""
    top = q.abs().amax(dim=(1, 2), keepdim=True)
    q.div_(top.clamp_min_(torch.finfo(q.dtype).tiny))
