"""Signs as bits: 8 values in a byte, the first in its highest bit; a set bit is a value that is not negative."""

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class Signs:
    """Packs signs into bytes and back, at most `size` (a multiple of 8) at a time.

    On the CPU with numpy, whose comparison, packing and table look-up are several times as fast as torch's; the rest of
    what is done to the values is torch's on every device.

    Args:
        dtype: of the values.
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    _table: torch.Tensor = field(init=False)
    """[256, 8]: the signs ±1 that a byte stands for."""
    _flags: torch.Tensor = field(init=False)
    _weights: torch.Tensor = field(init=False)
    _places: np.ndarray = field(init=False)
    """Bytes as numpy looks them up: without a conversion of its own in every call."""

    def __post_init__(self) -> None:
        assert self.size % 8 == 0
        self._weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=self.device)
        every_byte = torch.arange(256, dtype=torch.uint8, device=self.device).view(-1, 1)
        self._table = ((every_byte & self._weights) > 0).to(self.dtype) * 2 - 1
        self._flags = torch.empty(self.size, dtype=torch.bool, device=self.device)
        self._places = np.empty(self.size // 8 if self.device.type == "cpu" else 0, dtype=np.intp)

    def pack(self, values: torch.Tensor, packed: torch.Tensor) -> None:
        """`packed` [n/8], uint8, becomes the signs of `values` [n]; both zeros count as positive, NaN as negative."""
        flags = self._flags[: values.numel()]
        if self.device.type == "cpu":
            np.greater_equal(values.numpy(), 0, out=flags.numpy())
            packed.numpy()[:] = np.packbits(flags.numpy())
            return
        torch.ge(values, 0, out=flags)
        torch.sum(flags.view(-1, 8) * self._weights, dim=1, dtype=torch.uint8, out=packed)

    def unpack(self, packed: torch.Tensor, signs: torch.Tensor) -> None:
        """`signs` [n], of `dtype`, becomes ±1 after the bits of `packed` [n/8]."""
        if self.device.type == "cpu":
            # Rows as single items: numpy copies those of 32 bytes without a call for each.
            row = np.dtype((np.void, 8 * signs.element_size()))
            table, target = self._table.numpy().view(row).reshape(-1), signs.numpy().view(row)
            places = self._places[: packed.numel()]
            np.copyto(places, packed.numpy())
            np.take(table, places, out=target, mode="clip")
            return
        torch.index_select(self._table, 0, packed.long(), out=signs.view(-1, 8))
