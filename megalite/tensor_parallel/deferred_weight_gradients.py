"""Weight gradients that a backward leaves for later, for pipeline schedules that split it (arXiv 2401.10241).

Input gradients run early, since other ranks wait for them; weight gradients fill the time in which ranks would be idle.
Asking autograd twice would run every product of a custom function twice, and each recomputed region once for every
parameter. A deferred gradient costs two references instead.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class DeferredGradient(Protocol):
    """One contribution of one microbatch to the gradient of one weight, with all that it takes to compute it."""

    @property
    def parameter(self) -> torch.nn.Parameter: ...

    def start(self) -> None:
        """Start the communication that `compute` needs, if any."""

    def compute(self) -> Tensor | None:
        """Add the gradient to the weight's `main_grad` and report it; without one return it, like the weight in shape."""


class DeferredWeightGradients:
    """The weight gradients that one virtual stage has put off, by microbatch.

    Inputs and output gradients of the layers stay alive until `run`. State is in this object alone, as autograd runs
    backwards of CUDA tensors in its own threads.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[DeferredGradient]] = {}
        self._current: deque[DeferredGradient] | None = None
        self.is_deferring = False
        """A backward is under way that defers its weight gradients."""

    @property
    def pending(self) -> int:
        """Microbatches that are deferred and have not been run."""
        return len(self._waiting)

    @contextmanager
    def deferring(self, microbatch: int) -> Iterator[None]:
        """A backward inside gives input gradients alone (and what needs no matrix product: norms, biases, tables)."""
        assert self._current is None, f"another backward is deferred while that of microbatch {microbatch} starts"
        assert microbatch not in self._waiting, f"microbatch {microbatch} is deferred already and has not been run"
        self._current = self._waiting[microbatch] = deque()
        self.is_deferring = True
        try:
            yield
        finally:
            self._current, self.is_deferring = None, False

    def append(self, gradient: DeferredGradient) -> None:
        """Defer a contribution of the microbatch under way."""
        assert self._current is not None, "nothing is being deferred"
        self._current.append(gradient)

    def parameters(self, microbatch: int) -> list[torch.nn.Parameter]:
        """The weights that `run` will report, in order, each as often as it will."""
        return [gradient.parameter for gradient in self._of(microbatch)]

    @torch.no_grad()
    def run(self, microbatch: int) -> None:
        """Compute the microbatch's gradients, in the order in which its backward would have.

        They are added to `main_grad`, else to `.grad`, to the bit as an unsplit backward adds them.

        Collectives: with sequence parallelism an all-gather of each column-parallel layer's input, one of them under way
        ahead of the product.
        """
        waiting = self._of(microbatch)
        del self._waiting[microbatch]
        # Autograd adds up what one backward gives a parameter before it adds that to .grad.
        returned: dict[torch.nn.Parameter, Tensor] = {}
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

    def clear(self) -> None:
        """Drop what a step that failed has left."""
        self._waiting.clear()

    def _of(self, microbatch: int) -> deque[DeferredGradient]:
        assert microbatch in self._waiting, (
            f"microbatch {microbatch} is not deferred, or has been run; deferred: {sorted(self._waiting)}"
        )
        return self._waiting[microbatch]
