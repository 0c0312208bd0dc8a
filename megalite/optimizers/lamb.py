"""LAMB: Adam whose step is as long, for each tensor, as the tensor is large."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.kernels.registry import Kernels
from megalite.optimizers.base import Exchange, Optimizer
from megalite.optimizers.flat import FlatParameter, Update
from megalite.optimizers.tensor_sums import Pieces, TensorSums
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
        kernels: where the kernel comes from: what comes before norms are summed over ranks, and what after.

    Collectives: one all-reduce of two fp64 numbers for each tensor a step.
    """

    def __init__(
        self,
        parameters: Sequence[FlatParameter],
        config: OptimizerConfig,
        *,
        group: Group,
        kernels: Kernels | None = None,
    ) -> None:
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
        kernels = kernels or Kernels()
        self._kernels = {
            flat.param: kernels.get(
                "lamb", device=flat.param.device, dtype=flat.param.dtype, size=flat.param.numel()
            )
            for flat in parameters
        }

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        """Moments and norms, the ratios, then the step. Waits for the device once, for the ratios."""
        assert exchange is None, "LAMB goes by reduced gradients"
        self._updates += 1
        c = self._config
        terms: dict[str, Any] = {
            "beta1": c.adam_beta1,
            "beta2": c.adam_beta2,
            "eps": c.adam_eps,
            "step": self._updates,
        }
        norms: list[torch.Tensor] = []
        for block in self._blocks:
            assert block.param.grad is not None
            lamb_moments, _ = self._kernels[block.param]
            norms += lamb_moments(
                *(block.of(block.param.data), block.of(block.param.grad), *self._moments(block)),
                **terms,
                weight_decay=self._decay(block, update),
                norms=block.column is not None and block.counts,
            )
        squares = torch.stack([self._pieces.add_up(norms[::2]), self._pieces.add_up(norms[1::2])])
        self._sums.all_reduce(squares)
        self._ratios = trust_ratios(*squares, lowest=c.lamb_min_coeff, highest=c.lamb_max_coeff).tolist()
        for block in self._blocks:
            _, lamb_step = self._kernels[block.param]
            lamb_step(
                *(block.of(block.param.data), *self._moments(block)),
                **terms,
                rate=update.lr * (1.0 if block.column is None else self._ratios[block.column]),
                weight_decay=self._decay(block, update),
            )

    def _moments(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        exp_avg, exp_avg_sq = (self._states[block.param][name] for name in STATES)
        return block.of(exp_avg), block.of(exp_avg_sq)

    def _decay(self, block: Block, update: Update) -> float:
        return 0.0 if block.column is None else update.weight_decay

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
