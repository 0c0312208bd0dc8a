"""Keys and values of the tokens that a model has seen: the next token then costs one position, not all of them again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """One new token a row, behind those that a cache holds; rows may hold different numbers of tokens.

    Args:
        positions: int64 [b]: where each row's new token stands, which is how many are before it.
        first, stop: the columns of the cache that some row sees, the new token's own among them.
        visible: boolean [b, 1, 1, stop - first]: which of them each row sees; None: every row sees all of them.
    """

    positions: torch.Tensor
    first: int
    stop: int
    visible: torch.Tensor | None

    @classmethod
    def after(cls, lengths: Sequence[int], *, window: int | None, device: torch.device) -> "NextTokens":
        """The next token of rows with that many tokens.

        Args:
            window: how many keys a query sees, its own among them; None: all before it.
        """
        first = 0 if window is None else max(0, min(lengths) + 1 - window)
        stop = max(lengths) + 1
        positions = torch.tensor(lengths, device=device)
        visible = None
        if len(set(lengths)) > 1:
            distance = positions.unsqueeze(1) - torch.arange(first, stop, device=device)
            visible = distance >= 0
            if window is not None:
                visible &= distance < window
            visible = visible[:, None, None]
        return cls(positions=positions, first=first, stop=stop, visible=visible)


class KeyValueCache:
    """One entry an attention layer: keys and values [b, groups/tp, room, d], of which each row fills a beginning.

    Room doubles when it is used up, so that on average a token is copied no more than once however long the text gets.
    What no token has filled is zero: hidden keys have no weight, but a weight of zero makes no number of a NaN.

    Args:
        limit: tokens that a row will have at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def fill(self, name: str, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keys and values [b, groups/tp, s, d] of the first s tokens of each row.

        Rows may be padded behind their end: what is there is hidden, until the row's own tokens take its place.
        """
        length = k.shape[2]
        room = min(2 * length, self._limit)
        self._entries[name] = (_with_room(k, length, room), _with_room(v, length, room))

    def append(
        self, name: str, k: torch.Tensor, v: torch.Tensor, new: NextTokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put in those of one new token a row, [b, groups/tp, 1, d], and return the columns that some row sees."""
        keys, values = self._entries[name]
        held = keys.shape[2]
        if new.stop > held:
            room = min(max(2 * held, new.stop), max(self._limit, new.stop))
            keys, values = _with_room(keys, held, room), _with_room(values, held, room)
            self._entries[name] = (keys, values)
        for entry, tensor in ((keys, k), (values, v)):
            if new.visible is None:
                entry[:, :, new.stop - 1] = tensor[:, :, 0]
            else:
                rows = torch.arange(tensor.shape[0], device=tensor.device)
                entry[rows, :, new.positions] = tensor[:, :, 0]
        return keys[:, :, new.first : new.stop], values[:, :, new.first : new.stop]

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these, which move up."""
        for name, entry in self._entries.items():
            index = torch.tensor(rows, device=entry[0].device)
            self._entries[name] = (entry[0].index_select(0, index), entry[1].index_select(0, index))


def _with_room(tensor: torch.Tensor, used: int, room: int) -> torch.Tensor:
    """The first `used` columns in new memory with `room` of them."""
    b, groups, _, d = tensor.shape
    larger = tensor.new_zeros(b, groups, max(room, used), d)
    larger[:, :, :used] = tensor[:, :, :used]
    return larger
