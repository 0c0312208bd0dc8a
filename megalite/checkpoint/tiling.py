"""Compute with slices of a tensor, and check that a set of them covers it exactly. Imports no torch."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

# Equal to topology.layout.Slice. Defined here too, because packages of one row do not import each other.
Slice = tuple[tuple[int, int], ...]
"""Per dimension, the half-open range [start, stop)."""


def volume(bounds: Slice) -> int:
    return math.prod(stop - start for start, stop in bounds)


def overlap(one: Slice, other: Slice) -> Slice | None:
    """Return the intersection of two slices of one tensor, or None if it is empty."""
    bounds = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return bounds if all(start < stop for start, stop in bounds) else None


def within(bounds: Slice, shape: Sequence[int], *, may_be_empty: bool = False) -> bool:
    """Return whether a slice lies inside a tensor of this shape and, unless `may_be_empty`, is not empty."""
    return len(bounds) == len(shape) and all(
        0 <= start <= stop <= size and (start < stop or may_be_empty)
        for (start, stop), size in zip(bounds, shape, strict=True)
    )


def relative(bounds: Slice, origin: Slice) -> tuple[slice, ...]:
    """Return the index of `bounds` in a tensor that contains the slice `origin`, a superset of `bounds`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(bounds, origin, strict=True))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Slice]:
    """Return boxes that cover elements [start, stop) of a flattened tensor, in order. They are the end of a row, whole
    rows and the start of a row; incomplete rows are split recursively."""
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        return _in_row(shape, last, start - last * row, stop - last * row)
    boxes = _in_row(shape, first - 1, row - (first * row - start), row)
    if first < last:
        boxes.append(((first, last), *((0, size) for size in shape[1:])))
    return boxes + _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> list[Slice]:
    return [((index, index + 1), *box) for box in flat_boxes(shape[1:], start, stop)]


def tiling_fault(shape: Sequence[int], slices: Sequence[Slice]) -> str | None:
    """Return how `slices` fail to cover every element of `shape` exactly once, or None if they do.

    The sum of a box's corners with alternating signs is the mixed difference of its indicator function, so the boxes
    tile the tensor if and only if their corners add up to the corners of the whole. This takes time linear in the
    number of boxes; comparing pairs would be quadratic.
    """
    for bounds in slices:
        if not within(bounds, shape):
            return f"slice {list(bounds)} is empty or does not lie in shape {tuple(shape)}"
    corners: Counter[tuple[int, ...]] = Counter()
    whole: Slice = tuple((0, size) for size in shape)
    for bounds, weight in itertools.chain(((bounds, 1) for bounds in slices), [(whole, -1)]):
        for ends in itertools.product((0, 1), repeat=len(shape)):
            corner = tuple(bound[end] for bound, end in zip(bounds, ends, strict=True))
            corners[corner] += -weight if sum(ends) % 2 else weight
    if not any(corners.values()):
        return None
    excess = sum(volume(bounds) for bounds in slices) - math.prod(shape)
    what = "overlap" if excess > 0 else "leave a gap" if excess < 0 else "overlap and leave a gap"
    return f"its {len(slices)} parts {what} in shape {tuple(shape)}"
