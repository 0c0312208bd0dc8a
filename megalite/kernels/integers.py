"""Quantize values to 8-bit integers with one scale per block."""

from dataclasses import dataclass, field

import torch

from megalite.config.strategies import INTEGER_BLOCK, integer_bytes

CHUNK = 128 * INTEGER_BLOCK
"""Elements that go through all passes together, so that they stay in a CPU's cache."""

LARGEST = 127

TINY = 1e-30
"""A block of smaller values is encoded as zeros, because the inverse of its scale could overflow."""


@dataclass
class Integers:
    """Encoder and decoder of `size` values.

    In a block of x, s = max|x|/127 and q = round(x/s), so |x - s·q| <= s/2 and 0 stays 0. The encoded row contains all
    s in the type of the values, then all q.
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    _chunks: list[tuple[int, int, int]] = field(init=False)
    """(start, stop, elements per block)."""
    _scratch: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        whole = self.size // INTEGER_BLOCK * INTEGER_BLOCK
        step = CHUNK if self.device.type == "cpu" else max(whole, 1)
        self._chunks = [(start, min(start + step, whole), INTEGER_BLOCK) for start in range(0, whole, step)]
        if whole < self.size:
            self._chunks.append((whole, self.size, self.size - whole))
        widest = max(stop - start for start, stop, _ in self._chunks)
        self._scratch = torch.empty(widest, dtype=self.dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        return integer_bytes(self.size, self.dtype.itemsize)

    def _split(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a row's integers and scales; the row must be aligned for the scales' type."""
        return row[-self.size :].view(torch.int8), row[: -self.size].view(self.dtype)

    def encode(self, values: torch.Tensor, row: torch.Tensor, *, more: torch.Tensor | None = None) -> None:
        """Encode `values` [size] into the integers and scales of `row` [nbytes], uint8; `values` becomes the error.

        Args:
            more: added to `values` first.
        """
        codes, scales = self._split(row)
        for start, stop, block in self._chunks:
            x = values[start:stop].view(-1, block)
            y = self._scratch[: stop - start].view(-1, block)
            if more is not None:
                x.add_(more[start:stop].view(-1, block))
            torch.abs(x, out=y)
            scale = y.amax(dim=1, keepdim=True).div_(LARGEST)
            # Not ">=": a NaN must stay a NaN, to show in the gradient norm.
            scale.masked_fill_(scale < TINY / LARGEST, 0.0)
            inverse = scale.reciprocal()
            inverse.masked_fill_(scale == 0.0, 0.0)
            torch.mul(x, inverse, out=y)
            codes[start:stop].view(-1, block).copy_(y.round_())
            x.sub_(y.mul_(scale))
            scales[start // INTEGER_BLOCK : -(-stop // INTEGER_BLOCK)].copy_(scale.view(-1))

    def decode(self, row: torch.Tensor, values: torch.Tensor, *, factor: float | None = None) -> None:
        """Write the decoded row into `values` [size]; with a factor, add factor times the decoded row to `values`."""
        codes, scales = self._split(row)
        if factor is not None:
            scales = scales * factor
        for start, stop, block in self._chunks:
            x = values[start:stop].view(-1, block)
            y = x if factor is None else self._scratch[: stop - start].view(-1, block)
            y.copy_(codes[start:stop].view(-1, block))
            y.mul_(scales[start // INTEGER_BLOCK : -(-stop // INTEGER_BLOCK)].view(-1, 1))
            if factor is not None:
                x.add_(y)
