"""Define the base class of optimizers that need whole matrices: assign matrices to ranks, gather and return their parts."""

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
from megalite.optimizers.base import Context, Exchange, FlatParameter, FlatPart, Optimizer, Update, cut_part
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


class MatrixOptimizer(Optimizer):
    """Steps hidden matrices [r, c] as a whole; AdamW steps embeddings, head, norms and biases.

    Each matrix has one owner. The other ranks send the owner the parts that it lacks, and receive their parts of the
    result (`plan`). So ranks share the work, also ranks with the same matrices, and results do not depend on the layout
    except through the rounding of gradients.

    `group`: the ranks that together have all hidden matrices complete.
    Collectives: exchanges over `group`, of `sends` numbers per element if ranks split matrices, and of `returns` numbers
    if other ranks than the owner have parts. Each rank sends and receives at most about as many elements as it has."""

    needs_states_after: bool  # `_after` needs the states

    def __init__(
        self, parameters: Sequence[FlatParameter], config: OptimizerConfig, states: Sequence[str], *, group: Group
    ) -> None:
        matrices = [flat for flat in parameters if flat.orthogonal]
        others = [flat for flat in parameters if not flat.orthogonal]
        super().__init__(matrices, config, states)
        self.parameters = [*matrices, *others]
        self._matrices, self._group = matrices, group
        # Numbers per element that `_before` returns, and that `_work` changes (the first ones).
        self.sends, self.returns = OPTIMIZERS.facts(config.optimizer).exchanged
        self._adam = AdamW(others, config)
        self._states |= self._adam._states
        self._averages |= self._adam._averages
        self._waves = plan(matrices, config, group)

    @abstractmethod
    def _before(self, piece: FlatPart) -> Sequence[torch.Tensor]:
        """Step the states of a piece, before matrices are gathered, and return the tensors that `_work` needs."""

    @abstractmethod
    def _work(self, matrix: Matrix, wholes: Sequence[torch.Tensor]) -> None:
        """Process a whole matrix: `wholes` are the tensors of `_before`, each [r, c]; change the first `returns`."""

    @abstractmethod
    def _after(self, piece: FlatPart, results: Sequence[torch.Tensor], update: Update) -> None:
        """Update a piece by its part of the tensors that `_work` changed."""

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        assert exchange is None, "matrices are stepped by reduced gradients"
        for wave in self._waves:
            self._step(wave, update)
        self._adam.updates = self.updates
        self._adam.step(update)
        self.updates += 1

    def _step(self, wave: Wave, update: Update) -> None:
        gather, scatter = wave.gather, wave.scatter
        visits = [
            (part, owned, slice(part[1] - owned.at, part[2] - owned.at))
            for _, owned in (*scatter.local, *scatter.incoming)
            for part in cut_part(self._matrices[owned.flat], owned.at, owned.at + owned.size)
        ]
        parts = [part for part, _, _ in visits]
        buffers = [_WaveValues(wave, self._empty) for _ in range(self.sends)]
        for (_, owned, within), piece in zip(visits, self.pieces(parts, values=False), strict=True):
            for buffer, values in zip(buffers, self._before(piece), strict=True):
                if owned in buffer.inputs:
                    buffer.inputs[owned][within] = values
        for buffer in buffers:
            received = self._exchange(gather, buffer.outgoing)
            for matrix_part, values in zip(gather.incoming, received, strict=True):
                buffer.at(matrix_part).copy_(values)
        for matrix in wave.owned:
            wholes = [buffer.whole(matrix, self._empty) for buffer in buffers]
            self._work(matrix, wholes)
            for buffer, whole in zip(buffers, wholes[: self.returns]):
                buffer.cut(matrix, whole)
        results = []
        for buffer in buffers[: self.returns]:
            own = {owned: buffer.at((matrix, owned)) for matrix, owned in scatter.local}
            outgoing = torch.cat([self._empty(0), *map(buffer.at, scatter.outgoing)])
            own |= zip((owned for _, owned in scatter.incoming), self._exchange(scatter, outgoing), strict=True)
            results.append(own)
        pieces = self.pieces(parts, update, states=self.needs_states_after)
        for (_, owned, within), piece in zip(visits, pieces, strict=True):
            self._after(piece, [own[owned][within] for own in results], update)

    def _exchange(self, traffic: Traffic, outgoing: torch.Tensor) -> Sequence[torch.Tensor]:
        """Send `outgoing`, in the order of `traffic.outgoing`; return the parts of `traffic.incoming`."""
        if not traffic.moves:
            return []
        ranks = range(self._group.size)
        splits = [
            [sum(owned.size for _, owned in by_rank[rank]) for rank in ranks]
            for by_rank in (traffic.received, traffic.sent)
        ]
        received = self._empty(sum(splits[0]))
        self._group.all_to_all(received, outgoing, *splits)
        return received.split([owned.size for _, owned in traffic.incoming])

    def _empty(self, size: int) -> torch.Tensor:
        return self._matrices[0].param.data.new_empty(size)


class _WaveValues:
    """Buffers for one number per element of a wave's matrices: boxes of owned matrices, and parts to send to owners."""

    def __init__(self, wave: Wave, empty: Callable[[int], torch.Tensor]) -> None:
        self._boxes = {
            (matrix.key, box): empty((box[1] - box[0]) * (box[3] - box[2]))
            for matrix in wave.owned
            for box in matrix.boxes
        }
        sizes = [owned.size for _, owned in wave.gather.outgoing]
        self.outgoing = empty(sum(sizes))
        self.inputs = {part[1]: self.at(part) for part in wave.gather.local}
        """Range of this rank -> its elements in a box or in `outgoing`."""
        self.inputs |= zip((owned for _, owned in wave.gather.outgoing), self.outgoing.split(sizes), strict=True)

    def at(self, part: MatrixPart) -> torch.Tensor:
        """Return the elements of a part in its box; on the owner."""
        matrix, owned = part
        return self._boxes[matrix.key, owned.box][owned.start : owned.stop]

    def whole(self, matrix: Matrix, empty: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Return the matrix [r, c], assembled from its boxes."""
        found = empty(matrix.rows * matrix.columns).view(matrix.rows, matrix.columns)
        for box, part in self._parts(matrix, found):
            part.copy_(self._boxes[matrix.key, box].view(part.shape))
        return found

    def cut(self, matrix: Matrix, whole: torch.Tensor) -> None:
        """Copy the matrix back into its boxes."""
        for box, part in self._parts(matrix, whole):
            self._boxes[matrix.key, box].view(part.shape).copy_(part)

    def _parts(self, matrix: Matrix, whole: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        return ((box, whole[box[0] : box[1], box[2] : box[3]]) for box in matrix.boxes)


def group_of(context: Context) -> Group:
    """Return the ranks that share the work on matrices: those of one pipeline rank, or only the tp ranks of one replica
    if replicas have different weights."""
    return context.topology.tp_dp_cp if context.replicas_agree else context.topology.tp
