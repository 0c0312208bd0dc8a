"""Key/value heads that several tensor-parallel ranks share, where there are fewer of them than ranks.

Weights stay an equal cut of the rows of the fused projection, as in Megatron-LM: every row is on one rank, so gradients, norms,
optimizers and checkpoints know nothing of sharing. Ranks of one group exchange what the projection gives: each gets its
queries, and key and value of the group.
"""

import torch
from torch import Tensor

from megalite.topology.group import Group, conjugate

Rows = tuple[int, int]


def _overlap(one: Rows, other: Rows) -> Rows:
    first, stop = max(one[0], other[0]), min(one[1], other[1])
    return first, max(first, stop)


class SharedHeads:
    """The exchange of one layer.

    Args:
        queries: query heads of a group; a multiple of the `tp.size // groups` ranks that share it.
        groups: key/value heads; `tp.size` is a multiple.
        head_size: channels of a head.
    """

    def __init__(self, tp: Group, *, queries: int, groups: int, head_size: int) -> None:
        sharing = tp.size // groups
        assert tp.size % groups == 0 and queries % sharing == 0, (tp.size, queries, groups)
        self._tp, self._width = tp, (queries + 2) * head_size // sharing
        own, first_rank = tp.rank % sharing, tp.rank - tp.rank % sharing
        each, keys = queries // sharing * head_size, (queries * head_size, (queries + 2) * head_size)

        def passed(holder: int, user: int) -> list[Rows]:
            """Rows of the group that one rank holds and another works on, ascending: queries, then key and value."""
            held = holder * self._width, (holder + 1) * self._width
            return [_overlap(held, needed) for needed in ((user * each, (user + 1) * each), keys)]

        sent = [passed(own, user) for user in range(sharing)]
        self._sent = [(first - own * self._width, stop - own * self._width) for rows in sent for first, stop in rows]
        self._send, self._receive = [0] * tp.size, [0] * tp.size
        for rank in range(sharing):
            self._send[first_rank + rank] = sum(stop - first for first, stop in sent[rank])
            self._receive[first_rank + rank] = sum(stop - first for first, stop in passed(rank, own))

    def __call__(self, qkv: Tensor) -> Tensor:
        """[s, b, rows/tp] of the fused projection -> [s, b, rows of this rank's queries, the key and the value].

        Collectives: an all-to-all of uneven parts over tp, forward and backward.
        """
        return conjugate(qkv, self._to_users, self._to_holders)

    def _to_users(self, qkv: Tensor) -> Tensor:
        rows = qkv.flatten(0, 1).t()
        packed = torch.cat([rows[first:stop] for first, stop in self._sent])
        received = packed.new_empty(sum(self._receive), packed.shape[1])
        self._tp.all_to_all(received, packed, self._receive, self._send)
        return received.t().contiguous().unflatten(0, qkv.shape[:2])

    def _to_holders(self, grad: Tensor) -> Tensor:
        """The sum, in the order of ranks, of what each user's gradient is."""
        rows = grad.flatten(0, 1).t().contiguous()
        received = rows.new_empty(sum(self._send), rows.shape[1])
        self._tp.all_to_all(received, rows, self._send, self._receive)
        total = rows.new_zeros(self._width, rows.shape[1])
        parts = received.split([stop - first for first, stop in self._sent])
        for (first, stop), part in zip(self._sent, parts, strict=True):
            total[first:stop] += part
        return total.t().contiguous().unflatten(0, grad.shape[:2])
