"""The conjugate communication pairs of tensor parallelism (arXiv 1909.08053, section 3; 2205.05198, section 4).

Megatron-LM's f, and the gather before a column-parallel layer, are part of `layers.linear`, as their backward overlaps the
weight gradient. Activations are [s, b, h]; the sequence is dimension 0, which collectives can split without a copy.
"""

from torch import Tensor

from megalite.topology.group import Group, conjugate


def gather_along_sequence(x: Tensor, tp: Group) -> Tensor:
    """[s/tp, ...] -> [s, ...], outside autograd."""
    output = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
    tp.all_gather(output, x.contiguous())
    return output


def _reduce_scattered(x: Tensor, tp: Group) -> Tensor:
    output = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    tp.reduce_scatter(output, x.contiguous())
    return output


def _reduced(x: Tensor, tp: Group) -> Tensor:
    x = x.contiguous()
    tp.all_reduce(x)
    return x


def enter_tensor_parallel_region(x: Tensor, *, tp: Group, sequence_parallel: bool) -> Tensor:
    """f without a product: the same [s, b, n] on every rank (a part of s with sequence parallelism) -> [s, b, n], of which
    each rank uses its own share.

    Collectives: forward none / backward all-reduce; with sequence parallelism all-gather / reduce-scatter.
    """
    if tp.size == 1:
        return x
    if sequence_parallel:
        return conjugate(x, lambda x: gather_along_sequence(x, tp), lambda grad: _reduce_scattered(grad, tp))
    return conjugate(x, lambda x: x.view_as(x), lambda grad: _reduced(grad.clone(), tp))


def reduce_from_tensor_parallel_region(x: Tensor, *, tp: Group) -> Tensor:
    """g: the sum of partial sums, in place of `x`, which must be the fresh output of an operation.

    Collectives: forward all-reduce / backward none.
    """
    return x if tp.size == 1 else conjugate(x, lambda x: _reduced(x, tp), lambda grad: grad)


def scatter_to_sequence_parallel_region(x: Tensor, *, tp: Group) -> Tensor:
    """The same [s, b, h] on every rank -> this rank's [s/tp, b, h].

    Collectives: forward none / backward all-gather.
    """
    if tp.size == 1:
        return x
    return conjugate(x, lambda x: x.chunk(tp.size)[tp.rank].contiguous(), lambda grad: gather_along_sequence(grad, tp))


def replicate_from_sequence_parallel_region(x: Tensor, *, tp: Group) -> Tensor:
    """[s/tp, b, h] -> [s, b, h], entering a region that every rank computes alike: the inverse of `scatter_to`.

    Collectives: forward all-gather / backward none, since every rank has the same gradient.
    """
    if tp.size == 1:
        return x
    return conjugate(x, lambda x: gather_along_sequence(x, tp), lambda grad: grad.chunk(tp.size)[tp.rank])


def reduce_scatter_to_sequence_parallel_region(x: Tensor, *, tp: Group) -> Tensor:
    """Partial sums [s, b, h] -> this rank's part of their sum, [s/tp, b, h].

    Collectives: forward reduce-scatter / backward all-gather.
    """
    if tp.size == 1:
        return x
    return conjugate(x, lambda x: _reduce_scattered(x, tp), lambda grad: gather_along_sequence(grad, tp))


def reduce_partial_sums(x: Tensor, *, tp: Group, sequence_parallel: bool) -> Tensor:
    """The output of a row-parallel layer: replicated, or this rank's part of the sequence."""
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(x, tp=tp)
    return reduce_from_tensor_parallel_region(x, tp=tp)
