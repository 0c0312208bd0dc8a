"""The weight half of a backward, put off: what linear layers note while a tape records, and the products made of it later.

Pipeline schedules that split the backward (arXiv 2401.10241) run input gradients early, since other ranks wait for
them, and fill their idle time with weight gradients. Asking autograd twice would run every product of a custom function
twice and each recomputed region once for every parameter; a note costs two references.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class OwedGradient(Protocol):
    """One contribution of one microbatch to the gradient of one weight, with all that it takes to compute it.

    Its tensors are detached: they hold memory, not the graph that the backward has just freed.
    """

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The weight."""

    def start(self) -> None:
        """Start the communication that `compute` needs, if any."""

    def compute(self) -> torch.Tensor | None:
        """Add the gradient to the weight's `main_grad` and report it; without one return it, like the weight in shape."""


def settle(owed: OwedGradient, tape: "WeightTape | None") -> torch.Tensor | None:
    """Leave the gradient to the tape if it records, else compute it now: what a backward returns for its weight."""
    if tape is not None and tape.is_recording:
        tape.append(owed)
        return None
    return owed.compute()


class WeightTape:
    """What the backward halves of one virtual stage owe its weights, by microbatch.

    The notes hold the layers' inputs and output gradients until `run`. State is in this object alone, as autograd runs
    backwards of CUDA tensors in threads of its own.
    """

    def __init__(self) -> None:
        self._owed: dict[int, deque[OwedGradient]] = {}
        self._current: deque[OwedGradient] | None = None

    @property
    def is_recording(self) -> bool:
        """A backward is under way whose weight gradients are to be noted."""
        return self._current is not None

    @property
    def pending(self) -> int:
        """Microbatches that are recorded and have not been run."""
        return len(self._owed)

    @contextmanager
    def recording(self, microbatch: int) -> Iterator[None]:
        """A backward inside gives input gradients alone (and what needs no matrix product: norms, biases, tables).

        Collectives: none beside those of the backward.
        """
        assert self._current is None, (
            f"a backward is being recorded while that of microbatch {microbatch} starts"
        )
        assert microbatch not in self._owed, (
            f"microbatch {microbatch} is recorded already and has not been run"
        )
        self._current = self._owed[microbatch] = deque()
        try:
            yield
        finally:
            self._current = None

    def append(self, owed: OwedGradient) -> None:
        """Note a contribution of the microbatch that is being recorded."""
        assert self._current is not None, "nothing is being recorded"
        self._current.append(owed)

    def owed(self, microbatch: int) -> list[torch.nn.Parameter]:
        """The weights that `run` will report, in order, each as often as it will."""
        return [owed.parameter for owed in self._recorded(microbatch)]

    @torch.no_grad()
    def run(self, microbatch: int) -> None:
        """Compute what the microbatch owes, in the order in which its backward would have, and forget it.

        Gradients are added to `main_grad`, else to `.grad`, to the bit as an unsplit backward adds them.

        Collectives: with sequence parallelism an all-gather of each column-parallel layer's input, one of them under way
        ahead of the product.
        """
        waiting = self._recorded(microbatch)
        del self._owed[microbatch]
        # Autograd adds up what one backward gives a parameter before it adds that to .grad.
        returned: dict[torch.nn.Parameter, torch.Tensor] = {}
        if waiting:
            waiting[0].start()
        while waiting:
            current = waiting.popleft()
            if waiting:
                waiting[0].start()
            grad = current.compute()
            if grad is not None:
                parameter = current.parameter
                returned[parameter] = returned[parameter] + grad if parameter in returned else grad
        for parameter, grad in returned.items():
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    def forget(self) -> None:
        """Drop what is owed: of a step that failed."""
        self._owed.clear()

    def _recorded(self, microbatch: int) -> deque[OwedGradient]:
        assert microbatch in self._owed, (
            f"microbatch {microbatch} was not recorded, or has been run already; recorded: {sorted(self._owed)}"
        )
        return self._owed[microbatch]
