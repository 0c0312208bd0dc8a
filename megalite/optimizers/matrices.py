"""Optimizers that work on whole matrices: which rank works on which, and how its parts come there and back."""

import itertools
import math
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megalite.config.optimizer import OPTIMIZERS, MatrixKey, OptimizerConfig, deal
from megalite.optimizers.adam import AdamW
from megalite.optimizers.base import Context, Exchange, FlatParameter, Optimizer, Piece, Update, cut_part
from megalite.topology.group import Group

WAVE = 1 << 26  # most elements per rank of matrices in work at the same time: a bound for the buffers

Box = tuple[int, int, int, int]  # first row, one past the last, and columns likewise


class HeldRange(NamedTuple):
    """Elements [start, stop) of a flattened box of a matrix where a rank has them: from `at` in its flat parameter
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
    """One matrix, with all parts of it that the group's ranks have."""

    key: MatrixKey
    rows: int
    columns: int
    count: int  # of matrices in its tensor
    holdings: tuple[HeldRange, ...]

    @property
    def boxes(self) -> list[Box]:
        """What the slices of tensor parallelism cut it into."""
        return sorted({holding.box for holding in self.holdings})


Place = tuple[Matrix, HeldRange]


@dataclass
class Traffic:
    """One exchange: parts of matrices that go from rank to rank, all of one wave.

    Both ends list what passes between two ranks in the same order, that of matrices and holdings."""

    rank: int  # this one
    sent: defaultdict[int, list[Place]] = field(default_factory=lambda: defaultdict(list))  # by receiver
    received: defaultdict[int, list[Place]] = field(default_factory=lambda: defaultdict(list))
    """By sender."""
    kept: list[Place] = field(default_factory=list)  # what stays on this rank
    moves: bool = False  # some rank sends something

    @property
    def outgoing(self) -> list[Place]:
        """In the order of messages."""
        return [place for rank in sorted(self.sent) for place in self.sent[rank]]

    @property
    def incoming(self) -> list[Place]:
        return [place for rank in sorted(self.received) for place in self.received[rank]]

    def add(self, place: Place, *, sender: int, receiver: int) -> None:
        if sender == receiver == self.rank:
            self.kept.append(place)
        elif sender != receiver:
            self.moves = True
            if sender == self.rank:
                self.sent[receiver].append(place)
            if receiver == self.rank:
                self.received[sender].append(place)


class Wave(NamedTuple):
    """Matrices that are in work together."""

    owned: list[Matrix]  # those that this rank works on
    gather: Traffic  # to the owners; a holding is the sender's
    give_back: Traffic  # from the owners to all ranks with a part; a holding is the receiver's


def plan(parameters: Sequence[FlatParameter], config: OptimizerConfig, group: Group) -> list[Wave]:
    """Deal out the matrices of `parameters` over the ranks of `group`, which together have every one of them complete.

    A matrix is the last two dimensions of a tensor; further ones in front count matrices (experts, gate and up). Where
    several ranks have the same elements, with the same values, one of them sends them: the owner itself if it can.

    Collectives: what each rank has is gathered over `group`."""
    own = [
        [index, each.start, each.offset, each.stop - each.start, each.name, each.global_shape, each.slice]
        for index, flat in enumerate(parameters)
        for each in flat.segments
    ]
    found: defaultdict[MatrixKey, list[HeldRange]] = defaultdict(list)
    shapes: dict[MatrixKey, tuple[int, int]] = {}
    counts: dict[str, int] = {}
    for rank, segments in enumerate(group.gather_json(own)):
        for flat, at, offset, length, name, shape, bounds in segments:
            counts[name] = math.prod(shape[:-2])
            for number, box, start, stop in _parts(shape, bounds, offset, offset + length):
                found[name, number].append(HeldRange(box, start, stop, rank, flat, at))
                shapes[name, number] = (shape[-2], shape[-1])
                at += stop - start
    owners = deal(config, shapes, group.size)
    matrices = [Matrix(key, *shapes[key], counts[key[0]], tuple(sorted(found[key]))) for key in owners]
    return [_wave(wave, group, owners) for wave in _cut(matrices)]


def _parts(
    shape: Sequence[int], bounds: Sequence[Sequence[int]], start: int, stop: int
) -> Iterator[tuple[int, Box, int, int]]:
    """(number, box, first and last element in it) of each matrix that elements [start, stop) of the flattened slice
    `bounds` touch."""
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
    """In order, so many at a time that no rank has more than `WAVE` elements of them."""
    wave: list[Matrix] = []
    sizes: Counter[int] = Counter()
    for matrix in matrices:
        more = Counter(sizes)
        for each in matrix.holdings:
            more[each.rank] += each.size
        if wave and max(more.values()) > WAVE:
            yield wave
            wave, more = [], more - sizes
        wave.append(matrix)
        sizes = more
    if wave:
        yield wave


def _wave(matrices: Sequence[Matrix], group: Group, owners: Mapping[MatrixKey, int]) -> Wave:
    """What travels to and from owners."""
    wave = Wave([], Traffic(group.rank), Traffic(group.rank))
    for matrix in matrices:
        owner = owners[matrix.key]
        if owner == group.rank:
            wave.owned.append(matrix)
        elements = 0
        for (_, start, stop), copies in itertools.groupby(matrix.holdings, key=lambda each: each[:3]):
            holders = {holding.rank: holding for holding in copies}
            elements += stop - start
            sender = owner if owner in holders else sorted(holders)[owner % len(holders)]
            wave.gather.add((matrix, holders[sender]), sender=sender, receiver=owner)
            for receiver, holding in holders.items():
                wave.give_back.add((matrix, holding), sender=owner, receiver=receiver)
        assert elements == matrix.rows * matrix.columns, f"{matrix.key} is not complete on ranks {group.ranks}"
    return wave


class MatrixOptimizer(Optimizer):
    """For hidden matrices [r, c]; embeddings, head, norms and biases are AdamW's.

    Matrices are complete when they are worked on, however ranks share them. Each is dealt to one rank; the others send
    what it lacks and get back their parts of what comes out (`plan`). So ranks share the work, also those that hold the
    same matrices, and the numbers do not depend on the layout but for the rounding of gradients.

    `matrices`: parameters of nothing but hidden matrices, which the ranks of `group` have complete together.
    Collectives: where matrices are split, exchanges of `sends` numbers for each element over `group`, and where several
    ranks hold parts of one, of `returns` numbers. Each rank sends and receives about as many elements as it holds, at
    most."""

    keeps: bool  # `_after` needs the states

    def __init__(
        self, parameters: Sequence[FlatParameter], config: OptimizerConfig, states: Sequence[str], *, group: Group
    ) -> None:
        matrices = [flat for flat in parameters if flat.orthogonal]
        others = [flat for flat in parameters if not flat.orthogonal]
        super().__init__(matrices, config, states)
        self.parameters = [*matrices, *others]
        self._matrices, self._group = matrices, group
        # What `_before` gives of each element, and what `_work` changes of it: the first of them.
        self.sends, self.returns = OPTIMIZERS.facts(config.optimizer).exchanged
        self._adam = AdamW(others, config)
        self._states |= self._adam._states
        self._averages |= self._adam._averages
        self._waves = plan(matrices, config, group)

    @abstractmethod
    def _before(self, piece: Piece) -> Sequence[torch.Tensor]:
        """Before matrices are whole: step the states of a piece, and give what is needed of it."""

    @abstractmethod
    def _work(self, matrix: Matrix, wholes: Sequence[torch.Tensor]) -> None:
        """On a whole matrix: what `_before` gave of it, each [r, c]; the first `returns` of them are changed."""

    @abstractmethod
    def _after(self, piece: Piece, made: Sequence[torch.Tensor], update: Update) -> None:
        """Take up what `_work` has made of a piece."""

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        assert exchange is None, "matrices are stepped by reduced gradients"
        for wave in self._waves:
            self._step(wave, update)
        self._adam.updates = self.updates
        self._adam.step(update)
        self.updates += 1

    def _step(self, wave: Wave, update: Update) -> None:
        gather, back = wave.gather, wave.give_back
        held = [holding for _, holding in (*back.kept, *back.incoming)]
        visits = [
            (part, holding, slice(part[1] - holding.at, part[2] - holding.at))
            for holding in held
            for part in cut_part(self._matrices[holding.flat], holding.at, holding.at + holding.size)
        ]
        parts = [part for part, _, _ in visits]
        parcels = [_WaveValues(wave, self._empty) for _ in range(self.sends)]
        for (_, holding, within), piece in zip(visits, self.pieces(parts, values=False), strict=True):
            for parcel, values in zip(parcels, self._before(piece), strict=True):
                if holding in parcel.wanted:
                    parcel.wanted[holding][within] = values
        for parcel in parcels:
            received = self._exchange(gather, parcel.outgoing)
            for place, values in zip(gather.incoming, received, strict=True):
                parcel.at(place).copy_(values)
        for matrix in wave.owned:
            wholes = [parcel.whole(matrix, self._empty) for parcel in parcels]
            self._work(matrix, wholes)
            for parcel, whole in zip(parcels, wholes[: self.returns]):
                parcel.cut(matrix, whole)
        found = []
        for parcel in parcels[: self.returns]:
            own = {holding: parcel.at((matrix, holding)) for matrix, holding in back.kept}
            outgoing = torch.cat([self._empty(0), *map(parcel.at, back.outgoing)])
            own |= zip((holding for _, holding in back.incoming), self._exchange(back, outgoing), strict=True)
            found.append(own)
        pieces = self.pieces(parts, update, states=self.keeps)
        for (_, holding, within), piece in zip(visits, pieces, strict=True):
            self._after(piece, [own[holding][within] for own in found], update)

    def _exchange(self, traffic: Traffic, outgoing: torch.Tensor) -> Sequence[torch.Tensor]:
        """Send `outgoing`, in the order of `traffic.outgoing`; what comes instead, in that of `traffic.incoming`."""
        if not traffic.moves:
            return []
        ranks = range(self._group.size)
        splits = [
            [sum(holding.size for _, holding in way[rank]) for rank in ranks]
            for way in (traffic.received, traffic.sent)
        ]
        received = self._empty(sum(splits[0]))
        self._group.all_to_all(received, outgoing, *splits)
        return received.split([holding.size for _, holding in traffic.incoming])

    def _empty(self, size: int) -> torch.Tensor:
        return self._matrices[0].param.data.new_empty(size)


class _WaveValues:
    """One number of each element of a wave's matrices: on the owners in boxes, and what goes there from elsewhere."""

    def __init__(self, wave: Wave, empty: Callable[[int], torch.Tensor]) -> None:
        self._boxes = {
            (matrix.key, box): empty((box[1] - box[0]) * (box[3] - box[2]))
            for matrix in wave.owned
            for box in matrix.boxes
        }
        sizes = [holding.size for _, holding in wave.gather.outgoing]
        self.outgoing = empty(sum(sizes))
        self.wanted = {place[1]: self.at(place) for place in wave.gather.kept}
        """Where what this rank holds goes."""
        self.wanted |= zip((holding for _, holding in wave.gather.outgoing), self.outgoing.split(sizes), strict=True)

    def at(self, place: Place) -> torch.Tensor:
        """In its box on the owner."""
        matrix, holding = place
        return self._boxes[matrix.key, holding.box][holding.start : holding.stop]

    def whole(self, matrix: Matrix, empty: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """[r, c]."""
        found = empty(matrix.rows * matrix.columns).view(matrix.rows, matrix.columns)
        for box, part in self._parts(matrix, found):
            part.copy_(self._boxes[matrix.key, box].view(part.shape))
        return found

    def cut(self, matrix: Matrix, whole: torch.Tensor) -> None:
        """Back into boxes."""
        for box, part in self._parts(matrix, whole):
            self._boxes[matrix.key, box].view(part.shape).copy_(part)

    def _parts(self, matrix: Matrix, whole: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        return ((box, whole[box[0] : box[1], box[2] : box[3]]) for box in matrix.boxes)


def group_of(context: Context) -> Group:
    """The ranks that have all matrices complete: where replicas have their own weights each works on its own."""
    return context.topology.tp_dp_cp if context.replicas_agree else context.topology.tp
