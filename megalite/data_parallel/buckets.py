"""Flat buckets: parameters of one kind share one buffer for their values and one for their gradients.

One bucket is one collective, one optimizer tensor and one term of the norm, instead of hundreds. Parameters that
need different treatment never share one: each bucket is uniform in weight decay, in what tensor parallelism does
with it, in being tied and in belonging to experts, which other ranks hold copies of. Replicated and tied parameters
therefore sit at the same offsets on every rank that holds a copy, so the copies see bit-equal sums and cannot drift.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megalite.tensor_parallel.parameter import ShardedParameter


class BucketKind(NamedTuple):
    """What all parameters of a bucket have in common."""

    decay: bool
    split_over_tp: bool
    partial_over_tp: bool
    tied: bool
    expert: bool
    orthogonal: bool = False


@dataclass(frozen=True)
class Placed:
    """A parameter and where it starts in its bucket."""

    parameter: ShardedParameter
    start: int

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.parameter.numel()


class Bucket:
    """Parameters whose values (`data`) and gradients (`grad`) are views of two flat buffers.

    Args:
        align: both buffers are padded with zeros to a multiple of this, so that they split evenly over dp.
        holds_grad: the gradients' memory is taken at once; else by `take_memory`.
    """

    def __init__(
        self,
        kind: BucketKind,
        parameters: list[ShardedParameter],
        *,
        align: int,
        grad_dtype: torch.dtype,
        holds_grad: bool = True,
    ) -> None:
        self.kind = kind
        self.placed: list[Placed] = []
        offset = 0
        for parameter in parameters:
            self.placed.append(Placed(parameter, offset))
            offset += parameter.numel()
        size = -(-offset // align) * align
        first = parameters[0]
        self.data = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.grad = torch.zeros(size, dtype=grad_dtype, device=first.device)
        for placed in self.placed:
            self._adopt(placed)
        if not holds_grad:
            give_memory(self.grad)
        self._awaited = 0
        self._on_full: Callable[[], None] = lambda: None

    def _adopt(self, placed: Placed) -> None:
        """Move the parameter's value into the buffer and let its gradients flow into the other."""
        parameter = placed.parameter
        view = self.data[placed.start : placed.stop].view(parameter.shape)
        view.copy_(parameter.data)
        parameter.data = view
        parameter.main_grad = self.grad[placed.start : placed.stop].view(parameter.shape)
        parameter.grad_ready = self._note
        # Parameters that are used outside our linear layers and lookups get their gradient from autograd.
        parameter.register_post_accumulate_grad_hook(_move_to_main_grad)

    def arm(self, on_full: Callable[[], None], pending: Counter[torch.nn.Parameter] | None = None) -> None:
        """From now on count gradients; `on_full` is called once each parameter's last one has come.

        Args:
            pending: how many are still to come of each parameter; those of one whole backward by default. If none are,
                `on_full` is called at once.
        """
        members = [placed.parameter for placed in self.placed]
        if pending is None:
            self._awaited = sum(parameter.info.uses for parameter in members)
        else:
            self._awaited = sum(pending[parameter] for parameter in members)
        self._on_full = on_full
        if self._awaited == 0:
            on_full()

    def disarm(self) -> None:
        """Count no longer."""
        self._awaited = 0

    def _note(self) -> None:
        if self._awaited > 0:
            self._awaited -= 1
            if self._awaited == 0:
                self._on_full()


def take_memory(flat: torch.Tensor) -> None:
    """Give a bucket's buffer its memory back, with any contents; its views, and what autograd has saved, see it again."""
    flat.untyped_storage().resize_(flat.nbytes)


def give_memory(flat: torch.Tensor) -> None:
    """Let a bucket's buffer and all its views be without memory, until `take_memory`."""
    flat.untyped_storage().resize_(0)


def has_memory(flat: torch.Tensor) -> bool:
    """The buffer may be read and written."""
    return flat.untyped_storage().nbytes() > 0


def _move_to_main_grad(parameter: torch.Tensor) -> None:
    assert isinstance(parameter, ShardedParameter)
    grad, parameter.grad = parameter.grad, None
    if grad is not None:  # None: the layer's own backward has put it where it belongs
        parameter.accumulate(grad)


def make_buckets(
    parameters: Iterable[ShardedParameter],
    *,
    bucket_size: int,
    align: Callable[[BucketKind], int],
    grad_dtype: torch.dtype,
    holds_grad: bool = True,
) -> list[Bucket]:
    """Buckets of about `bucket_size` elements in reverse order of `parameters`: the order in which gradients come.

    Args:
        align: what the size of a bucket of this kind is a multiple of.
        holds_grad: see `Bucket`.
    """
    open_buckets: dict[BucketKind, list[ShardedParameter]] = {}
    closed: list[tuple[BucketKind, list[ShardedParameter]]] = []
    for parameter in reversed(list(dict.fromkeys(parameters))):
        info = parameter.info
        kind = BucketKind(
            *(info.decay, info.shard_dim is not None, info.partial_over_tp, info.tied, info.expert),
            info.orthogonal,
        )
        members = open_buckets.setdefault(kind, [])
        members.append(parameter)
        if sum(member.numel() for member in members) >= bucket_size:
            closed.append((kind, open_buckets.pop(kind)))
    closed.extend(open_buckets.items())
    return [
        Bucket(kind, members, align=align(kind), grad_dtype=grad_dtype, holds_grad=holds_grad)
        for kind, members in closed
    ]
