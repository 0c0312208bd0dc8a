"""Values as 8-bit integers with a scale for each block of them."""

from dataclasses import dataclass, field

import torch

from megalite.config.strategies import INTEGER_BLOCK, integer_bytes

CHUNK = 128 * INTEGER_BLOCK
"""Elements that go through all passes before the next ones come, so that a CPU has them in its cache."""

LARGEST = 127

TINY = 1e-30
"""A block without a larger value is sent as zeros: the inverse of its scale could overflow."""


@dataclass
class Integers:
    """Turns `size` values into bytes and back.

    In a block of x, s = max|x|/127 and q = round(x/s), so that |x - s·q| <= s/2 and 0 stays 0. Bytes are all s in
    the type of the values, then all q.
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    _chunks: list[tuple[int, int, int]] = field(init=False)
    """(start, stop, elements of a block)."""
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
        """Integers and scales of a row, which starts where scales may."""
        return row[-self.size :].view(torch.int8), row[: -self.size].view(self.dtype)

    def encode(self, values: torch.Tensor, row: torch.Tensor, *, more: torch.Tensor | None = None) -> None:
        """`row` [nbytes], uint8, becomes the integers and scales of `values` [size], and `values` what they leave out.

        Args:
            more: is added to `values` before.
        """
        codes, scales = self._split(row)
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
            scales[start // INTEGER_BLOCK : -(-stop // INTEGER_BLOCK)].copy_(scale.view(-1))

    def decode(self, row: torch.Tensor, values: torch.Tensor, *, factor: float | None = None) -> None:
        """`values` [size] become what a row says; with a factor, that much of it is added to them."""
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
