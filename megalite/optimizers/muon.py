"""Muon: the update of a matrix is its momentum, made orthogonal; and which rank works on which matrix."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.config.run import RunConfig
from megalite.optimizers.adam import AdamW
from megalite.optimizers.base import Context, Exchange, FlatParameter, Optimizer, Part, Update, cut_part
from megalite.topology.group import Group

WAVE = 1 << 26
"""Elements that a rank has of matrices in work at the same time, at most: a bound for the buffers."""

Key = tuple[str, int]
"""A tensor's name and the number of the matrix in it."""

Box = tuple[int, int, int, int]
"""First row, one past the last, and columns likewise."""


class Holding(NamedTuple):
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

    key: Key
    rows: int
    columns: int
    holdings: tuple[Holding, ...]

    @property
    def boxes(self) -> list[Box]:
        """What the slices of tensor parallelism cut it into."""
        return sorted({holding.box for holding in self.holdings})

    @property
    def cost(self) -> int:
        """Multiplications of a product with its Gram matrix."""
        return self.rows * self.columns * min(self.rows, self.columns)


Place = tuple[Matrix, Holding]


@dataclass
class Traffic:
    """One exchange: parts of matrices that go from rank to rank, all of one wave.

    Both ends list what passes between two ranks in the same order, that of matrices and holdings.
    """

    rank: int
    """This one."""
    sent: defaultdict[int, list[Place]] = field(default_factory=lambda: defaultdict(list))
    """By receiver."""
    received: defaultdict[int, list[Place]] = field(default_factory=lambda: defaultdict(list))
    """By sender."""
    kept: list[Place] = field(default_factory=list)
    """What stays on this rank."""
    moves: bool = False
    """Some rank sends something."""

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

    owned: list[Matrix]
    """Those that this rank works on."""
    gather: Traffic
    """To the owners; a holding is the sender's."""
    give_back: Traffic
    """From the owners to all ranks with a part; a holding is the receiver's."""


def plan(parameters: Sequence[FlatParameter], group: Group, device: torch.device) -> list[Wave]:
    """Deal out the matrices of `parameters` over the ranks of `group`, which together have every one of them complete.

    A matrix is the last two dimensions of a tensor; further ones in front count matrices (experts, gate and up). Where
    several ranks have the same elements, with the same values, one of them sends them: the owner itself if it can. Large
    matrices are dealt out first, each to the rank with the least work so far.

    Collectives: what each rank has is gathered over `group`.
    """
    own = [
        [index, each.start, each.offset, each.stop - each.start, each.name, each.global_shape, each.slice]
        for index, flat in enumerate(parameters)
        for each in flat.segments
    ]
    found: defaultdict[Key, list[Holding]] = defaultdict(list)
    shapes: dict[Key, tuple[int, int]] = {}
    for rank, segments in enumerate(group.gather_json(own, device)):
        for flat, at, offset, length, name, shape, bounds in segments:
            for number, box, start, stop in _parts(shape, bounds, offset, offset + length):
                found[name, number].append(Holding(box, start, stop, rank, flat, at))
                shapes[name, number] = (shape[-2], shape[-1])
                at += stop - start
    matrices = [Matrix(key, *shapes[key], tuple(sorted(holdings))) for key, holdings in found.items()]
    work = [0] * group.size
    return [_deal(wave, group, work) for wave in _cut(sorted(matrices, key=lambda each: (-each.cost, each.key)))]


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


def _deal(matrices: Sequence[Matrix], group: Group, work: list[int]) -> Wave:
    """Owners, and what travels to and from them; `work` is what each rank has to do so far."""
    wave = Wave([], Traffic(group.rank), Traffic(group.rank))
    for matrix in matrices:
        owner = work.index(min(work))
        work[owner] += matrix.cost
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


QUINTIC = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's coefficients: steepest at 0, at the price of singular values between 0.7 and 1.2 instead of 1."""
SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
}
"""Factors of `muon_scale_mode`, by arXiv 2502.16982, Keller Jordan and Jeremy Bernstein."""
FUSED = ".attention.qkv.weight"
"""Queries, keys and values in one tensor, group by group."""
EPS = 1e-7
"""Least norm that a matrix is divided by."""


def orthogonalise(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The nearest orthogonal matrix U·Vᵀ of U·S·Vᵀ [r, c], roughly: `steps` Newton-Schulz iterations

        X <- aX + bAX + cA²X,  A = X·Xᵀ,

    which drive every singular value from (0, 1] towards 1. In the matrix's own precision, also on CUDA, where others use
    bf16: shared out over ranks the products take little time, and results hang less on the hardware.
    """
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / torch.linalg.vector_norm(x).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(Optimizer):
    """For hidden matrices [r, c] (Jordan 2024; scaled as in arXiv 2502.16982, with decoupled decay):

        b = μb + (1-μ)g,   x = (1 - lr·λ)x - lr·muon_scale·s(r, c)·orthogonalise((1-μ)g + μb)

    With s = √max(r, c), the mode `spectral`, the root mean square of a full-rank update is muon_scale, about that of AdamW:
    learning rate and weight decay can be AdamW's. Without Nesterov it is b that is made orthogonal. Embeddings, head, norms
    and biases are AdamW's. Queries, keys and values of a layer are separate matrices unless `muon_split_qkv` is off; so are
    gate and up projection, and every expert's.

    Matrices are complete when they are orthogonalised, however ranks share them. Each is dealt to one rank; the others send
    what it lacks of the momentum and get back their parts of the update (`plan`). So ranks share the work, also
    those that hold the same matrices, and the numbers do not depend on the layout but for the rounding of gradients.

    Args:
        matrices: parameters of nothing but hidden matrices, which the ranks of `group` have complete together.
        fused: rows of the queries, the key and the value of each group in a matrix of all three; None: it is one matrix.

    Collectives: where matrices are split, an exchange of the momentum over `group`, and where several ranks hold parts of
    one, an exchange of the update. Each rank sends and receives about as many elements as it holds, at most.
    """

    def __init__(
        self,
        matrices: Sequence[FlatParameter],
        others: Sequence[FlatParameter],
        config: OptimizerConfig,
        *,
        group: Group,
        fused: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__(matrices, config, ["momentum_buffer"])
        self._fused = fused
        self.parameters = [*matrices, *others]
        self._matrices, self._group = matrices, group
        self._adam = AdamW(others, config)
        self._states |= self._adam._states
        self._averages |= self._adam._averages
        self._waves = plan(matrices, group, others[0].param.device)

    @classmethod
    def from_config(cls, parameters: Sequence[FlatParameter], config: RunConfig, context: Context) -> Optimizer:
        matrices = [flat for flat in parameters if flat.orthogonal]
        others = [flat for flat in parameters if not flat.orthogonal]
        # Where replicas have their own weights each orthogonalises its own matrices.
        group = context.topology.tp_dp_cp if context.replicas_agree else context.topology.tp
        model, fused = config.model, None
        if config.optimizer.muon_split_qkv:
            fused = model.num_attention_heads // model.query_groups * model.head_size, model.head_size, model.head_size
        return cls(matrices, others, config.optimizer, group=group, fused=fused)

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        assert exchange is None, "Muon steps by reduced gradients"
        for wave in self._waves:
            self._step(wave, update)
        self._adam.updates = self.updates
        self._adam.step(update)
        self.updates += 1

    def _step(self, wave: Wave, update: Update) -> None:
        boxes = {
            (matrix.key, box): self._empty((box[1] - box[0]) * (box[3] - box[2]))
            for matrix in wave.owned
            for box in matrix.boxes
        }

        def in_box(matrix: Matrix, holding: Holding) -> torch.Tensor:
            return boxes[matrix.key, holding.box][holding.start : holding.stop]

        gather, back, config = wave.gather, wave.give_back, self.config
        held = [holding for _, holding in (*back.kept, *back.incoming)]
        outgoing = self._empty(sum(holding.size for _, holding in gather.outgoing))
        wanted = {holding: in_box(matrix, holding) for matrix, holding in gather.kept}
        places = outgoing.split([holding.size for _, holding in gather.outgoing])
        wanted |= zip((holding for _, holding in gather.outgoing), places, strict=True)
        visits = self._visits(held, wanted)
        pieces = self.pieces([part for part, _ in visits], values=False)
        for (_, target), piece in zip(visits, pieces, strict=True):
            (buffer,) = piece.states
            buffer.lerp_(piece.grad, 1.0 - config.muon_momentum)
            if target is not None and config.muon_nesterov:
                torch.lerp(piece.grad, buffer, config.muon_momentum, out=target)
            elif target is not None:
                target.copy_(buffer)
        for (matrix, holding), values in zip(gather.incoming, self._exchange(gather, outgoing), strict=True):
            in_box(matrix, holding).copy_(values)
        for matrix in wave.owned:
            self._orthogonalise(matrix, boxes)
        found = {holding: in_box(matrix, holding) for matrix, holding in back.kept}
        outgoing = torch.cat([self._empty(0), *(in_box(*place) for place in back.outgoing)])
        found |= zip((holding for _, holding in back.incoming), self._exchange(back, outgoing), strict=True)
        visits = self._visits(held, found)
        pieces = self.pieces([part for part, _ in visits], update, states=False)
        for (_, change), piece in zip(visits, pieces, strict=True):
            assert change is not None
            if piece.flat.decay:
                piece.param.mul_(update.kept_of(piece.flat))
            piece.param.sub_(change, alpha=update.rate(piece.flat))

    def _visits(
        self, held: Sequence[Holding], values: Mapping[Holding, torch.Tensor]
    ) -> list[tuple[Part, torch.Tensor | None]]:
        """The parts of flat parameters that make up what this rank holds, each with its part of a holding's `values`."""
        found = []
        for holding in held:
            flat, of = self._matrices[holding.flat], values.get(holding)
            for part in cut_part(flat, holding.at, holding.at + holding.size):
                first, last = part[1] - holding.at, part[2] - holding.at
                found.append((part, None if of is None else of[first:last]))
        return found

    def _orthogonalise(self, matrix: Matrix, boxes: dict[tuple[Key, Box], torch.Tensor]) -> None:
        whole = self._empty(matrix.rows * matrix.columns).view(matrix.rows, matrix.columns)
        views = {box: whole[box[0] : box[1], box[2] : box[3]] for box in matrix.boxes}
        for box, view in views.items():
            view.copy_(boxes[matrix.key, box].view(view.shape))
        parts: Sequence[torch.Tensor] = [whole]
        if self._fused is not None and matrix.key[0].endswith(FUSED):
            parts = whole.view(-1, sum(self._fused), matrix.columns).split(self._fused, dim=1)
        for part in parts:
            rows = part.reshape(-1, matrix.columns)
            scale = self.config.muon_scale * SCALES[self.config.muon_scale_mode](*rows.shape)
            part.copy_(orthogonalise(rows, self.config.muon_steps).mul_(scale).view(part.shape))
        for box, view in views.items():
            boxes[matrix.key, box].view(view.shape).copy_(view)

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
