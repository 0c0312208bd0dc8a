"""What every optimizer offers to the training step, the data-parallel strategies and the checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megalite.optimizers.flat import FlatParameter, Update

Exchange = Callable[[FlatParameter, torch.Tensor], None]
"""In place: a flat tensor like the parameter becomes its mean over the data-parallel ranks, as far as the wire lets it."""


class Optimizer(ABC):
    """Steps flat parameters from their `.grad`. States are made at once, so that memory is known at the start and a
    checkpoint has a place to go."""

    parameters: Sequence[FlatParameter]
    notes: list[str]
    """Lines for the log, the same on every rank; the training loop takes them out after each step."""
    applies_factor: bool = False
    """`step` multiplies gradients with `update.factor` itself, in the pass that it makes anyway."""
    writes_copies: bool = False
    """`step` fills `update.copies`, in the same pass."""
    from_zeros: frozenset[str] = frozenset()
    """Names of state tensors that a checkpoint need not have: it is another optimizer's, and they start from 0."""

    @abstractmethod
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        """Update all parameters. Unless it `applies_factor`, gradients have been multiplied with that already.

        Args:
            exchange: given where `reduces_gradients(update.step)` is False: gradients are this rank's own.

        Collectives: those of `exchange`, and small sums over the world where whole tensors' norms are needed.
        """

    def reduces_gradients(self, step: int) -> bool:
        """The step needs gradients summed over ranks; else the optimizer averages states of its own."""
        return True

    def alone(self, parameters: Sequence[FlatParameter], *, freeze_step: int) -> "Optimizer | None":
        """One of the same kind over other `parameters`, which no other rank has a part in, that reduces gradients up to
        step `freeze_step` and not after it: to see what steps cost. None: this one always reduces gradients."""
        return None

    @abstractmethod
    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The flat state tensors of one parameter, of its shape, by name; writing into them changes the state."""

    def tensor_state(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """(state, tensor name) -> what there is once a tensor of the model, such as a trust ratio. All ranks that hold a
        part of the tensor have the same; writing into it changes the state."""
        return {}

    @property
    @abstractmethod
    def updates(self) -> int:
        """Updates made so far; bias correction depends on it. With fp16 it is less than the number of steps."""

    @abstractmethod
    def set_updates(self, updates: int) -> None:
        """Go on as if `updates` updates had been made."""

    def counters(self) -> dict[str, Any]:
        """Further numbers that a checkpoint keeps: the same on every rank, and plain JSON."""
        return {}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Take up saved `counters`; those of another optimizer (or none) are passed over."""
