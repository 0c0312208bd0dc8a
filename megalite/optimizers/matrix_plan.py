"""Who holds which part of which matrix, who works on it, and who therefore sends what to whom. Computed once."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megalite.optimizers.flat import FlatParameter
from megalite.topology.group import Group

WAVE = 1 << 26
"""Elements that a rank holds of matrices under work at the same time, at most: a bound for the buffers."""

Key = tuple[str, int]
"""A tensor's name and the number of the matrix in it."""

Box = tuple[int, int, int, int]
"""First row, one past the last, and columns likewise."""


@dataclass(frozen=True, order=True)
class Span:
    """Consecutive elements of a box of a matrix."""

    box: Box
    start: int
    stop: int
    """In the flattened box."""


@dataclass(frozen=True)
class Holding:
    """A span of a matrix where a rank has it."""

    rank: int
    """In the group."""
    span: Span
    flat: int
    start: int
    """The rank's flat parameter, and the place in it."""

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.span.stop - self.span.start


@dataclass(frozen=True)
class Matrix:
    """One matrix, with all that the group's ranks hold of it."""

    key: Key
    rows: int
    columns: int
    holdings: tuple[Holding, ...]

    @property
    def boxes(self) -> list[Box]:
        """What the slices of tensor parallelism cut it into."""
        return sorted({holding.span.box for holding in self.holdings})

    @property
    def cost(self) -> int:
        """Multiplications of a product with its Gram matrix."""
        return self.rows * self.columns * min(self.rows, self.columns)


@dataclass
class Traffic:
    """One exchange: spans of matrices that go from rank to rank, all of one wave.

    Both ends list what passes between two ranks in the same order, that of matrices and spans.
    """

    sent: list[list[tuple[Matrix, Holding]]]
    """By receiver."""
    received: list[list[tuple[Matrix, Holding]]]
    """By sender."""
    kept: list[tuple[Matrix, Holding]] = field(default_factory=list)
    """What stays on this rank."""
    moves: bool = False
    """Some rank sends something."""

    @classmethod
    def of(cls, size: int) -> "Traffic":
        """Nothing yet, among `size` ranks."""
        return cls([[] for _ in range(size)], [[] for _ in range(size)])

    def add(self, matrix: Matrix, holding: Holding, *, sender: int, receiver: int, rank: int) -> None:
        """A span travels; `rank` is this one."""
        if sender == receiver:
            if rank == sender:
                self.kept.append((matrix, holding))
            return
        self.moves = True
        if rank == sender:
            self.sent[receiver].append((matrix, holding))
        if rank == receiver:
            self.received[sender].append((matrix, holding))


@dataclass
class Wave:
    """Matrices that are under work together."""

    owned: list[Matrix]
    """Those that this rank works on."""
    gather: Traffic
    """To the owners; a holding is the sender's."""
    give_back: Traffic
    """From the owners to all who hold a part; a holding is the receiver's."""


def plan(parameters: Sequence[FlatParameter], group: Group, device: torch.device) -> list[Wave]:
    """Deal out the matrices of `parameters` over the ranks of `group`, which together hold every one of them whole.

    A matrix is the last two dimensions of a tensor; further ones in front count matrices (experts, gate and up). Where
    several ranks have the same elements, with the same values, one of them sends them: the owner itself if it can. Large
    matrices are dealt out first, each to the rank that has least to do.

    Collectives: what each rank holds is gathered over `group`.
    """
    own = [
        [index, each.start, each.offset, each.stop - each.start, each.name, each.global_shape, each.slice]
        for index, flat in enumerate(parameters)
        for each in flat.segments
    ]
    held = group.gather_json(own, device)
    found: dict[Key, list[Holding]] = {}
    shapes: dict[Key, tuple[int, int]] = {}
    for rank, segments in enumerate(held):
        for flat, start, offset, length, name, shape, bounds in segments:
            for number, span in _spans(shape, bounds, offset, offset + length):
                found.setdefault((name, number), []).append(Holding(rank, span, flat, start))
                shapes[name, number] = (shape[-2], shape[-1])
                start += span.stop - span.start
    matrices = [
        Matrix(key, *shapes[key], tuple(sorted(holdings, key=lambda each: (each.span, each.rank))))
        for key, holdings in found.items()
    ]
    waves = _cut(sorted(matrices, key=lambda each: (-each.cost, each.key)))
    work = [0] * group.size
    return [_deal(wave, group, work) for wave in waves]


def _spans(
    shape: Sequence[int], bounds: Sequence[Sequence[int]], start: int, stop: int
) -> Iterator[tuple[int, Span]]:
    """(number of the matrix, span) for each that elements [start, stop) of the flattened slice `bounds` touch."""
    (top, bottom), (left, right) = bounds[-2:]
    size = (bottom - top) * (right - left)
    counts = [after - before for before, after in bounds[:-2]]
    for local in range(start // size, -(-stop // size)):
        number, rest = 0, local
        for dim, extent in enumerate(shape[:-2]):
            index, rest = divmod(rest, math.prod(counts[dim + 1 :]))
            number = number * extent + bounds[dim][0] + index
        first, last = max(start - local * size, 0), min(stop - local * size, size)
        yield number, Span((top, bottom, left, right), first, last)


def _cut(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    """In order, so many at a time that no rank holds more than `WAVE` elements of them."""
    wave: list[Matrix] = []
    held: Counter[int] = Counter()
    for matrix in matrices:
        more = Counter(held)
        for each in matrix.holdings:
            more[each.rank] += each.stop - each.start
        if wave and max(more.values()) > WAVE:
            yield wave
            wave, more = [], more - held
        wave.append(matrix)
        held = more
    if wave:
        yield wave


def _deal(matrices: Sequence[Matrix], group: Group, work: list[int]) -> Wave:
    """Owners, and what travels to and from them; `work` is what each rank has been given so far."""
    wave = Wave([], Traffic.of(group.size), Traffic.of(group.size))
    for matrix in matrices:
        owner = work.index(min(work))
        work[owner] += matrix.cost
        if owner == group.rank:
            wave.owned.append(matrix)
        elements = 0
        for span, copies in itertools.groupby(matrix.holdings, key=lambda each: each.span):
            holders = {holding.rank: holding for holding in copies}
            elements += span.stop - span.start
            sender = owner if owner in holders else sorted(holders)[owner % len(holders)]
            wave.gather.add(matrix, holders[sender], sender=sender, receiver=owner, rank=group.rank)
            for receiver, holding in holders.items():
                wave.give_back.add(matrix, holding, sender=owner, receiver=receiver, rank=group.rank)
        assert elements == matrix.rows * matrix.columns, f"{matrix.key} is not whole on ranks {group.ranks}"
    return wave
