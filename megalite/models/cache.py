"""Keys and values of the tokens generated so far."""

import torch


class KeyValueCache:
    """Grows by the new tokens of each forward; one entry an attention layer, [b, groups/tp, s, d]."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def length(self) -> int:
        """Tokens held."""
        return next((k.shape[2] for k, _ in self._entries.values()), 0)

    def extend(self, name: str, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to layer `name` and return all of its keys and values."""
        if name in self._entries:
            old_k, old_v = self._entries[name]
            k, v = torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2)
        self._entries[name] = (k, v)
        return k, v
