"""How many bytes a second the memory moves: copies, sums, and the optimizer's pass over its states."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.adam import AdamW
from megalite.optimizers.flat import FlatParameter, Update
from megalite.profiling.timing import Timer, Timing

OPERATIONS = ("copy", "add", "adam")
ADAM_BYTES = 28
"""An element of AdamW in fp32: it reads parameter, gradient and two moments and writes all but the gradient."""


@dataclass(frozen=True, kw_only=True)
class MemoryTime:
    """One pass over tensors of `elements` fp32 numbers each."""

    operation: str
    elements: int
    bytes_moved: int
    timing: Timing

    @property
    def bytes_per_second(self) -> float:
        """Achieved."""
        return self.bytes_moved / self.timing.seconds


def tensor_sizes(*, most_elements: float) -> list[int]:
    """Elements of tensors: from what a cache holds to what none does, 64 Ki to at most 64 Mi; at least the first two."""
    sizes = [2**16, 2**20, 2**22, 2**24, 2**26]
    return [size for size in sizes if size <= max(most_elements, sizes[1])]


def first_bandwidth(timer: Timer) -> float:
    """About how many bytes a second an optimizer's pass moves; the same on every rank."""
    elements = 2**26 if timer.device.type == "cuda" else 2**20
    *_, (_, moved, run) = _passes(elements, timer.device)
    return moved / timer.over_ranks(timer.each(run, seconds=0.0)).seconds


def measure_memory(timer: Timer, *, sizes: list[int], seconds: float) -> Iterator[MemoryTime]:
    """Copy, sum and optimizer step at each size; every rank at once, `seconds` in all.

    Collectives: barriers and gathers over the timer's world.
    """
    each = seconds / max(1, len(sizes) * len(OPERATIONS))
    for elements in sizes:
        for operation, bytes_moved, run in _passes(elements, timer.device):
            timing = timer.over_ranks(timer.each(run, seconds=each))
            yield MemoryTime(operation=operation, elements=elements, bytes_moved=bytes_moved, timing=timing)


def _passes(elements: int, device: torch.device) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """(operation, bytes of a pass, the pass)."""
    a, b, c = (torch.zeros(elements, device=device) for _ in range(3))
    yield "copy", 8 * elements, lambda: c.copy_(a)
    yield "add", 12 * elements, lambda: torch.add(a, b, out=c)
    parameter = torch.nn.Parameter(a)
    parameter.grad = b
    optimizer = AdamW([FlatParameter(param=parameter, decay=True, segments=())], OptimizerConfig())
    update = Update(step=1, lr=1e-3, weight_decay=0.01)
    yield "adam", ADAM_BYTES * elements, lambda: optimizer.step(update)
