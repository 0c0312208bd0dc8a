"""What optimizers have in common whose ranks exchange signs of momentum once the second moment is frozen."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.kernels.lamb import Direction
from megalite.optimizers.base import Exchange, Optimizer
from megalite.optimizers.flat import FlatParameter, Update
from megalite.optimizers.freeze import FreezePoint
from megalite.optimizers.lamb import BLOCKS


def second_moment_norm(
    parameters: Sequence[FlatParameter], optimizer: Optimizer, correction: float
) -> torch.Tensor:
    """This rank's part of ‖v/correction‖₁, fp64."""
    total = torch.zeros((), dtype=torch.float64, device=parameters[0].param.device)
    for flat in parameters:
        if flat.segments and flat.segments[0].counts:
            total += optimizer.state(flat.param)["exp_avg_sq"].sum(dtype=torch.float64)
    return total / correction


def silence(values: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """In place: 0 where the second moment v is. What got no gradient in the warm-up has no scale to step by: a sign there
    stands for the others' size and would, divided by ε, be a huge step; so it stays as it is."""
    # v is not negative. A product is several times as fast as a mask, on a CPU.
    return values.mul_(moment.sign())


def ranges(parameter: torch.Tensor) -> Iterator[slice]:
    """All elements, as many at a time as LAMB takes."""
    size = BLOCKS["cpu" if parameter.device.type == "cpu" else "cuda"]
    for start in range(0, parameter.numel(), size):
        yield slice(start, min(start + size, parameter.numel()))


class FrozenMoments(Optimizer):
    """A base optimizer in the warm-up; then v stays, and each rank's momentum goes by its own gradient and is averaged:

        m_i = β₁m + (1-β₁)g_i;   m = mean over ranks of m_i, by signs;   a step along m̂/(√v̂ + ε)

    v̂ = v/(1-β₂ᵏ) with the k updates that v has had when it is frozen: without that a short warm-up would leave every
    later step 1/√(1-β₂ᵏ) times too long.

    Args:
        base: of the warm-up; its states `exp_avg` and `exp_avg_sq` are the moments.
    """

    def __init__(
        self,
        parameters: Sequence[FlatParameter],
        base: Optimizer,
        config: OptimizerConfig,
        freeze: FreezePoint,
    ) -> None:
        self.parameters, self.notes, self.freeze = parameters, [], freeze
        self._base, self._config = base, config

    def reduces_gradients(self, step: int) -> bool:
        """In the warm-up."""
        return not self.freeze.frozen(step, self._base.updates)

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        """The base's step, or a frozen one.

        Collectives: those of the base or of `exchange`, and what `_frozen_step` says; those of `FreezePoint.observe`.
        """
        if self.reduces_gradients(update.step):
            self._base.step(update)
            self._warmed()
            correction = 1.0 - self._config.adam_beta2**self._base.updates
            note = self.freeze.observe(
                update.step, lambda: second_moment_norm(self.parameters, self._base, correction)
            )
            if note:
                self.notes.append(note)
            return
        assert exchange is not None, "gradients are this rank's own"
        if self.freeze.updates is None:
            self.freeze.updates = max(self._base.updates, 1)
            self._freeze()
        self._base.set_updates(self._base.updates + 1)
        self._frozen_step(update, exchange)

    def _warmed(self) -> None:
        """A step of the warm-up has been made."""

    def _freeze(self) -> None:
        """The first frozen step comes."""

    @abstractmethod
    def _frozen_step(self, update: Update, exchange: Exchange) -> None:
        """One step along the exchanged momentum; `updates` counts it already."""

    @property
    def _variance_correction(self) -> float:
        """1 - β₂ᵏ of the frozen moment."""
        assert self.freeze.updates is not None
        return 1.0 - self._config.adam_beta2**self.freeze.updates

    @property
    def _direction(self) -> Direction:
        """m̂/(√v̂ + ε) of the update under way."""
        c = self._config
        return Direction.at(
            self._base.updates,
            beta1=c.adam_beta1,
            beta2=c.adam_beta2,
            eps=c.adam_eps,
            frozen=self.freeze.updates,
        )

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The two moments."""
        return self._base.state(parameter)

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self._base.updates

    def set_updates(self, updates: int) -> None:
        """Go on as if `updates` updates had been made."""
        self._base.set_updates(updates)

    def counters(self) -> dict[str, Any]:
        """When the second moment was frozen."""
        return self.freeze.counters()

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Take up saved `counters`."""
        self.freeze.load_counters(counters)
