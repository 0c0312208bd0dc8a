"""Implement LAMB, Adam with a step size per tensor proportional to the tensor's norm, and sums over whole tensors."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megalite.config.optimizer import HOST_PIECE, MOMENTS, OptimizerConfig
from megalite.config.run import RunConfig
from megalite.kernels.registry import Kernels
from megalite.optimizers.base import Context, Exchange, FlatParameter, Optimizer, Segment, Update
from megalite.topology.group import Group


class TensorSums:
    """Computes one number for each tensor of the whole model: each rank adds the elements that it counts
    (`Segment.counts`), and one all-reduce completes the sums of all tensors, the same on every rank in any layout.
    `parameters`: those with tensors to sum over; other ranks may have other ones, or none. `group`: the ranks that
    together count every element once.

    Collectives: one gather of the tensors' names over `group`, in the constructor."""

    def __init__(self, parameters: Sequence[FlatParameter], *, group: Group, device: torch.device) -> None:
        own = sorted({segment.name for flat in parameters for segment in flat.segments})
        self.names: list[str] = sorted(set().union(*group.gather_json(own)))
        """Names of all tensors, in the same order on every rank."""
        self._group, self.device = group, device
        self._column = {name: column for column, name in enumerate(self.names)}

    def column(self, segment: Segment) -> int:
        return self._column[segment.name]

    def zeros(self, rows: int) -> torch.Tensor:
        """Return zeros, fp64 [rows, tensors], for this rank's sums."""
        return torch.zeros(rows, len(self.names), dtype=torch.float64, device=self.device)

    def all_reduce(self, table: torch.Tensor, *, op: str = "sum") -> None:
        """Replace the table by the sums (or maxima) over all ranks, in place."""
        self._group.all_reduce(table, op=op)

    def totals(
        self, states: Sequence[tuple[FlatParameter, torch.Tensor]], amount: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return, fp64 [2, tensors], the sums over all ranks of `amount` of each part of a tensor, and of its elements."""
        table = self.zeros(2)
        for flat, values in states:
            for each in flat.segments:
                if each.counts:
                    table[0, self.column(each)] += amount(values[each.start : each.stop])
                    table[1, self.column(each)] += each.stop - each.start
        self.all_reduce(table)
        return table

    def read(self, table: torch.Tensor) -> Any:
        """Return the numbers as a list; the host waits for the device."""
        with self._group.heartbeat.synchronise():
            return table.tolist()


class PieceSums:
    """Adds numbers of pieces of tensors to sums per tensor, in three kernel launches and a fixed order. `columns`: for each
    piece, the column of its tensor in `sums`."""

    def __init__(self, columns: Sequence[int], sums: TensorSums) -> None:
        seen: Counter[int] = Counter()
        places = []
        for column in columns:
            places.append(seen[column] * len(sums.names) + column)
            seen[column] += 1
        self._sums, self._rows = sums, max(seen.values(), default=0)
        self._places = torch.tensor(places, dtype=torch.int64, device=sums.device)

    def of_pairs(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return, fp64 [2, tensors], the sums over all ranks of the squares of the pieces' norms: two of each piece, in turn."""
        squares = torch.stack([self._add_up(norms[::2]), self._add_up(norms[1::2])])
        self._sums.all_reduce(squares)
        return squares

    def _add_up(self, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
        table = self._sums.zeros(self._rows)
        if numbers:
            table.view(-1)[self._places] = torch.stack(list(numbers)).double().square()
        return table.sum(dim=0)


BLOCKS = {"cpu": 1 << 16, "cuda": HOST_PIECE}
"""Elements that are updated at a time: on a CPU they fit into its cache; on CUDA launches take a negligible time.
Temporaries have this size."""


def block_size(parameter: torch.Tensor) -> int:
    return BLOCKS["cpu" if parameter.device.type == "cpu" else "cuda"]


def trust_ratios(weights: torch.Tensor, updates: torch.Tensor, *, lowest: float, highest: float) -> torch.Tensor:
    """Return clip(‖x‖/‖u‖, lowest, highest), or 1 if a norm is 0; from ‖x‖² and ‖u‖² of each tensor, fp64."""
    known = (weights > 0.0) & (updates > 0.0)
    ratios = (weights / torch.where(known, updates, 1.0)).sqrt_().clamp_(lowest, highest)
    return torch.where(known, ratios, 1.0)


@dataclass(frozen=True, eq=False)
class Block:
    """A part of a flat parameter, inside one tensor if the tensor has a trust ratio."""

    flat: FlatParameter
    start: int
    stop: int
    column: int | None
    """Column of its tensor in the sums; None: the tensor has no trust ratio."""
    counts: bool  # this rank counts its squares

    @property
    def param(self) -> torch.nn.Parameter:
        return self.flat.param

    def of(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.start : self.stop]


def make_blocks(parameters: Sequence[FlatParameter], sums: TensorSums, *, every: bool = False) -> list[Block]:
    """Return blocks of all elements of `parameters`. Blocks of parameters that decay, or of `every` one, do not cross
    tensors."""
    found = []
    for flat in parameters:
        size = block_size(flat.param)
        ranges: list[tuple[int, int, int | None, bool]] = [(0, flat.param.numel(), None, False)]
        if flat.decay or every:
            ranges = [(each.start, each.stop, sums.column(each), each.counts) for each in flat.segments]
        for first, last, column, counts in ranges:
            starts = range(first, last, size)
            found += [Block(flat, start, min(start + size, last), column, counts) for start in starts]
    return found


class LAMB(Optimizer):
    """Large-batch Adam (arXiv 1904.00962), with bias correction as in its algorithm 2. For each tensor of the model

        u = m̂/(√v̂ + ε) + λx,   x -= lr · clip(‖x‖/‖u‖, lamb_min_coeff, lamb_max_coeff) · u

    The norms are those of the whole tensor in any layout; the experts of a layer are one tensor, and so are gate and up
    projection. Norms and biases, which do not decay, take Adam's step (a ratio of 1), as in the recipes for BERT: they
    start at 0 or 1, so their norm is unrelated to a good step size.

    The direction u is computed twice, for the norms and for the step, block by block in the cache: no temporary is as
    large as the parameters, and gradients do not change.

    `group`: all ranks of the step. `every`: norms and biases have trust ratios too.

    Collectives: per step one all-reduce of two fp64 numbers for each tensor."""

    def __init__(
        self,
        parameters: Sequence[FlatParameter],
        config: OptimizerConfig,
        *,
        group: Group,
        kernels: Kernels | None = None,
        every: bool = False,
    ) -> None:
        super().__init__(parameters, config, MOMENTS)
        device = parameters[0].param.device
        self._sums = TensorSums([flat for flat in parameters if flat.decay or every], group=group, device=device)
        self._blocks = make_blocks(parameters, self._sums, every=every)
        counted = [block.column for block in self._blocks if block.column is not None and block.counts]
        self._piece_sums = PieceSums(counted, self._sums)
        self._ratios = [1.0] * len(self._sums.names)
        kernels = kernels or Kernels()
        self._kernels = {
            flat.param: kernels.get("lamb", device=flat.param.device, dtype=flat.param.dtype, size=flat.param.numel())
            for flat in parameters
        }

    @classmethod
    def from_config(cls, parameters: Sequence[FlatParameter], config: RunConfig, context: Context) -> Optimizer:
        return cls(parameters, config.optimizer, group=context.topology.world, kernels=context.kernels)

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        assert exchange is None, "LAMB steps by reduced gradients"
        self.updates += 1
        c = self.config
        terms: dict[str, Any] = {"beta1": c.adam_beta1, "beta2": c.adam_beta2, "eps": c.adam_eps, "step": self.updates}
        norms: list[torch.Tensor] = []
        parts = [(block.flat, block.start, block.stop) for block in self._blocks]
        for block, piece in zip(self._blocks, self.pieces(parts), strict=True):
            lamb_moments, _ = self._kernels[block.param]
            norms += lamb_moments(
                *(piece.param, piece.grad, *piece.states),
                **terms,
                weight_decay=update.weight_decay * block.flat.decay,
                norms=block.column is not None and block.counts,
            )
        squares = self._piece_sums.of_pairs(norms)
        ratios = trust_ratios(*squares, lowest=c.lamb_min_coeff, highest=c.lamb_max_coeff)
        self._ratios = self._sums.read(ratios)
        for block, piece in zip(self._blocks, self.pieces(parts, update), strict=True):
            _, lamb_step = self._kernels[block.param]
            lamb_step(
                *(piece.param, *piece.states),
                **terms,
                rate=update.rate(block.flat) * (1.0 if block.column is None else self._ratios[block.column]),
                weight_decay=update.weight_decay * block.flat.decay,
            )

    @property
    def trust_ratios(self) -> dict[str, float]:
        """Trust ratios of the last step, for all tensors of the model by name; the same on every rank."""
        return dict(zip(self._sums.names, self._ratios, strict=True))
