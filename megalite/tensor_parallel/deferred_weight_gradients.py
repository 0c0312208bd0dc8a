"""Deferred weight gradients, for pipeline schedules that split the backward (arXiv 2401.10241).

Input gradients run early, because other ranks wait for them; weight gradients fill idle time. Two autograd calls would
run every product of a custom function twice, and each recomputed region once per parameter. A deferred gradient costs
only two references.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class DeferredGradient(Protocol):
    """One microbatch's contribution to the gradient of one weight, with everything needed to compute it."""

    @property
    def parameter(self) -> torch.nn.Parameter: ...

    def start(self) -> None:
        """Start the communication that `compute` needs, if any."""

    def compute(self) -> Tensor | None:
        """Add the gradient to `main_grad` and report it; without `main_grad` return it in the weight's shape."""


class DeferredWeightGradients:
    """Deferred weight gradients of one virtual stage, by microbatch.

    Inputs and output gradients of the layers stay alive until `run`. This object contains all state, because autograd
    runs backwards of CUDA tensors in separate threads.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[DeferredGradient]] = {}
        self._current: deque[DeferredGradient] | None = None
        self.is_deferring = False
        """Whether a backward that defers its weight gradients is running."""

    @property
    def pending(self) -> int:
        """Number of microbatches with deferred gradients."""
        return len(self._waiting)

    @contextmanager
    def deferring(self, microbatch: int) -> Iterator[None]:
        """Defer weight gradients of the backward inside, if they are matrix products (not norms, biases, tables)."""
        assert self._current is None, f"another backward is deferred while that of microbatch {microbatch} starts"
        assert microbatch not in self._waiting, f"microbatch {microbatch} is deferred already and has not been run"
        self._current = self._waiting[microbatch] = deque()
        self.is_deferring = True
        try:
            yield
        finally:
            self._current, self.is_deferring = None, False

    def append(self, gradient: DeferredGradient) -> None:
        """Defer a contribution of the current microbatch."""
        assert self._current is not None, "nothing is being deferred"
        self._current.append(gradient)

    def parameters(self, microbatch: int) -> list[torch.nn.Parameter]:
        """Return the weights that `run` will report, in order and with repetitions."""
        return [gradient.parameter for gradient in self._of(microbatch)]

    @torch.no_grad()
    def run(self, microbatch: int) -> None:
        """Compute the microbatch's gradients in the order of an unsplit backward.

        They are added to `main_grad`, else to `.grad`, with the same bits as in an unsplit backward.

        Collectives: with sequence parallelism an all-gather of each column-parallel layer's input, each started before
        the previous product.
        """
        waiting = self._of(microbatch)
        del self._waiting[microbatch]
        # Like autograd, sum the contributions of one backward before adding them to .grad.
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
        """Drop the gradients that a failed step left."""
        self._waiting.clear()

    def _of(self, microbatch: int) -> deque[DeferredGradient]:
        assert microbatch in self._waiting, (
            f"microbatch {microbatch} is not deferred, or already run; deferred: {sorted(self._waiting)}"
        )
        return self._waiting[microbatch]
