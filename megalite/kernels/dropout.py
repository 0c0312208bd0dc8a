"""Draw dropout masks that depend only on sample, head, row and column: the same bits on any device and layout."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

COLUMNS = 8
"""Elements per generator call: four 64-bit words of two elements each, the low half first."""


class DropoutMask(Protocol):
    """A kernel of the operation `dropout_mask`."""

    def __call__(
        self, keep: Tensor, rows: Tensor, *, key: int, samples: Sequence[int], first_head: int, p: float
    ) -> None:
        """See `dropout_mask`."""


def threshold(p: float) -> int:
    """Return the integer in [0, 2^32) below which a random number drops its element."""
    return min(round(p * (1 << 32)), (1 << 32) - 1)


def dropout_mask(keep: Tensor, rows: Tensor, *, key: int, samples: Sequence[int], first_head: int, p: float) -> None:
    """Fill `keep` [samples, heads, rows, n]: true with probability 1 - p.

    Elements 8·j to 8·j + 7 of row r are Philox4x64-10 (Salmon et al., SC 2011) of the key (key, sample) and the counter
    (r·ceil(n/8) + j + 1, 0, head, 0). This kernel draws them with numpy's generator on the host.

    Args:
        keep: boolean, contiguous in its last dimension.
        rows: int64, the global indices of this rank's rows.
        key: 63 bits that identify the mask's use.
        samples: global sample indices.
        first_head: global index of the first head.
    """
    if keep.is_meta:
        keep.fill_(True)
    elif keep.device.type != "cpu":
        host = torch.empty(keep.shape, dtype=torch.bool, pin_memory=True)
        dropout_mask(host, rows.cpu(), key=key, samples=samples, first_head=first_head, p=p)
        keep.copy_(host, non_blocking=True)
    else:
        _, heads, count, width = keep.shape
        blocks, below, places, out = -(-width // COLUMNS), np.uint32(threshold(p)), rows.numpy(), keep.numpy()
        runs = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), count]
        for index, sample in enumerate(samples):
            for head in range(heads):
                for start, stop in pairwise(runs):
                    counter = int(places[start]) * blocks | (first_head + head) << 128  # numpy increments before a draw
                    generator = np.random.Philox(key=key | sample << 64, counter=counter)
                    words = generator.random_raw((stop - start) * blocks * 4).view(np.uint32).reshape(stop - start, -1)
                    np.greater_equal(words[:, :width], below, out=out[index, head, start:stop])
