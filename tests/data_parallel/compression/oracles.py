"""Reference implementations of the codecs: one process simulates all ranks, tensor by tensor and block by block."""

import zlib
from collections.abc import Sequence

import numpy as np
import torch

Array = np.ndarray


class EightBits:
    """The 8-bit codec, in blocks of 2048 values of each rank's chunk."""

    def __init__(self, ranks: int, size: int) -> None:
        self.ranks = ranks
        self.errors = [np.zeros(size, np.float32) for _ in range(ranks)]
        self.server = np.zeros(size, np.float32)

    @staticmethod
    def rounded(x: Array) -> tuple[Array, Array]:
        scale = np.float32(np.abs(x).max()) / np.float32(127)
        if scale * 127 < 1e-30:
            return np.zeros_like(x), np.float32(0)
        return np.rint(x * (np.float32(1) / scale)), scale

    def mean(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        size, part = len(self.server), len(self.server) // self.ranks
        out = np.empty(size, np.float32)
        for first in range(0, size, part):
            for start in range(first, first + part, 2048):
                block = slice(start, min(start + 2048, first + part))
                total = self.server[block].copy()
                for error, own in zip(self.errors, values, strict=True):
                    x = error[block] + own.numpy()[block]
                    q, scale = self.rounded(x)
                    error[block] = x - q * scale
                    total += q * np.float32(scale * np.float32(1.0 / self.ranks))
                q, scale = self.rounded(total)
                out[block] = q * scale
                self.server[block] = total - out[block]
        return torch.from_numpy(out)


class Largest:
    """The top-k codec, by a stable sort."""

    def __init__(self, ranks: int, size: int, count: int) -> None:
        self.ranks, self.count = ranks, count
        self.errors = [np.zeros(size, np.float32) for _ in range(ranks)]

    def mean(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        out = np.zeros(len(self.errors[0]), np.float32)
        for error, own in zip(self.errors, values, strict=True):
            error += own.numpy()
            chosen = np.argsort(-np.abs(error), kind="stable")[: self.count]
            out[chosen] += error[chosen] / np.float32(self.ranks)
            error[chosen] = 0
        return torch.from_numpy(out)


class LowRank:
    """PowerSGD, matrix by matrix; small matrices and vectors are summed whole."""

    def __init__(self, ranks: int, size: int, rank: int, shapes: dict[str, tuple[int, ...]]) -> None:
        self.ranks, self.rank, self.shapes = ranks, rank, shapes
        self.errors = [torch.zeros(size) for _ in range(ranks)]
        self.q: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            if self.is_low(shape):
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                batch, long = int(np.prod(shape[:-2])), max(shape[-2:])
                self.q[name] = torch.randn(batch, rank, long, generator=generator)

    def is_low(self, shape: tuple[int, ...]) -> bool:
        """Return whether two factors take less than half of the matrix."""
        return len(shape) > 1 and 2 * self.rank * (shape[-2] + shape[-1]) < shape[-2] * shape[-1]

    def mean(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        out, start = torch.zeros_like(self.errors[0]), 0
        for name, shape in self.shapes.items():
            stop = start + int(np.prod(shape))
            parts = [error[start:stop] + own[start:stop] for error, own in zip(self.errors, values, strict=True)]
            if not self.is_low(shape):
                out[start:stop] = sum(parts[1:], start=parts[0]) / self.ranks
            else:
                upright = shape[-2] <= shape[-1]
                whole = [part.view(-1, *shape[-2:]) for part in parts]
                low, rest = self.low(name, whole if upright else [part.mT for part in whole])
                out[start:stop] = (low if upright else low.mT).flatten()
                for error, left in zip(self.errors, rest, strict=True):
                    error[start:stop] = (left if upright else left.mT).flatten()
            start = stop
        return out

    def low(self, name: str, parts: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        q = self.q[name]
        lefts = [torch.bmm(q, part.mT) for part in parts]
        basis = torch.linalg.qr(sum(lefts[1:], start=lefts[0]).mT).Q.mT.contiguous()
        rights = [torch.bmm(basis, part) for part in parts]
        rest = [torch.baddbmm(part, basis.mT, right, alpha=-1.0) for part, right in zip(parts, rights, strict=True)]
        q = sum(rights[1:], start=rights[0]) / self.ranks
        self.q[name] = q / q.abs().amax(dim=(1, 2), keepdim=True)
        return torch.bmm(basis.mT, q), rest
