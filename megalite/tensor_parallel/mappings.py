"""Conjugate communication pairs of tensor parallelism (arXiv 1909.08053, section 3; 2205.05198, section 4).

Megatron-LM's f, and the gather before a column-parallel layer, are part of `layers.linear`, where their backward
overlaps the weight gradient. Activations are [s, b, h]: collectives can split dimension 0, the sequence, without a
copy."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalite.topology.group import Group, conjugate


def gather_along_sequence(x: Tensor, tp: Group) -> Tensor:
    """All-gather [s/tp, ...] -> [s, ...], outside autograd."""
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
    """Apply f without a product: replicated [s, b, n], or [s/tp, b, n] with sequence parallelism -> [s, b, n], of which
    each rank uses a different part.

    Collectives: forward none / backward all-reduce; with sequence parallelism all-gather / reduce-scatter."""
    if tp.size == 1:
        return x
    if sequence_parallel:
        return conjugate(x, lambda x: gather_along_sequence(x, tp), lambda grad: _reduce_scattered(grad, tp))
    return conjugate(x, lambda x: x.view_as(x), lambda grad: _reduced(grad.clone(), tp))


def reduce_from_tensor_parallel_region(x: Tensor, *, tp: Group) -> Tensor:
    """Apply g: sum partial sums in place; `x` must be the new output of an operation.

    Collectives: forward all-reduce / backward none."""
    return x if tp.size == 1 else conjugate(x, lambda x: _reduced(x, tp), lambda grad: grad)


def scatter_to_sequence_parallel_region(x: Tensor, *, tp: Group) -> Tensor:
    """Split replicated [s, b, h] -> this rank's [s/tp, b, h].

    Collectives: forward none / backward all-gather."""
    if tp.size == 1:
        return x
    return conjugate(x, lambda x: x.chunk(tp.size)[tp.rank].contiguous(), lambda grad: gather_along_sequence(grad, tp))


def replicate_from_sequence_parallel_region(x: Tensor, *, tp: Group) -> Tensor:
    """Gather [s/tp, b, h] -> [s, b, h] for replicated computation, the inverse of
    `scatter_to_sequence_parallel_region`.

    Collectives: forward all-gather / backward none, because every rank has the same gradient."""
    if tp.size == 1:
        return x
    return conjugate(x, lambda x: gather_along_sequence(x, tp), lambda grad: grad.chunk(tp.size)[tp.rank])


def gather_from_tensor_parallel_region(x: Tensor, *, size: int, tp: Group) -> Tensor:
    """Gather [..., n/tp] -> [..., size] for replicated computation, without the columns from `size` on, which are padding.

    Collectives: forward all-gather / backward none, because every rank has the same gradient."""
    if tp.size == 1:
        return x[..., :size]
    width = x.shape[-1]

    def gathered(x: Tensor) -> Tensor:
        parts = gather_along_sequence(x, tp).chunk(tp.size)
        return torch.cat([part[..., : max(size - rank * width, 0)] for rank, part in enumerate(parts)], dim=-1)

    def own(grad: Tensor) -> Tensor:
        part = grad[..., tp.rank * width : (tp.rank + 1) * width]
        return pad(part, (0, width - part.shape[-1]))

    return conjugate(x, gathered, own)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, *, tp: Group) -> Tensor:
    """Sum partial sums [s, b, h] over ranks -> this rank's part [s/tp, b, h].

    Collectives: forward reduce-scatter / backward all-gather."""
    if tp.size == 1:
        return x
    return conjugate(x, lambda x: _reduce_scattered(x, tp), lambda grad: gather_along_sequence(grad, tp))


def reduce_partial_sums(x: Tensor, *, tp: Group, sequence_parallel: bool) -> Tensor:
    """Sum a row-parallel layer's partial outputs: replicated, or this rank's part of the sequence."""
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(x, tp=tp)
    return reduce_from_tensor_parallel_region(x, tp=tp)


Rows = tuple[int, int]


def _overlap(one: Rows, other: Rows) -> Rows:
    first, stop = max(one[0], other[0]), min(one[1], other[1])
    return first, max(first, stop)


class SharedHeads:
    """Exchange of projections in a layer with fewer key/value heads than tp ranks, where several ranks share a group.

    Weights remain an equal split of the fused projection's rows, as in Megatron-LM: every row is on one rank, so
    gradients, norms, optimizers and checkpoints need no special case. The ranks of a group exchange the projection's
    outputs: each receives its queries, and the group's key and value.

    Args:
        groups: key/value heads; `tp.size` is a multiple of it.
        head_size: channels of a head.
        queries: query heads of a group; a multiple of the `tp.size // groups` ranks that share it.
        gated: as many gates follow the queries; each rank receives those of its queries."""

    def __init__(self, tp: Group, groups: int, head_size: int, *, queries: int, gated: bool = False) -> None:
        sharing = tp.size // groups
        assert tp.size % groups == 0 and queries % sharing == 0, (tp.size, queries, groups)
        before = (1 + gated) * queries * head_size  # rows before the key and the value
        self._tp, self._width = tp, (before + 2 * head_size) // sharing
        own, first_rank = tp.rank % sharing, tp.rank - tp.rank % sharing
        each, keys = queries // sharing * head_size, (before, before + 2 * head_size)

        def passed(owner: int, user: int) -> list[Rows]:
            """Return the group's rows that `owner` sends to `user`, ascending: queries, gates, key and value."""
            owned = owner * self._width, (owner + 1) * self._width
            firsts = range(user * each, before, queries * head_size)
            return [_overlap(owned, needed) for needed in (*((first, first + each) for first in firsts), keys)]

        sent = [passed(own, user) for user in range(sharing)]
        self._sent = [(first - own * self._width, stop - own * self._width) for rows in sent for first, stop in rows]
        self._send, self._receive = [0] * tp.size, [0] * tp.size
        for rank in range(sharing):
            self._send[first_rank + rank] = sum(stop - first for first, stop in sent[rank])
            self._receive[first_rank + rank] = sum(stop - first for first, stop in passed(rank, own))

    def __call__(self, qkv: Tensor) -> Tensor:
        """Exchange the fused projection [s, b, rows/tp] -> [s, b, rows of this rank's queries, the key and the value].

        Collectives: an all-to-all of uneven parts over tp, forward and backward."""
        return conjugate(qkv, self._to_users, self._to_owners)

    def _to_users(self, qkv: Tensor) -> Tensor:
        rows = qkv.flatten(0, 1).t()
        packed = torch.cat([rows[first:stop] for first, stop in self._sent])
        received = packed.new_empty(sum(self._receive), packed.shape[1])
        self._tp.all_to_all(received, packed, self._receive, self._send)
        return received.t().contiguous().unflatten(0, qkv.shape[:2])

    def _to_owners(self, grad: Tensor) -> Tensor:
        """Return the sum of the users' gradients in rank order."""
        rows = grad.flatten(0, 1).t().contiguous()
        received = rows.new_empty(sum(self._send), rows.shape[1])
        self._tp.all_to_all(received, rows, self._send, self._receive)
        total = rows.new_zeros(self._width, rows.shape[1])
        parts = received.split([stop - first for first, stop in self._sent])
        for (first, stop), part in zip(self._sent, parts, strict=True):
            total[first:stop] += part
        return total.t().contiguous().unflatten(0, grad.shape[:2])
