"""Best-fit packing on a histogram: which lengths go together, at a cost that does not depend on how many there are."""

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Bins:
    """A packing of items into bins; which item of a length goes where is left open.

    Part p says that each of `bins[p]` bins, from number `first[p]` on, takes `each[p]` items of length `lengths[p]`.
    Parts come in ascending order of their lengths.
    """

    lengths: NDArray[np.int64]
    first: NDArray[np.int64]
    bins: NDArray[np.int64]
    each: NDArray[np.int64]
    count: int
    """Number of bins."""

    def items(self) -> NDArray[np.int64]:
        """Items in each bin. Shape `[count]`."""
        changes = np.zeros(self.count + 1, dtype=np.int64)
        np.add.at(changes, self.first, self.each)
        np.add.at(changes, self.first + self.bins, -self.each)
        return np.cumsum(changes)[:-1]

    def of_items(self) -> NDArray[np.int64]:
        """The bin of each item, the items in ascending order of their lengths. Shape `[items]`."""
        sizes = self.bins * self.each
        before = np.cumsum(sizes) - sizes
        within = np.arange(int(sizes.sum())) - np.repeat(before, sizes)
        return np.repeat(self.first, sizes) + within // np.repeat(self.each, sizes)


@dataclass(frozen=True, slots=True)
class _Filled:
    """What a group of like bins holds: `each` items of one length, and what was there before."""

    length: int
    each: int
    before: "_Filled | None"


def best_fit(counts: NDArray[np.int64], capacity: int) -> Bins:
    """Pack counts[n] items of each length n, the longest first, each into the bin with the least room that takes it.

    Best-fit decreasing needs at most 11/9 of the fewest bins, plus 4 (Johnson, "Near-optimal bin packing algorithms",
    1973). Items of one length are placed together, and like bins are kept as one group with a count (Krell et al.,
    "Efficient sequence packing without cross-contamination", 2021), so that the work depends on the number of
    different lengths alone. Packing whole documents so is Ding et al., "Fewer truncations improve language modeling",
    2024.

    Args:
        counts: items of each length 0 .. capacity, `[capacity + 1]`; none of length 0.
        capacity: of a bin, in the unit of the lengths.
    """
    assert len(counts) == capacity + 1 and counts[0] == 0, (len(counts), capacity)
    lengths = np.flatnonzero(counts)
    groups: dict[int, list[tuple[_Filled, int]]] = {}
    rooms: list[int] = []
    """Keys of `groups`, ascending."""
    for length in lengths[::-1].tolist():
        left = int(counts[length])
        while left:
            place = bisect.bisect_left(rooms, length)
            before: _Filled | None = None
            if place == len(rooms):
                room, there = capacity, left  # as many new bins as it takes
            else:
                room = rooms[place]
                before, there = groups[room].pop()
                if not groups[room]:
                    del groups[room], rooms[place]
            # Once an item lies in a bin, that bin is the fullest one that takes the next of the same length.
            each = min(room // length, left)
            bins = min(there, left // each)
            left -= bins * each
            _add(groups, rooms, room - each * length, (_Filled(length, each, before), bins))
            if before is not None and bins < there:
                _add(groups, rooms, room, (before, there - bins))
    return _number(groups)


def _add(
    groups: dict[int, list[tuple[_Filled, int]]], rooms: list[int], room: int, group: tuple[_Filled, int]
) -> None:
    if room not in groups:
        groups[room] = []
        bisect.insort(rooms, room)
    groups[room].append(group)


def _number(groups: dict[int, list[tuple[_Filled, int]]]) -> Bins:
    """Give the bins of each group consecutive numbers."""
    parts: list[tuple[int, int, int, int]] = []
    first = 0
    for _, alike in sorted(groups.items()):
        for held, bins in alike:
            filled: _Filled | None = held
            while filled is not None:
                parts.append((filled.length, first, bins, filled.each))
                filled = filled.before
            first += bins
    table = np.array(sorted(parts), dtype=np.int64).reshape(-1, 4).T
    return Bins(lengths=table[0], first=table[1], bins=table[2], each=table[3], count=first)
