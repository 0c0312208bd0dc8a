"""The conjugate communication pairs of tensor parallelism as autograd functions.

`copy_to` (f) and `reduce_from` (g) are Megatron-LM's (arXiv 1909.08053, section 3); the sequence-parallel pair
gathers before a column-parallel layer and reduce-scatters after a row-parallel one (arXiv 2205.05198, section 4).
Activations are [s, b, h]; the sequence is dimension 0, which collectives can split without a copy.
"""

from typing import Any

import torch

from megalite.topology.group import Group


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)  # others may hold it too
        ctx.tp.all_reduce(grad)
        return grad, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        x = x.contiguous()
        tp.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return x.tensor_split(tp.size, dim=0)[tp.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_along_sequence(grad, ctx.tp), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return gather_along_sequence(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter_along_sequence(grad, ctx.tp), None


class _ReplicateSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return gather_along_sequence(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.tensor_split(ctx.tp.size, dim=0)[ctx.tp.rank], None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return reduce_scatter_along_sequence(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_along_sequence(grad, ctx.tp), None


def gather_along_sequence(x: torch.Tensor, tp: Group) -> torch.Tensor:
    """[s/tp, ...] -> [s, ...], outside autograd."""
    output = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
    tp.all_gather(output, x.contiguous())
    return output


def reduce_scatter_along_sequence(x: torch.Tensor, tp: Group) -> torch.Tensor:
    """[s, ...] summed over ranks -> [s/tp, ...], outside autograd."""
    output = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    tp.reduce_scatter(output, x.contiguous())
    return output


def copy_to_tensor_parallel_region(x: torch.Tensor, *, tp: Group) -> torch.Tensor:
    """f: the same x on every rank enters a split computation.

    Collectives: forward none / backward all-reduce of the gradient.
    """
    return x if tp.size == 1 else _CopyTo.apply(x, tp)


def reduce_from_tensor_parallel_region(x: torch.Tensor, *, tp: Group) -> torch.Tensor:
    """g: partial sums become the whole, in place of `x`, which must be the fresh output of an operation.

    Collectives: forward all-reduce / backward none.
    """
    return x if tp.size == 1 else _ReduceFrom.apply(x, tp)


def scatter_to_sequence_parallel_region(x: torch.Tensor, *, tp: Group) -> torch.Tensor:
    """The same [s, b, h] on every rank -> this rank's [s/tp, b, h].

    Collectives: forward none / backward all-gather.
    """
    return x if tp.size == 1 else _ScatterSequence.apply(x, tp)


def gather_from_sequence_parallel_region(x: torch.Tensor, *, tp: Group) -> torch.Tensor:
    """[s/tp, b, h] -> [s, b, h], entering a split computation.

    Collectives: forward all-gather / backward reduce-scatter.
    """
    return x if tp.size == 1 else _GatherSequence.apply(x, tp)


def replicate_from_sequence_parallel_region(x: torch.Tensor, *, tp: Group) -> torch.Tensor:
    """[s/tp, b, h] -> [s, b, h], entering a region that every rank computes alike: the inverse of `scatter_to`.

    Collectives: forward all-gather / backward none, since every rank has the same gradient.
    """
    return x if tp.size == 1 else _ReplicateSequence.apply(x, tp)


def reduce_scatter_to_sequence_parallel_region(x: torch.Tensor, *, tp: Group) -> torch.Tensor:
    """Partial sums [s, b, h] -> this rank's part of the whole, [s/tp, b, h].

    Collectives: forward reduce-scatter / backward all-gather.
    """
    return x if tp.size == 1 else _ReduceScatterSequence.apply(x, tp)
