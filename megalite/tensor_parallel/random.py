"""Draw initial weights and dropout masks that do not depend on the layout.

Weights: every fixed-size block of rows (or columns, for a parameter split along columns) is drawn from a counter
generator keyed by (seed, full name, block index). A rank draws only the blocks that overlap its shard.

Dropout: each element of a mask depends only on (seed, site, sample index, position, column), and each rank draws its
own part. Masks are the same in every layout, on every device and in a recomputed forward, and checkpoints need no
generator state."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megalite.kernels.layer_ops import DropoutMask, dropout_mask
from megalite.topology.layout import ShardSpec

BLOCK = 64
"""Rows (columns) per block. Changing it changes every initial weight."""

THREADS = min(8, os.cpu_count() or 1)
"""Threads per rank that draw a large parameter; numpy draws without Python's lock."""
WORTH_THREADS = 1 << 20  # elements of a large parameter


def _key(*parts: object, size: int) -> int:
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "little")


def fill_normal(tensor: Tensor, spec: ShardSpec, *, dim: int, std: float, seed: int, expert: bool = False) -> None:
    """Fill the local slice of a parameter with N(0, std²), with the same values in every layout.

    Args:
        tensor: the local slice, of any float type and device; draws are in fp32.
        dim: the dimension along which blocks are drawn; the one that tensor parallelism splits, if any.
        expert: dimension 0 is the experts, each drawn as a separate tensor: each rank draws only its own."""
    if not expert:
        _fill_blocks(tensor, spec, dim, std, (seed, spec.name))
        return
    one = ShardSpec(name=spec.name, global_shape=spec.global_shape[1:], slice=spec.slice[1:])
    for row, index in enumerate(range(*spec.slice[0])):
        _fill_blocks(tensor[row], one, dim - 1, std, (seed, spec.name, "expert", index))


def _fill_blocks(tensor: Tensor, spec: ShardSpec, dim: int, std: float, key: tuple[object, ...]) -> None:
    (start, stop), extent = spec.slice[dim], spec.global_shape[dim]

    def draw(block: int) -> tuple[int, Tensor]:
        """Return the first row (column) of a block in the slice, and the block's part of the slice."""
        first, last = block * BLOCK, min((block + 1) * BLOCK, extent)
        shape = [*spec.global_shape[:dim], last - first, *spec.global_shape[dim + 1 :]]
        generator = np.random.Generator(np.random.Philox(key=_key(*key, block, size=16)))
        drawn = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32) * np.float32(std))
        lower, upper = max(first, start), min(last, stop)
        return lower - start, drawn.narrow(dim, lower - first, upper - lower)

    blocks = range(start // BLOCK, -(-stop // BLOCK))
    threads = THREADS if tensor.numel() >= WORTH_THREADS else 1
    with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
        for wave in range(0, len(blocks), 4 * threads):  # few at a time, because each is as large as its part in fp32
            numbers = blocks[wave : wave + 4 * threads]
            for at, part in map(draw, numbers) if pool is None else pool.map(draw, numbers):
                tensor.narrow(dim, at, part.shape[dim]).copy_(part)


@dataclass(frozen=True)
class DropoutStream:
    """Keys of one microbatch's dropout masks, and the kernel that draws them."""

    seed: int
    sample_ids: tuple[int, ...]
    draw: DropoutMask = dropout_mask

    def fill(self, keep: Tensor, rows: Tensor, p: float, *, site: str, first_head: int = 0) -> None:
        """Fill `keep` [samples, heads, rows, n] of one site: each element is false with probability p."""
        key = _key(self.seed, site, size=8) >> 2 | 1 << 62  # always 63 bits, because kernels are compiled for one type
        self.draw(keep, rows, key=key, samples=self.sample_ids, first_head=first_head, p=p)


def keep_mask(x: Tensor, p: float, *, site: str, stream: DropoutStream, rows: Tensor) -> Tensor:
    """Return the boolean dropout mask of x [s_local, b, h]: each element is false with probability p.

    `site` names the location in the network, e.g. `"layers.3.mlp"`; `rows`: positions of x's rows, int64 [s_local]."""
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    stream.fill(keep.transpose(0, 1).unsqueeze(1), rows, p, site=site)
    return keep
