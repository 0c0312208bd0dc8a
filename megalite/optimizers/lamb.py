"""LAMB: Adam whose step is as long, for each tensor, as the tensor is large."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.base import Exchange, Optimizer
from megalite.optimizers.flat import FlatParameter, Update
from megalite.optimizers.tensor_sums import Pieces, TensorSums, norm
from megalite.topology.group import Group

STATES = ("exp_avg", "exp_avg_sq")
"""Names of the state tensors, each of the shape of its parameter."""

BLOCKS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements that are updated at a time: on a CPU what fits into its cache, on CUDA so many that launches do not count.
Temporaries are of this size."""


def trust_ratios(
    weights: torch.Tensor, updates: torch.Tensor, *, lowest: float, highest: float
) -> torch.Tensor:
    """clip(‖x‖/‖u‖, lowest, highest), and 1 where a norm is 0.

    Args:
        weights: ‖x‖² of each tensor, fp64.
        updates: ‖u‖², likewise.
    """
    known = (weights > 0.0) & (updates > 0.0)
    ratios = (weights / torch.where(known, updates, 1.0)).sqrt_().clamp_(lowest, highest)
    return torch.where(known, ratios, 1.0)


@dataclass(frozen=True, eq=False)
class Block:
    """A part of a flat parameter that lies in one tensor, or anywhere where tensors are not told apart."""

    param: torch.nn.Parameter
    start: int
    stop: int
    column: int | None
    """Of its tensor among the sums; None: the tensor has no trust ratio."""
    counts: bool
    """Its squares are counted on this rank."""

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Its part of a tensor like the parameter."""
        return values[self.start : self.stop]


def make_blocks(parameters: Sequence[FlatParameter], sums: TensorSums) -> list[Block]:
    """All elements of `parameters`, each once; those that decay tensor by tensor."""
    found = []
    for flat in parameters:
        size = BLOCKS["cpu" if flat.param.device.type == "cpu" else "cuda"]
        ranges: list[tuple[int, int, int | None, bool]] = [(0, flat.param.numel(), None, False)]
        if flat.decay:
            ranges = [(each.start, each.stop, sums.column(each), each.counts) for each in flat.segments]
        found += [
            Block(flat.param, start, min(start + size, last), column, counts)
            for first, last, column, counts in ranges
            for start in range(first, last, size)
        ]
    return found


@dataclass(frozen=True, kw_only=True)
class Direction:
    """m̂/(√v̂ + ε) = scale·m/(√v + eps) in one update."""

    scale: float
    """√(1 - β₂ᵗ)/(1 - β₁ᵗ)"""
    eps: float
    """ε·√(1 - β₂ᵗ)"""

    @classmethod
    def of(cls, config: OptimizerConfig, updates: int, *, frozen: int | None = None) -> "Direction":
        """With the bias corrections of update number `updates`, from 1.

        Args:
            frozen: updates that v has had, where it has not had all.
        """
        below = math.sqrt(1.0 - config.adam_beta2 ** (updates if frozen is None else frozen))
        return cls(scale=below / (1.0 - config.adam_beta1**updates), eps=config.adam_eps * below)

    def add_to(
        self, values: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, *, factor: float = 1.0
    ) -> torch.Tensor:
        """In place: values + factor·m̂/(√v̂ + ε)."""
        return values.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(self.eps), value=factor * self.scale)


class LAMB(Optimizer):
    """Large-batch Adam (arXiv 1904.00962), with bias correction as in its algorithm 2. For each tensor of the model

        u = m̂/(√v̂ + ε) + λx,   x -= lr · clip(‖x‖/‖u‖, lamb_min_coeff, lamb_max_coeff) · u

    The norms are of the whole tensor, however it is split; the experts of a layer are one tensor, and so are gate and up
    projection. Norms and biases, which do not decay, take Adam's step (a ratio of 1), as in the recipes for BERT: they
    start at 0 or 1 and their size says nothing of the step that suits them.

    The direction u is computed twice, for the norms and for the step, block by block in the cache: no temporary is as
    large as the parameters, and gradients stay as they are.

    Args:
        group: all ranks that make the step.

    Collectives: one all-reduce of two fp64 numbers for each tensor a step.
    """

    def __init__(self, parameters: Sequence[FlatParameter], config: OptimizerConfig, *, group: Group) -> None:
        self.parameters, self.notes = parameters, []
        self._config, self._updates = config, 0
        device = parameters[0].param.device
        self._sums = TensorSums([flat for flat in parameters if flat.decay], group=group, device=device)
        self._blocks = make_blocks(parameters, self._sums)
        counted = [block.column for block in self._blocks if block.column is not None and block.counts]
        self._pieces = Pieces(counted, self._sums)
        self._states = {
            flat.param: {name: torch.zeros_like(flat.param, requires_grad=False) for name in STATES}
            for flat in parameters
        }
        self._ratios = [1.0] * len(self._sums.names)

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        """Moments and norms, the ratios, then the step. Waits for the device once, for the ratios."""
        assert exchange is None, "LAMB goes by reduced gradients"
        self._updates += 1
        direction = Direction.of(self._config, self._updates)
        norms: list[torch.Tensor] = []
        for block in self._blocks:
            self._take_gradient(block)
            if block.column is not None and block.counts:
                norms += self._norms(block, direction, update.weight_decay)
        squares = torch.stack([self._pieces.add_up(norms[::2]), self._pieces.add_up(norms[1::2])])
        self._sums.all_reduce(squares)
        c = self._config
        self._ratios = trust_ratios(*squares, lowest=c.lamb_min_coeff, highest=c.lamb_max_coeff).tolist()
        for block in self._blocks:
            lr, values = update.lr, block.of(block.param.data)
            if block.column is not None:
                lr *= self._ratios[block.column]
                values.mul_(1.0 - lr * update.weight_decay)
            direction.add_to(values, *self._moments(block), factor=-lr)

    def _moments(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        exp_avg, exp_avg_sq = (self._states[block.param][name] for name in STATES)
        return block.of(exp_avg), block.of(exp_avg_sq)

    def _take_gradient(self, block: Block) -> None:
        assert block.param.grad is not None
        grad = block.of(block.param.grad)
        exp_avg, exp_avg_sq = self._moments(block)
        exp_avg.lerp_(grad, 1.0 - self._config.adam_beta1)
        exp_avg_sq.mul_(self._config.adam_beta2).addcmul_(grad, grad, value=1.0 - self._config.adam_beta2)

    def _norms(self, block: Block, direction: Direction, weight_decay: float) -> tuple[torch.Tensor, ...]:
        """‖x‖ and ‖u‖ of a block."""
        values = block.of(block.param.data)
        u = direction.add_to(values * weight_decay, *self._moments(block))
        return norm(values), norm(u)

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The two moments."""
        return dict(self._states[parameter])

    @property
    def trust_ratios(self) -> dict[str, float]:
        """Those of the last step by tensor, of all tensors of the model, the same on every rank."""
        return dict(zip(self._sums.names, self._ratios, strict=True))

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self._updates

    def set_updates(self, updates: int) -> None:
        """Go on as if `updates` updates had been made."""
        self._updates = updates
