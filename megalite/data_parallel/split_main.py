"""fp32 main parameters as the 16 bits that bf16 weights lack: 2 bytes a parameter beside the weight, instead of 4.

The weight is the main parameter rounded to the nearest bf16, a tie to the even one, as it is with fp32 main parameters.
As integers, then, main = weight·2^16 + low with -2^15 <= low <= 2^15: one value more than 16 bits have. low = 2^15 is a
tie that was rounded down, one element in 2^17, whose places are listed beside; so every fp32 value comes back exactly.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch

PIECE = 1 << 20
"""Elements that are worked on at a time."""

_HIGHEST = (1 << 15) - 1


class SplitMain:
    """The main parameters of a range of a bucket.

    Between updates `main` is one NaN that stands for all its elements; `unfold` gives it memory and puts the exact values
    there, `fold` takes them up and frees it.

    Args:
        main: fp32, flat.
        weights: bf16, of the same elements: `main` rounded to the nearest, whenever `fold` or `unfold` is called.
    """

    def __init__(self, main: torch.nn.Parameter, weights: torch.Tensor) -> None:
        assert main.dtype == torch.float32 and weights.dtype == torch.bfloat16
        self._main, self._weights = main, weights
        self._low = torch.zeros(main.numel(), dtype=torch.int16, device=main.device)
        self._ties = torch.zeros(0, dtype=torch.int64, device=main.device)
        self.fold()

    def fold(self) -> None:
        """Keep what `main` lacks in the weights, and free it."""
        bits, ties = self._main.data.view(torch.int32), []
        for start, stop in self._pieces():
            low = bits[start:stop] - self._high(start, stop)
            ties.append((low == _HIGHEST + 1).nonzero().view(-1) + start)
            # NaN alone is further from its rounded value: it stays one.
            self._low[start:stop] = low.clamp_(-_HIGHEST - 1, _HIGHEST)
        self._ties = torch.cat(ties) if ties else self._ties
        # Not a storage of size 0: torch does not let go of memory that numpy has seen, and reading it would be reading
        # anything.
        self._main.data = self._main.data.new_full((1,), math.nan).expand(self._low.numel())
        self.in_memory = False

    def unfold(self) -> None:
        """Give `main` its memory and its values."""
        bits = torch.empty_like(self._low, dtype=torch.int32)
        for start, stop in self._pieces():
            torch.add(self._high(start, stop), self._low[start:stop], out=bits[start:stop])
        bits[self._ties] += 1
        self._main.data = bits.view(torch.float32)
        self.in_memory = True

    def _pieces(self) -> Iterator[tuple[int, int]]:
        size = self._weights.numel()
        return ((start, min(start + PIECE, size)) for start in range(0, size, PIECE))

    def _high(self, start: int, stop: int) -> torch.Tensor:
        """The weights' bits, as the upper half of 32."""
        return self._weights[start:stop].view(torch.int16).to(torch.int32).bitwise_left_shift_(16)


@contextlib.contextmanager
def unfolded(splits: Sequence[SplitMain]) -> Iterator[None]:
    """Inside, the main parameters are in memory, also if they are so already; what they are at the end is kept."""
    opened = [split for split in splits if not split.in_memory]
    for split in opened:
        split.unfold()
    try:
        yield
    finally:
        for split in opened:
            split.fold()
