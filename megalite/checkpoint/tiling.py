"""Slices of a tensor, and whether a set of them covers it exactly. No torch."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

# As topology.layout.Slice, named here too because packages of one row do not import each other.
Slice = tuple[tuple[int, int], ...]
"""Per dimension, the half-open range [start, stop)."""


def volume(bounds: Slice) -> int:
    return math.prod(stop - start for start, stop in bounds)


def overlap(one: Slice, other: Slice) -> Slice | None:
    """The slice that two slices of one tensor share, or None."""
    bounds = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return bounds if all(start < stop for start, stop in bounds) else None


def within(bounds: Slice, shape: Sequence[int], *, may_be_empty: bool = False) -> bool:
    """The slice lies inside a tensor of this shape and, unless it may be, is not empty."""
    return len(bounds) == len(shape) and all(
        0 <= start <= stop <= size and (start < stop or may_be_empty)
        for (start, stop), size in zip(bounds, shape, strict=True)
    )


def relative(bounds: Slice, origin: Slice) -> tuple[slice, ...]:
    """Index of `bounds` in a tensor that holds the slice `origin`, which contains it."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(bounds, origin, strict=True))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Slice]:
    """Elements [start, stop) of a flattened tensor as boxes, in their order: the end of a row, whole rows, the start of
    one; with more dimensions the ends are cut likewise."""
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
    """Say how `slices` fail to cover every element of `shape` exactly once, or None if they do.

    Writing each box as the sum of its corners with alternating signs is the mixed difference of its indicator
    function; the boxes tile the whole if and only if their corners add up to those of the whole. That takes time
    linear in the number of boxes, whatever their arrangement, where comparing pairs would take the square of it.
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
