"""Compute statistics of stored tensors and differences between two checkpoints, with one block in memory at a time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megalite.checkpoint.load import Checkpoint
from megalite.checkpoint.manifest import Slice, TensorEntry, flat_boxes

BLOCK = 1 << 22
"""Elements read at once from each of at most two tensors: 32 MiB in float64."""

_CPU = torch.device("cpu")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by element size in bytes. Comparing as integers is bitwise, also for NaN and -0."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of the finite elements of a tensor; None if it has none. `std` is the population standard deviation."""

    elements: int
    nan: int
    inf: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None


@dataclass(frozen=True)
class Difference:
    """How the elements of a tensor differ between two checkpoints.

    Args:
        elements: number of elements.
        differing: number of elements with different bits or, if the dtypes differ, different values.
        non_finite: number of differing elements with a NaN or an infinity on either side.
        max_abs: largest |a - b| over the elements that are finite on both sides.
        rms: square root of the mean of (a - b)^2 over the elements that are finite on both sides."""

    elements: int
    differing: int
    non_finite: int
    max_abs: float
    rms: float

    @property
    def size(self) -> tuple[bool, float, int]:
        """Sort key: a difference with NaN or infinity is larger than any finite difference."""
        return (self.non_finite > 0, self.max_abs, self.differing)


@dataclass(frozen=True)
class Comparison:
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    declared: dict[str, tuple[TensorEntry, TensorEntry]] = field(default_factory=dict)
    """Key -> both entries, if dtype or global shape differ."""
    differing: dict[str, Difference] = field(default_factory=dict)
    """Key -> difference of the elements, largest first. Contains only tensors of equal shape."""
    compared: int = 0
    """Number of tensors that have the same shape in both checkpoints."""

    @property
    def same(self) -> bool:
        return not (self.only_first or self.only_second or self.declared or self.differing)


def blocks(shape: Sequence[int], limit: int = BLOCK) -> Iterator[Slice]:
    """Yield slices of at most `limit` elements that tile `shape`, in row-major order."""
    size = math.prod(shape)
    for start in range(0, size, limit):
        yield from flat_boxes(shape, start, min(start + limit, size))


def statistics(checkpoint: Checkpoint, key: str) -> Statistics:
    """Return statistics of one tensor in float64. Mean and std are merged block by block (Chan, Golub, LeVeque 1979)."""
    entry = checkpoint.entry(key)
    nan = inf = count = 0
    least, most, mean, squares = math.inf, -math.inf, 0.0, 0.0
    for bounds in blocks(entry.global_shape):
        values = checkpoint.read(key, bounds, device=_CPU, dtype=torch.float64).flatten()
        nan += int(values.isnan().sum())
        inf += int(values.isinf().sum())
        values = values[values.isfinite()]
        new = values.numel()
        if not new:
            continue
        least, most = min(least, values.min().item()), max(most, values.max().item())
        centre = values.mean().item()
        squares += (values - centre).square().sum().item() + (centre - mean) ** 2 * count * new / (count + new)
        count += new
        mean += (centre - mean) * new / count
    elements = math.prod(entry.global_shape)
    if not count:
        return Statistics(elements, nan, inf, None, None, None, None)
    return Statistics(elements, nan, inf, least, most, mean, math.sqrt(squares / count))


def compare(first: Checkpoint, second: Checkpoint, keys: Sequence[str], *, trust_hashes: bool) -> Comparison:
    """Compare the tensors of two checkpoints, which may have different layouts.

    Args:
        keys: keys of the tensors to compare; each is in at least one of the checkpoints.
        trust_hashes: treat tensors with the same slices in files of equal sha256 as equal without reading them. Only
            valid for verified checkpoints."""
    declared, found = {}, {}
    compared = 0
    for key in keys:
        if not (first.has(key) and second.has(key)):
            continue
        one, other = first.entry(key), second.entry(key)
        if (one.dtype, one.global_shape) != (other.dtype, other.global_shape):
            declared[key] = (one, other)
        if one.global_shape != other.global_shape:
            continue
        compared += 1
        if trust_hashes and _same_files(first, one, second, other):
            continue
        difference = _difference(first, second, key)
        if difference.differing:
            found[key] = difference
    largest = sorted(found, key=lambda key: found[key].size, reverse=True)
    return Comparison(
        only_first=tuple(key for key in keys if not second.has(key)),
        only_second=tuple(key for key in keys if not first.has(key)),
        declared=declared,
        differing={key: found[key] for key in largest},
        compared=compared,
    )


def _same_files(first: Checkpoint, one: TensorEntry, second: Checkpoint, other: TensorEntry) -> bool:
    """Return whether both tensors consist of the same slices in files with the same sha256."""

    def places(checkpoint: Checkpoint, entry: TensorEntry) -> list[tuple[str, Slice]]:
        return [(checkpoint.manifest.files[part.file].sha256, part.slice) for part in entry.parts]

    return one.dtype == other.dtype and places(first, one) == places(second, other)


def _difference(first: Checkpoint, second: Checkpoint, key: str) -> Difference:
    shape = first.entry(key).global_shape
    differing = non_finite = finite = 0
    largest = squares = 0.0
    for bounds in blocks(shape):
        one = first.read(key, bounds, device=_CPU).flatten()
        other = second.read(key, bounds, device=_CPU).flatten()
        unequal = _unequal(one, other)
        a, b = one.double(), other.double()
        usable = a.isfinite() & b.isfinite()
        finite += int(usable.sum())
        differing += int(unequal.sum())
        non_finite += int((unequal & ~usable).sum())
        gap = (a - b)[unequal & usable].abs()
        if gap.numel():
            largest = max(largest, gap.max().item())
            squares += gap.square().sum().item()
    rms = math.sqrt(squares / finite) if finite else 0.0
    return Difference(math.prod(shape), differing, non_finite, largest, rms)


def _unequal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements with different bits or, between dtypes, different values (NaN equals NaN)."""
    if one.dtype == other.dtype:
        bits = _BITS[one.element_size()]
        return one.view(bits) != other.view(bits)
    a, b = one.double(), other.double()
    return (a != b) & ~(a.isnan() & b.isnan())
