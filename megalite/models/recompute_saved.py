"""Leaving a tensor out of what the backward keeps, and making it again there from what is kept anyway.

Checkpointing a norm or an activation alone would free nothing: the linear layer behind it holds its output for the
weight gradient. So the hold itself is replaced, and no matrix product runs twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


class _Remade:
    """A tensor that each backward makes once, when the first operation asks for it, and frees after the last."""

    def __init__(self, make: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> None:
        self._make = make
        self._inputs = inputs
        self._holders = self._waiting = 0
        self._value: torch.Tensor | None = None

    def hold(self) -> None:
        """One more operation would have kept the tensor."""
        self._holders += 1

    def get(self) -> torch.Tensor:
        """The tensor, for one of its holders."""
        if self._value is None:
            with torch.no_grad():
                self._value = self._make(*self._inputs)
            self._waiting = self._holders
        value = self._value
        self._waiting -= 1
        if self._waiting == 0:
            self._value = None
        return value


@dataclass(frozen=True)
class _Token:
    """What is kept in place of a view of the tensor."""

    remade: _Remade
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(kept: Any) -> torch.Tensor:
    if isinstance(kept, _Token):
        return kept.remade.get().as_strided(kept.size, kept.stride, kept.offset)
    return kept


@contextmanager
def not_saving(
    tensor: torch.Tensor, make: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> Iterator[None]:
    """Operations inside keep neither `tensor` nor views of it; their backward works on `make(*inputs)` instead.

    Not inside a checkpointed region: there nothing is kept, and this would keep `inputs`.

    Args:
        tensor: the output of `make(*inputs)` with memory of its own.
        make: gives the same bits and memory layout again; called without gradients.
        inputs: tensors that stay in memory until the backward anyway.
    """
    storage, dtype = tensor.untyped_storage().data_ptr(), tensor.dtype
    # Detached: a token must hold memory, not the graph behind it.
    remade = _Remade(make, tuple(each.detach() for each in inputs))

    def pack(saved: torch.Tensor) -> Any:
        if saved.numel() == 0 or saved.dtype != dtype or saved.untyped_storage().data_ptr() != storage:
            # An operation that saves its own output would hold itself if the hook gave it back with its graph.
            return saved if saved.is_leaf else saved.detach()
        remade.hold()
        return _Token(remade, saved.size(), saved.stride(), int(saved.storage_offset()))

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield
