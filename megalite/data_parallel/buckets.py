"""Group parameters of one kind into flat buckets: one buffer for their values and one for their gradients.

A bucket is one collective, one optimizer tensor and one term of the norm, instead of hundreds. Parameters that need
different treatment never share a bucket (`BucketKind`). Replicated and tied parameters therefore have the same offsets
on every rank with a copy, so the copies get bit-equal sums and cannot drift."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch.utils.hooks import RemovableHandle

from megalite.data_parallel.facts import BucketKind, cut_into_buckets, padded
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.group import DONE, Work


@dataclass(frozen=True)
class Placed:
    """A parameter and the offset of its first element in its bucket."""

    parameter: ShardedParameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()


class Bucket:
    """Parameters with values and gradients in two flat buffers, `data` and `grad`. `replicas`: number of ranks with the
    same bucket; zero padding makes both buffers split evenly over them. `allocate`: allocate the gradients now; otherwise
    `alloc_storage` does it later."""

    def __init__(
        self,
        kind: BucketKind,
        parameters: Sequence[ShardedParameter],
        *,
        replicas: int,
        grad_dtype: torch.dtype,
        allocate: bool = True,
    ) -> None:
        self.kind = kind
        self.placed: list[Placed] = []
        offset = 0
        for parameter in parameters:
            self.placed.append(Placed(parameter, offset))
            offset += parameter.numel()
        size, first = padded(offset, replicas), parameters[0]
        self.data = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.grad = torch.zeros(size, dtype=grad_dtype, device=first.device)
        self._hooks: dict[ShardedParameter, RemovableHandle] = {}
        self._unused_hooks: set[ShardedParameter] = set()
        """Matrices with a hook that found no gradient."""
        for placed in self.placed:
            self._adopt(placed)
        runs = groupby(self.placed, lambda placed: -1 if placed.parameter.dim() == 1 else placed.start)
        lists = [list(run) for _, run in runs]
        self._runs = [(self.grad[run[0].start : run[-1].stop], [each.parameter for each in run]) for run in lists]
        """Parameters that `collect` handles together: one matrix, or neighbouring biases and norms."""
        if any(placed.parameter.draw is not None for placed in self.placed):
            free_storage(self.data)  # until `draw`
        if not allocate:
            free_storage(self.grad)
        self._awaited = 0
        self._on_full: Callable[[], None] = lambda: None

    def _adopt(self, placed: Placed) -> None:
        """Move the parameter's value, if it has one yet, into `data`, and direct its gradients to `grad`."""
        parameter = placed.parameter
        view = self.data[placed.start : placed.stop].view(parameter.shape)
        if parameter.draw is None:
            view.copy_(parameter.data)
        parameter.data = view
        parameter.main_grad = self.grad[placed.start : placed.stop].view(parameter.shape)
        if parameter.dim() > 1:
            parameter.after_autograd = partial(self._on_matrix_grad, parameter)
            self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(_grad_given)

    def take_at_once(self) -> None:
        """Move every gradient from autograd as it arrives, without `collect`: the buffer has memory only temporarily."""
        self._runs.clear()
        for placed in self.placed:
            placed.parameter.after_autograd = partial(self._take, placed.parameter)
            if placed.parameter not in self._hooks:
                placed.parameter.register_post_accumulate_grad_hook(_grad_given)

    def draw(self) -> None:
        """Draw the first values of parameters with late initialization."""
        if not has_memory(self.data):
            alloc_storage(self.data)
            self.data.zero_()
            for placed in self.placed:
                assert placed.parameter.draw is not None
                placed.parameter.draw(placed.parameter.data)
                placed.parameter.draw = None

    def start_counting(self, on_full: Callable[[], None], pending: Counter[torch.nn.Parameter] | None = None) -> None:
        """Start to count gradients, and call `on_full` after the last one; at once if none is expected. `pending`: number
        of gradients that each parameter will still get; by default, those of one backward."""
        self._awaited = sum(awaited(placed.parameter, pending) for placed in self.placed)
        self._on_full = on_full
        for placed in self.placed:
            placed.parameter.grad_ready = self._count_down
        if self._awaited == 0:
            on_full()

    def stop_counting(self) -> None:
        for placed in self.placed:
            placed.parameter.grad_ready = None
        for _, parameters in self._runs:
            for parameter in parameters:
                parameter.grad = None

    @staticmethod
    def _take(parameter: ShardedParameter) -> None:
        """Move a gradient from autograd to the buffer."""
        grad, parameter.grad = parameter.grad, None
        if grad is not None:  # otherwise the layer's backward has already added it to the buffer
            parameter.accumulate(grad)

    def _on_matrix_grad(self, parameter: ShardedParameter) -> None:
        if parameter.grad is None:
            self._unused_hooks.add(parameter)
        self._take(parameter)

    def collect(self) -> None:
        """Move the gradients that autograd still stores, after a backward. A layer has up to eight vectors; they wait for
        this call, as neighbours then need one addition. Hooks move matrices, so that a model of plain torch does not store
        the gradients of all matrices. If a layer's backward adds to the buffer, its hook only costs time and is removed."""
        for parameter in self._unused_hooks:
            self._hooks[parameter].remove()
        self._unused_hooks.clear()
        for sums, parameters in self._runs:
            if len(parameters) == 1:
                if parameters[0].grad is not None:
                    self._take(parameters[0])
                continue
            grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
            if len(grads) == len(parameters):
                sums.add_(torch.cat(grads))
                for parameter in parameters:
                    parameter.grad = None
                    if parameter.grad_ready is not None:
                        parameter.grad_ready()
            elif grads:
                for parameter in parameters:
                    self._take(parameter)

    def _count_down(self) -> None:
        if self._awaited > 0:
            self._awaited -= 1
            if self._awaited == 0:
                self._on_full()

    def within(self, start: int, stop: int) -> Iterator[tuple[Placed, int, int]]:
        """Yield the parameters that overlap elements [start, stop), each with the common range of the bucket."""
        for placed in self.placed:
            first, last = max(placed.start, start), min(placed.stop, stop)
            if first < last:
                yield placed, first, last


def awaited(parameter: ShardedParameter, pending: Counter[torch.nn.Parameter] | None) -> int:
    """Return the number of gradients still to come: by `pending`, or those of one backward."""
    return parameter.info.uses if pending is None else pending[parameter]


def alloc_storage(flat: torch.Tensor) -> None:
    """Allocate the memory of a bucket's buffer again, uninitialized; its views and tensors saved by autograd use it."""
    flat.untyped_storage().resize_(flat.nbytes)


def free_storage(flat: torch.Tensor) -> None:
    """Free the memory of a bucket's buffer and of all its views, until `alloc_storage`."""
    flat.untyped_storage().resize_(0)


def has_memory(flat: torch.Tensor) -> bool:
    return flat.untyped_storage().nbytes() > 0


def _grad_given(parameter: torch.Tensor) -> None:
    """Call the parameter's handler. The hook itself references nothing: torch stores it where Python's cycle collector
    does not look, so whatever it references would never be freed."""
    assert isinstance(parameter, ShardedParameter)
    parameter.after_autograd()


def make_buckets(
    parameters: Iterable[ShardedParameter],
    *,
    bucket_size: int,
    replicas: Callable[[BucketKind], int],
    grad_dtype: torch.dtype,
    allocate: bool = True,
) -> list[Bucket]:
    """Return buckets of about `bucket_size` elements in reverse order of `parameters`, by `cut_into_buckets`.
    `replicas`: returns the number of ranks with the same bucket of a kind."""
    found = cut_into_buckets(dict.fromkeys(parameters), kind=_kind, size=torch.Tensor.numel, bucket_size=bucket_size)
    return [
        Bucket(kind, members, replicas=replicas(kind), grad_dtype=grad_dtype, allocate=allocate)
        for kind, members in found
    ]


def _kind(parameter: ShardedParameter) -> BucketKind:
    info = parameter.info
    return BucketKind(
        decay=info.decay,
        split_over_tp=info.shard_dim is not None,
        partial_over_tp=info.partial_over_tp,
        tied=info.tied,
        expert=info.expert,
        orthogonal=info.orthogonal,
        learning_rate=info.learning_rate,
        fp8=info.fp8,
    )


def parameters_of(module: torch.nn.Module, *, recurse: bool = True) -> tuple[ShardedParameter, ...]:
    """Return the parameters that have gradients."""
    return tuple(p for p in module.parameters(recurse=recurse) if isinstance(p, ShardedParameter) and p.requires_grad)


class ParameterWaits:
    """Makes each module wait for the buckets of its parameters just before its forward. With `overlap` False, modules do
    not wait; `wait_unless_overlapped` waits for all buckets."""

    def __init__(self, stages: Mapping[int, torch.nn.Module], buckets: Iterable[Bucket], *, overlap: bool) -> None:
        self._overlap = overlap
        self._coming: dict[Bucket, Work] = {}
        self.first_needed_first: dict[Bucket, None] = {}
        """All buckets, in the order of the next forward, which is the order of stages and of modules in them."""
        bucket_of = {placed.parameter: bucket for bucket in buckets for placed in bucket.placed}
        for module in (module for stage in stages.values() for module in stage.modules()):
            own = dict.fromkeys(bucket_of[parameter] for parameter in parameters_of(module, recurse=False))
            self.first_needed_first.update(own)
            if overlap and own:
                module.register_forward_pre_hook(lambda *_, own=own: self._wait_for(own))

    def _wait_for(self, buckets: Iterable[Bucket]) -> None:
        if self._coming:
            for bucket in buckets:
                self._coming.pop(bucket, DONE).wait()

    def expect(self, bucket: Bucket, work: Work) -> None:
        """Register that the bucket's parameters are complete once `work` is done."""
        self._coming[bucket] = work

    def wait_unless_overlapped(self) -> None:
        """Wait for all buckets if forwards do not wait by themselves. Call it after the last `expect`."""
        if not self._overlap:
            self.wait()

    def wait(self) -> None:
        for work in self._coming.values():
            work.wait()
        self._coming.clear()
