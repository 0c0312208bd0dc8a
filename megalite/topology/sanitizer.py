"""Detect wrong use of asynchronous communication: a tensor read before its wait, or written while in flight.

An operation works on copies of the caller's tensors. Until `wait()` its output contains NaN (integers: a value that no
code expects), even if the operation has finished. `wait()` checks bit by bit that neither inputs nor outputs changed.
So results cannot depend on when a message happens to arrive."""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megalite.topology.group import DONE, Group, Work

_PACKAGE = str(Path(__file__).parents[1])
_BETWEEN = (f"{_PACKAGE}/topology/", f"{_PACKAGE}/rehearsal/")
_LONGEST_DELAY = 2e-4  # seconds


class CommunicationFault(RuntimeError):
    """A tensor was used while an operation was in flight."""


def calling_line() -> str:
    """Return `file:line` of the code in this package that called a group, or else of the caller outside it."""
    frame, outside = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_BETWEEN):
            outside = outside or f"{name}:{frame.f_lineno}"
            if name.startswith(_PACKAGE):
                return f"{name.removeprefix(_PACKAGE + '/')}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return outside


def poison(tensor: Tensor) -> None:
    """Fill with values that no code can mistake for a result. Every second float is a number, as scaling NaN or adding
    to it would change no bit."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
        if tensor.is_contiguous():
            tensor.view(-1)[1::2] = 1.2345
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(0xA5 if tensor.dtype == torch.uint8 else torch.iinfo(tensor.dtype).min + 0xA5)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


@dataclass(eq=False)
class _Guarded:
    """An operation in flight on copies."""

    group: "SanitizedGroup"
    text: str
    work: Work
    results: Sequence[tuple[Tensor, Tensor]]  # (the caller's tensor, the copy that the operation writes)
    guarded: Sequence[Tensor]  # the caller's tensors that it reads or writes
    _before: list[Tensor] = field(init=False)
    _is_waited_for: bool = False

    def __post_init__(self) -> None:
        for tensor, _ in self.results:
            poison(tensor)
        self._before = [_bits(tensor).clone() for tensor in self.guarded]

    def wait(self) -> None:
        if self._is_waited_for:
            return
        self._is_waited_for = True
        self.group.delay()
        self.work.wait()
        for tensor, before in zip(self.guarded, self._before, strict=True):
            if not torch.equal(_bits(tensor), before):
                raise CommunicationFault(
                    f"{self.text}: a tensor of {tuple(tensor.shape)} was written before the operation was waited for; wait "
                    "first, or write elsewhere"
                )
        for tensor, result in self.results:
            tensor.copy_(result)
        self._before.clear()

    def __del__(self) -> None:
        if not self._is_waited_for:
            self.group.forgotten.append(self.text)


@dataclass(frozen=True, eq=False)
class SanitizedGroup(Group):
    """A `Group` that checks the use of its asynchronous operations. Raises CommunicationFault: in `wait()`, and in the
    next operation after one that was never waited for."""

    forgotten: list[str] = field(default_factory=list)  # operations that were dropped without a wait
    _random: random.Random = field(default_factory=lambda: random.Random(1), repr=False)

    def delay(self) -> None:
        """Sleep for a random time, so that messages arrive in an unusual order."""
        time.sleep(self._random.random() * _LONGEST_DELAY)

    def _guard(
        self, name: str, work: Work, results: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor] = ()
    ) -> Work:
        if self.forgotten:
            raise CommunicationFault(f"{self.forgotten.pop()} was never waited for; keep what starting it returned")
        text = f"rank {self.ranks[self.rank]}: {name} over {self.name} started at {calling_line()}"
        return _Guarded(self, text, work, results, [*inputs, *(tensor for tensor, _ in results)])

    def _into_copy(self, name: str, start: Callable[[Tensor, Tensor], Work], output: Tensor, tensor: Tensor) -> Work:
        """Start an operation that reads `tensor` and writes `output`, on copies of both."""
        if self.size == 1:
            return start(output, tensor)
        result = torch.empty_like(output)
        return self._guard(name, start(result, tensor.clone()), [(output, result)], [tensor])

    def all_reduce_async(self, tensor: Tensor, *, op: str = "sum") -> Work:
        if self.size == 1:
            return DONE
        result = tensor.clone()
        return self._guard("all_reduce", super().all_reduce_async(result, op=op), [(tensor, result)])

    def all_gather_async(self, output: Tensor, part: Tensor) -> Work:
        return self._into_copy("all_gather", super().all_gather_async, output, part)

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._into_copy("reduce_scatter", super().reduce_scatter_async, output, tensor)

    def all_to_all_async(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Work:
        start = partial(super().all_to_all_async, output_splits=output_splits, input_splits=input_splits)
        return self._into_copy("all_to_all of uneven parts", start, output, tensor)

    def all_to_all_equal_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._into_copy("all_to_all", super().all_to_all_equal_async, output, tensor)

    def rotate_async(self, tensor: Tensor) -> tuple[Tensor, Work]:
        if self.size == 1:
            return tensor, DONE
        result, work = super().rotate_async(tensor.clone())
        received = torch.empty_like(result)
        return received, self._guard("rotate", work, [(received, result)], [tensor])

    def send_async(self, tensor: Tensor, *, to: int) -> Work:
        return self._guard("send", super().send_async(tensor.clone(), to=to), [], [tensor])

    def receive_async(self, tensor: Tensor, *, source: int) -> Work:
        result = torch.empty_like(tensor)
        return self._guard("receive", super().receive_async(result, source=source), [(tensor, result)])
