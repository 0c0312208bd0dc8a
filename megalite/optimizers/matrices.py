"""Assign the hidden matrices of flat parameters to ranks, and plan the exchange of their parts."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megalite.config.optimizer import MatrixKey, OptimizerConfig, deal
from megalite.optimizers.base import FlatParameter
from megalite.topology.group import Group

WAVE = 1 << 26  # most elements per rank of the matrices that are processed together: it bounds the buffers

Box = tuple[int, int, int, int]  # first row, one past the last row, first column, one past the last column


class OwnedRange(NamedTuple):
    """Elements [start, stop) of a flattened box of a matrix that a rank has, from element `at` of its flat parameter
    number `flat`."""

    box: Box
    start: int
    stop: int
    rank: int
    flat: int
    at: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Matrix:
    """One matrix, with the ranges of all ranks of the group."""

    key: MatrixKey
    rows: int
    columns: int
    count: int  # number of matrices in its tensor
    ranges: tuple[OwnedRange, ...]

    @property
    def boxes(self) -> list[Box]:
        """The parts into which tensor parallelism slices it."""
        return sorted({owned.box for owned in self.ranges})


MatrixPart = tuple[Matrix, OwnedRange]


@dataclass
class Traffic:
    """One exchange of parts of matrices between ranks, for one wave.

    Sender and receiver list the parts between them in the same order, that of matrices and ranges."""

    rank: int  # this rank
    sent: defaultdict[int, list[MatrixPart]] = field(default_factory=lambda: defaultdict(list))  # by receiver
    received: defaultdict[int, list[MatrixPart]] = field(default_factory=lambda: defaultdict(list))  # by sender
    local: list[MatrixPart] = field(default_factory=list)  # parts that stay on this rank
    moves: bool = False  # some rank sends a part

    @property
    def outgoing(self) -> list[MatrixPart]:
        """Sent parts, in the order of messages."""
        return [part for rank in sorted(self.sent) for part in self.sent[rank]]

    @property
    def incoming(self) -> list[MatrixPart]:
        """Received parts, in the order of messages."""
        return [part for rank in sorted(self.received) for part in self.received[rank]]

    def add(self, part: MatrixPart, *, sender: int, receiver: int) -> None:
        if sender == receiver == self.rank:
            self.local.append(part)
        elif sender != receiver:
            self.moves = True
            if sender == self.rank:
                self.sent[receiver].append(part)
            if receiver == self.rank:
                self.received[sender].append(part)


class Wave(NamedTuple):
    """Matrices that are processed together."""

    owned: list[Matrix]  # matrices that this rank owns
    gather: Traffic  # to the owners; ranges are the senders'
    scatter: Traffic  # from the owners to all ranks with a part; ranges are the receivers'


def plan(parameters: Sequence[FlatParameter], config: OptimizerConfig, group: Group) -> list[Wave]:
    """Assign the matrices of `parameters` to owners in `group`, which together have every matrix complete.

    A matrix is the last two dimensions of a tensor; leading dimensions count matrices (experts, gate and up). If several
    ranks have the same elements, one of them sends them: the owner if it has them.

    Collectives: one gather of all ranks' segments over `group`."""
    own = [
        [index, each.start, each.offset, each.stop - each.start, each.name, each.global_shape, each.slice]
        for index, flat in enumerate(parameters)
        for each in flat.segments
    ]
    found: defaultdict[MatrixKey, list[OwnedRange]] = defaultdict(list)
    shapes: dict[MatrixKey, tuple[int, int]] = {}
    counts: dict[str, int] = {}
    for rank, segments in enumerate(group.gather_json(own)):
        for flat, at, offset, length, name, shape, bounds in segments:
            counts[name] = math.prod(shape[:-2])
            for number, box, start, stop in _parts(shape, bounds, offset, offset + length):
                found[name, number].append(OwnedRange(box, start, stop, rank, flat, at))
                shapes[name, number] = (shape[-2], shape[-1])
                at += stop - start
    owners = deal(config, shapes, group.size)
    matrices = [Matrix(key, *shapes[key], counts[key[0]], tuple(sorted(found[key]))) for key in owners]
    return [_wave(wave, group, owners) for wave in _cut(matrices)]


def _parts(
    shape: Sequence[int], bounds: Sequence[Sequence[int]], start: int, stop: int
) -> Iterator[tuple[int, Box, int, int]]:
    """Yield (number, box, start and stop in the box) of each matrix with elements in [start, stop) of the flattened slice
    `bounds`."""
    (top, bottom), (left, right) = bounds[-2:]
    size = (bottom - top) * (right - left)
    counts = [after - before for before, after in bounds[:-2]]
    for local in range(start // size, -(-stop // size)):
        number, rest = 0, local
        for dim, extent in enumerate(shape[:-2]):
            index, rest = divmod(rest, math.prod(counts[dim + 1 :]))
            number = number * extent + bounds[dim][0] + index
        yield number, (top, bottom, left, right), max(start - local * size, 0), min(stop - local * size, size)


def _cut(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    """Yield the matrices in order, as many at a time as leave no rank with more than `WAVE` elements of them."""
    wave: list[Matrix] = []
    sizes: Counter[int] = Counter()
    for matrix in matrices:
        more = Counter(sizes)
        for each in matrix.ranges:
            more[each.rank] += each.size
        if wave and max(more.values()) > WAVE:
            yield wave
            wave, more = [], more - sizes
        wave.append(matrix)
        sizes = more
    if wave:
        yield wave


def _wave(matrices: Sequence[Matrix], group: Group, owners: Mapping[MatrixKey, int]) -> Wave:
    """Return the wave of these matrices, with the traffic to and from their owners."""
    wave = Wave([], Traffic(group.rank), Traffic(group.rank))
    for matrix in matrices:
        owner = owners[matrix.key]
        if owner == group.rank:
            wave.owned.append(matrix)
        elements = 0
        for (_, start, stop), copies in itertools.groupby(matrix.ranges, key=lambda each: each[:3]):
            by_rank = {owned.rank: owned for owned in copies}
            elements += stop - start
            sender = owner if owner in by_rank else sorted(by_rank)[owner % len(by_rank)]
            wave.gather.add((matrix, by_rank[sender]), sender=sender, receiver=owner)
            for receiver, owned in by_rank.items():
                wave.scatter.add((matrix, owned), sender=owner, receiver=receiver)
        assert elements == matrix.rows * matrix.columns, f"{matrix.key} is not complete on ranks {group.ranks}"
    return wave
