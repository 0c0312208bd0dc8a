"""Linear layers at the border of the sequence-parallel region that multiply while rows travel.

The all-gather before a column-parallel layer becomes tp - 1 steps round the ring of ranks, under each of which the rows
that have arrived are multiplied; the reduce-scatter after a row-parallel layer becomes as many steps of a sum that
follows its rows, under each of which the next addend is multiplied. The backward of each is the other. As Megatron-LM's
--tp-comm-overlap and Wang et al., ASPLOS 2023 (Overlap communication with dependent computation via decomposition).

On GPUs torch._symmetric_memory cuts the product into the ranks' parts and copies each from its owner's memory over NVLink,
on a second stream, without kernels of NCCL (the asynchronous tensor parallelism of torchtitan, arXiv 2410.06511).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.config.registry import imported
from megalite.kernels.bases import Function
from megalite.kernels.matmul import Matmul, matmul
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
        ctx.weight, ctx.version, ctx.pieces = weight, weight._version, pieces
        y, summing = pieces.scatter(x, weight.t())
        summing.wait()
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        if weight._version != ctx.version:
            raise weight.changed(ctx.version)
        grad_x, gathered = ctx.pieces.gather(grad_y, weight, keep=True)
        gradient = linear_weight_gradient(weight, x, gathered.flatten(0, -2), None)
        return grad_x, gradient.compute_or_defer(weight.deferred), None


def scattered_linear(x: Tensor, weight: Tensor, pieces: Pieces) -> Tensor:
    """x [s, b, i/tp] · weight [o, i/tp]ᵀ, summed over tp and split over the sequence -> [s/tp, b, o].

    Collectives: those of `pieces`, each way.
    """
    if type(weight) is not ShardedParameter:
        weight = weight.as_subclass(ShardedParameter)
    return _Scattered.apply(x, weight, pieces)


_ROWS, _WIDTH, _OFF = 64, 128, 2e-2
"""Of the products that are tried, and of ‖its - NCCL's‖/‖NCCL's‖ in bf16."""


class SymmetricMemory:
    """Collectives: a gather or a reduction by copies, over tp; the weight's product takes part in it."""

    def __init__(self, tp: Group, matmul: Matmul) -> None:
        assert tp.process_group is not None
        self._name = tp.process_group.group_name

    def gather(
        self, x: Tensor, columns: Tensor, bias: Tensor | None = None, *, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        whole, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
            x.contiguous(), [columns], 0, self._name, return_A=keep
        )
        return y if bias is None else y.add_(bias), whole

    def scatter(self, x: Tensor, columns: Tensor) -> tuple[Tensor, Work]:
        part = torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), columns, "sum", 0, self._name)
        return part, DONE


def why_not_symmetric(tp: Group) -> str | None:
    """Why tp cannot multiply by symmetric memory, or None; the same on all its ranks. Both products are tried.

    Collectives: over tp, those of the trial and two all-reduces of a number.
    """
    return f"{tp.device.type} has no symmetric memory" if tp.device.type != "cuda" else tried(tp)


def tried(tp: Group) -> str | None:
    """`why_not_symmetric`, whatever the device is."""
    for trial in (lambda: _why_not_here(tp), *_trials(tp)):
        try:
            reason = trial()
        except Exception as error:  # of torch's private parts, whatever it is
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if (reason := _for_all(tp, reason)) is not None:
            return reason
    return None


def _for_all(tp: Group, reason: str | None) -> str | None:
    fine = torch.full((), float(reason is None), device=tp.device)
    tp.all_reduce(fine, op="min")
    return None if fine.item() else reason or "another rank of tp has none"


def _why_not_here(tp: Group) -> str | None:
    try:
        assert tp.process_group is not None
        imported("torch.distributed._symmetric_memory:enable_symm_mem_for_group")(tp.process_group.group_name)
        missing = [name for name in _OPERATORS if not hasattr(torch.ops.symm_mem, name)]
    except Exception as error:
        return f"torch {torch.__version__} has none ({type(error).__name__})"
    return f"torch {torch.__version__} has no {missing[0]}" if missing else None


_OPERATORS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def _trials(tp: Group) -> list[Callable[[], str | None]]:
    """Comparisons with products of what the group's own collectives bring."""
    generator = torch.Generator().manual_seed(tp.rank)
    drawn = torch.randn(2, _ROWS * tp.size, _WIDTH, generator=generator).to(tp.device, torch.bfloat16)
    x, weight = drawn[0, :_ROWS].unsqueeze(1), drawn[1, :_WIDTH]
    whole, summed = x.new_empty(_ROWS * tp.size, 1, _WIDTH), torch.empty_like(x)
    tp.all_gather(whole, x)
    tp.reduce_scatter(summed, whole @ weight)
    pieces = SymmetricMemory(tp, matmul)

    def gather() -> str | None:
        y, kept = pieces.gather(x, weight, keep=True)
        assert kept is not None
        return _why_wrong("a gather", kept, whole) or _why_wrong("a gathered product", y, whole @ weight)

    return [gather, lambda: _why_wrong("a scattered product", pieces.scatter(whole, weight)[0], summed)]


def _why_wrong(name: str, found: Tensor, right: Tensor) -> str | None:
    off = float((found.float() - right.float()).norm() / right.float().norm())
    return None if off <= _OFF else f"{name} is off by {off:.1e} of itself when it is tried"  # NaN too
