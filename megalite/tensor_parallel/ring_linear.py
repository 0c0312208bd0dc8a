"""Linear layers at the border of the sequence-parallel region that multiply while rows travel.

The all-gather before a column-parallel layer becomes tp - 1 steps round the ring of ranks, under each of which the rows
that have arrived are multiplied; the reduce-scatter after a row-parallel layer becomes as many steps of a sum that
follows its rows, under each of which the next addend is multiplied. The backward of each is the other. As Megatron-LM's
--tp-comm-overlap and Wang et al., ASPLOS 2023 (Overlap communication with dependent computation via decomposition).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megalite.kernels.bases import Function
from megalite.kernels.matmul import Matmul
from megalite.tensor_parallel.parameter import ShardedParameter, linear_weight_gradient
from megalite.topology.group import DONE, Group, Work


def arriving(part: Tensor, tp: Group) -> Iterator[tuple[int, Tensor]]:
    """Each rank's contiguous part with its rank, this rank's own first; the next one is under way until it is asked for.

    Collectives: tp - 1 exchanges with the neighbours.
    """
    for step in range(tp.size):
        last = step == tp.size - 1
        following, work = (part, DONE) if last else tp.rotate_async(part)
        yield (tp.rank - step) % tp.size, part
        work.wait()
        part = following


@dataclass
class _LastAddend:
    """The sum of the other ranks, on its way to this rank's own part of it."""

    work: Work
    total: Tensor
    others: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.total.add_(self.others)


def sum_of_parts(make: Callable[[int], Tensor], tp: Group) -> tuple[Tensor, Work]:
    """This rank's part of the sum over ranks, complete after `wait()`; sums go in the order of the ring.

    `make(rank)` is what this rank adds to another one's part, in its own contiguous memory; called once per rank.

    Collectives: tp - 1 exchanges with the neighbours.
    """
    total = make((tp.rank - 1) % tp.size)
    last: Work = DONE
    for step in range(1, tp.size):
        last.wait()
        others, work = tp.rotate_async(total)
        total = make((tp.rank - 1 - step) % tp.size)
        last = _LastAddend(work, total, others)
    return total, last


class Pieces(Protocol):
    """How a layer at the border of the sequence-parallel region multiplies while rows travel; outside autograd."""

    def gather(
        self, x: Tensor, columns: Tensor, bias: Tensor | None = None, *, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """x [s/tp, b, i], gathered over the sequence, · columns [i, o] + bias [o] -> [s, b, o]; and x gathered, if it is to
        be kept."""

    def scatter(self, x: Tensor, columns: Tensor) -> tuple[Tensor, Work]:
        """x [s, b, i] · columns [i, o], summed over ranks -> this rank's [s/tp, b, o], complete after `wait()`."""


class Ring:
    """`Pieces` round the ring of ranks. Collectives of either: tp - 1 exchanges with the neighbours."""

    def __init__(self, tp: Group, matmul: Matmul) -> None:
        self._tp, self._matmul = tp, matmul

    def gather(
        self, x: Tensor, columns: Tensor, bias: Tensor | None = None, *, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        y = x.new_empty(self._tp.size, *x.shape[:-1], columns.shape[1])
        whole = x.new_empty(self._tp.size, *x.shape) if keep else None
        for rank, part in arriving(x.contiguous(), self._tp):
            self._matmul(part.flatten(0, -2), columns, bias, out=y[rank].flatten(0, -2))
            if whole is not None:
                whole[rank] = part
        return y.flatten(0, 1), None if whole is None else whole.flatten(0, 1)

    def scatter(self, x: Tensor, columns: Tensor) -> tuple[Tensor, Work]:
        parts = x.unflatten(0, (self._tp.size, -1))
        return sum_of_parts(lambda rank: self._matmul(parts[rank], columns), self._tp)


class _Scattered(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ShardedParameter, pieces: Pieces) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.pieces = weight, pieces
        y, summing = pieces.scatter(x, weight.t())
        summing.wait()
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_x, gathered = ctx.pieces.gather(grad_y, weight, keep=True)
        gradient = linear_weight_gradient(weight, x, gathered.flatten(0, -2), None)
        return grad_x, gradient.compute_or_defer(weight.deferred), None


def scattered_linear(x: Tensor, weight: ShardedParameter, pieces: Pieces) -> Tensor:
    """x [s, b, i/tp] · weight [o, i/tp]ᵀ, summed over tp and split over the sequence -> [s/tp, b, o].

    Collectives: those of `pieces`, each way.
    """
    return _Scattered.apply(x, weight, pieces)
