"""Overlap communication and matrix products in linear layers at the border of the sequence-parallel region.

The all-gather before a column-parallel layer becomes tp - 1 ring steps, each of which overlaps the product of the rows
that have arrived. The reduce-scatter after a row-parallel layer becomes tp - 1 ring steps of a running sum, each of
which overlaps the product of the next addend. Each is the backward of the other. Like Megatron-LM's --tp-comm-overlap
and Wang et al., ASPLOS 2023 (Overlap communication with dependent computation via decomposition).

On GPUs torch._symmetric_memory splits the product by rank and copies each part from its owner's memory over NVLink, on
a second stream, without NCCL kernels (asynchronous tensor parallelism in torchtitan, arXiv 2410.06511)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.config.registry import imported
from megalite.kernels.bases import Function
from megalite.kernels.matmul import Matmul, matmul
from megalite.tensor_parallel.parameter import ShardedParameter, as_sharded, linear_weight_gradient
from megalite.topology.group import DONE, Group, Work


def receive_parts(part: Tensor, tp: Group) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, part) for each rank's contiguous part, this rank's first, during the transfer of the next part.

    Collectives: tp - 1 exchanges with the neighbours."""
    for step in range(tp.size):
        last = step == tp.size - 1
        following, work = (part, DONE) if last else tp.rotate_async(part)
        yield (tp.rank - step) % tp.size, part
        work.wait()
        part = following


@dataclass
class _LastAddend:
    """Transfer of the other ranks' sum, which `wait` adds to this rank's addend."""

    work: Work
    total: Tensor
    others: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.total.add_(self.others)


def sum_of_parts(make: Callable[[int], Tensor], tp: Group) -> tuple[Tensor, Work]:
    """Return this rank's part of the sum over ranks, complete after `wait()`; the sum has the order of the ring.

    `make(rank)` returns this rank's addend to a rank's part, contiguous and in new memory; called once per rank.

    Collectives: tp - 1 exchanges with the neighbours."""
    total = make((tp.rank - 1) % tp.size)
    last: Work = DONE
    for step in range(1, tp.size):
        last.wait()
        others, work = tp.rotate_async(total)
        total = make((tp.rank - 1 - step) % tp.size)
        last = _LastAddend(work, total, others)
    return total, last


class OverlappedProducts(Protocol):
    """Products that overlap the gather of their input or the reduce-scatter of their output; outside autograd."""

    def gather(
        self, x: Tensor, columns: Tensor, bias: Tensor | None = None, *, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Gather x [s/tp, b, i] over the sequence, · columns [i, o] + bias [o] -> [s, b, o]; with `keep` also return
        the gathered x."""

    def scatter(self, x: Tensor, columns: Tensor) -> tuple[Tensor, Work]:
        """Sum x [s, b, i] · columns [i, o] over ranks -> this rank's [s/tp, b, o], complete after `wait()`."""


class Ring:
    """`OverlappedProducts` by a ring. Collectives of each method: tp - 1 exchanges with the neighbours."""

    def __init__(self, tp: Group, matmul: Matmul) -> None:
        self._tp, self._matmul = tp, matmul

    def gather(
        self, x: Tensor, columns: Tensor, bias: Tensor | None = None, *, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        y = x.new_empty(self._tp.size, *x.shape[:-1], columns.shape[1])
        whole = x.new_empty(self._tp.size, *x.shape) if keep else None
        for rank, part in receive_parts(x.contiguous(), self._tp):
            self._matmul(part.flatten(0, -2), columns, bias, out=y[rank].flatten(0, -2))
            if whole is not None:
                whole[rank] = part
        return y.flatten(0, 1), None if whole is None else whole.flatten(0, 1)

    def scatter(self, x: Tensor, columns: Tensor) -> tuple[Tensor, Work]:
        parts = x.unflatten(0, (self._tp.size, -1))
        return sum_of_parts(lambda rank: self._matmul(parts[rank], columns), self._tp)


class _Scattered(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ShardedParameter, pieces: OverlappedProducts) -> Tensor:
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


def scattered_linear(x: Tensor, weight: Tensor, pieces: OverlappedProducts) -> Tensor:
    """Compute x [s, b, i/tp] · weight [o, i/tp]ᵀ, summed over tp and split over the sequence -> [s/tp, b, o].

    Collectives: those of `pieces`, forward and backward."""
    return _Scattered.apply(x, as_sharded(weight), pieces)


_ROWS, _WIDTH, _LIMIT = 64, 128, 2e-2
"""Size of the self-check's products, and the largest ‖symmetric - NCCL‖/‖NCCL‖ in bf16."""


class SymmetricMemory:
    """`OverlappedProducts` by symmetric memory. Collectives: gather or reduction over tp by copies, with the product."""

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
    """Return why tp cannot use symmetric memory, or None; the same verdict on all ranks. Both products are checked.

    Collectives: over tp, those of the checks and an all-reduce of one number after each."""
    return f"{tp.device.type} has no symmetric memory" if tp.device.type != "cuda" else self_check(tp)


def self_check(tp: Group) -> str | None:
    """Return the result of `why_not_symmetric` for any device."""
    for check in (_why_not_here, *_checks(tp)):
        try:
            reason = check()
        except Exception as error:  # torch's private functions may raise anything
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if (reason := _on_any_rank(tp, reason)) is not None:
            return reason
    return None


def _on_any_rank(tp: Group, reason: str | None) -> str | None:
    passes = torch.full((), float(reason is None), device=tp.device)
    tp.all_reduce(passes, op="min")
    return None if passes.item() else reason or "another rank of tp has no symmetric memory"


def _why_not_here() -> str | None:
    try:
        imported("torch.distributed._symmetric_memory:rendezvous")  # registers the operators
        missing = [name for name in _OPERATORS if not hasattr(torch.ops.symm_mem, name)]
    except Exception as error:
        return f"torch {torch.__version__} has no symmetric memory ({type(error).__name__})"
    return f"torch {torch.__version__} has no {missing[0]}" if missing else None


_OPERATORS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def _checks(tp: Group) -> list[Callable[[], str | None]]:
    """Return functions that compare with plain products after the group's collectives."""
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
    error = float((found.float() - right.float()).norm() / right.float().norm())
    return None if error <= _LIMIT else f"{name} has a relative error of {error:.1e} in its self-check"  # NaN too
