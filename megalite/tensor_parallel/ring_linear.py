"""Linear layers at the border of the sequence-parallel region that multiply while rows travel.

The all-gather before a column-parallel layer becomes tp - 1 steps round the ring of ranks, under each of which the rows
that have arrived are multiplied; the reduce-scatter after a row-parallel layer becomes as many steps of a sum that
follows its rows, under each of which the next addend is multiplied. The backward of each is the other. As Megatron-LM's
--tp-comm-overlap and Wang et al., ASPLOS 2023 (Overlap communication with dependent computation via decomposition).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.matmul import Matmul
from megalite.kernels.matmul import matmul as torch_matmul
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


def gathered_matmul(x: Tensor, columns: Tensor, bias: Tensor | None, *, tp: Group, matmul: Matmul) -> Tensor:
    """x [s/tp, b, i], gathered over the sequence, · columns [i, o] + bias [o] -> [s, b, o]; outside autograd."""
    y = x.new_empty(tp.size, *x.shape[:-1], columns.shape[1])
    for rank, part in arriving(x.contiguous(), tp):
        matmul(part.flatten(0, -2), columns, bias, out=y[rank].flatten(0, -2))
    return y.flatten(0, 1)


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ShardedParameter, tp: Group, matmul: Matmul) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.tp, ctx.matmul = weight, tp, matmul
        parts = x.unflatten(0, (tp.size, -1))
        y, summing = sum_of_parts(lambda rank: matmul(parts[rank], weight.t()), tp)
        summing.wait()
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, tp = ctx.saved_tensors, ctx.weight, ctx.tp
        gathered = grad_y.new_empty(tp.size, *grad_y.shape)
        grad_x = x.new_empty(x.shape)
        parts = grad_x.unflatten(0, (tp.size, -1))
        for rank, part in arriving(grad_y.contiguous(), tp):
            ctx.matmul(part.flatten(0, -2), weight, out=parts[rank].flatten(0, -2))
            gathered[rank] = part
        gradient = linear_weight_gradient(weight, x, gathered.flatten(0, -2), None)
        return grad_x, gradient.compute_or_defer(weight.deferred), None, None


def scattered_linear(x: Tensor, weight: ShardedParameter, *, tp: Group, matmul: Matmul = torch_matmul) -> Tensor:
    """x [s, b, i/tp] · weight [o, i/tp]ᵀ, summed over tp and split over the sequence -> [s/tp, b, o].

    Collectives: tp - 1 exchanges with the neighbours, each way.
    """
    return _Scattered.apply(x, weight, tp, matmul)
