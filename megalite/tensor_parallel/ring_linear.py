"""Linear layers at the border of the sequence-parallel region that multiply while rows travel.

The all-gather before a column-parallel layer becomes tp - 1 steps round the ring of ranks, under each of which the rows
that have arrived are multiplied; the reduce-scatter after a row-parallel layer becomes as many steps of a sum that
follows its rows, under each of which the next addend is multiplied. The backward of each is the other. The bytes are
those of the collectives. Source: the overlap of Megatron-LM's --tp-comm-overlap; decomposition as in Wang et al., ASPLOS
2023 (Overlap communication with dependent computation via decomposition).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megalite.kernels.matmul import Matmul
from megalite.kernels.matmul import matmul as torch_matmul
from megalite.tensor_parallel.deferred_weight_gradients import compute_or_defer
from megalite.tensor_parallel.parameter import LinearWeightGradient, ShardedParameter
from megalite.topology.group import DONE, Group, Work


def arriving(part: torch.Tensor, tp: Group) -> Iterator[tuple[int, torch.Tensor]]:
    """Each rank's part with its rank, this rank's own first; the next one is under way until it is asked for.

    Args:
        part: contiguous.

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
    total: torch.Tensor
    others: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        self.total.add_(self.others)


def sum_of_parts(make: Callable[[int], torch.Tensor], tp: Group) -> tuple[torch.Tensor, Work]:
    """This rank's part of the sum over ranks, complete after `wait()`; sums go in the order of the ring.

    Args:
        make: what this rank adds to another one's part, in its own contiguous memory; called once per rank.

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


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: ShardedParameter, bias: ShardedParameter | None, tp: Group, matmul: Matmul
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.has_bias, ctx.tp, ctx.matmul = weight, bias is not None, tp, matmul
        columns = weight.flatten(0, -2).t()
        y = x.new_empty(tp.size, *x.shape[:-1], columns.shape[1])
        for rank, part in arriving(x.contiguous(), tp):
            matmul(part.flatten(0, -2), columns, bias, out=y[rank].flatten(0, -2))
        return y.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight, tp = ctx.saved_tensors, ctx.weight, ctx.tp
        grad_y = grad_y.contiguous()
        grad_rows = grad_y.flatten(0, -2)
        gradient = LinearWeightGradient(weight, x.detach(), grad_rows, tp)
        if weight.deferred is None or not weight.deferred.is_deferring:
            gradient.start()
        parts, matrix = grad_y.unflatten(0, (tp.size, -1)), weight.flatten(0, -2)
        grad_x, summing = sum_of_parts(lambda rank: ctx.matmul(parts[rank], matrix), tp)
        grad_weight = compute_or_defer(gradient, weight.deferred)
        grad_bias = grad_rows.sum(0) if ctx.has_bias else None
        summing.wait()
        return grad_x, grad_weight, grad_bias, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: ShardedParameter, tp: Group, matmul: Matmul) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.tp, ctx.matmul = weight, tp, matmul
        parts = x.unflatten(0, (tp.size, -1))
        y, summing = sum_of_parts(lambda rank: matmul(parts[rank], weight.t()), tp)
        summing.wait()
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight, tp = ctx.saved_tensors, ctx.weight, ctx.tp
        gathered = grad_y.new_empty(tp.size, *grad_y.shape)
        grad_x = x.new_empty(x.shape)
        parts = grad_x.unflatten(0, (tp.size, -1))
        for rank, part in arriving(grad_y.contiguous(), tp):
            ctx.matmul(part.flatten(0, -2), weight, out=parts[rank].flatten(0, -2))
            gathered[rank] = part
        gradient = LinearWeightGradient(weight, x.detach(), gathered.flatten(0, -2), None)
        return grad_x, compute_or_defer(gradient, weight.deferred), None, None


def gathered_linear(
    x: torch.Tensor,
    weight: ShardedParameter,
    bias: ShardedParameter | None,
    *,
    tp: Group,
    matmul: Matmul = torch_matmul,
) -> torch.Tensor:
    """x [s/tp, b, i], gathered over the sequence, · weight [o/tp, i]ᵀ + bias [o/tp] -> [s, b, o/tp].

    `linear` with sequence parallelism in pieces: a weight of more than two dimensions counts as [-1, i], and weight gradients
    go where those of `linear` go.

    Collectives: tp - 1 exchanges with the neighbours / an all-gather of x (in W where the backward is split) and tp - 1
    exchanges.
    """
    if bias is not None and bias.dim() > 1:
        return _Gathered.apply(x, weight, None, tp, matmul) + bias.flatten()
    return _Gathered.apply(x, weight, bias, tp, matmul)


def scattered_linear(
    x: torch.Tensor, weight: ShardedParameter, *, tp: Group, matmul: Matmul = torch_matmul
) -> torch.Tensor:
    """x [s, b, i/tp] · weight [o, i/tp]ᵀ, summed over tp and split over the sequence -> [s/tp, b, o].

    Collectives: tp - 1 exchanges with the neighbours, each way.
    """
    return _Scattered.apply(x, weight, tp, matmul)
