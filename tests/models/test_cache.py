"""The KV cache returns the stored entries, in memory that grows by doubling."""

import pytest
import torch

from megalite.models.context import KeyValueCache, NextTokens

CPU = torch.device("cpu")


def values(b: int, s: int, seed: int) -> torch.Tensor:
    return torch.randn(b, 2, s, 3, generator=torch.Generator().manual_seed(seed))


def test_cache_with_rows_of_unequal_length() -> None:
    """Each row sees its own keys, then its new tokens, which overwrite its padding, and nothing after them."""
    cache, k, v = KeyValueCache(limit=20), values(3, 4, 0), values(3, 4, 1)
    cache.fill("a", k, v)
    lengths = [4, 2, 3]
    expected = [k[row, :, :length] for row, length in enumerate(lengths)]
    for step in range(5):
        new = NextTokens.after(lengths, window=None, device=CPU)
        key, value = values(3, 1, 10 + step), values(3, 1, 20 + step)
        keys, _ = cache.append("a", key, value, new)
        expected = [torch.cat((old, key[row]), dim=1) for row, old in enumerate(expected)]
        for row, wanted in enumerate(expected):
            assert torch.equal(keys[row][:, new.visible[row, 0, 0]], wanted)
        lengths = [length + 1 for length in lengths]
    cache.keep([2, 0])
    keys, held = cache.append("a", values(2, 1, 0), values(2, 1, 1), NextTokens.after([8, 9], window=None, device=CPU))
    assert torch.equal(keys[0, :, :8], expected[2]) and torch.equal(keys[1, :, :9], expected[0])
    assert held.isfinite().all()


@pytest.mark.parametrize("window", [1, 3, 50])
def test_cache_with_windows(window: int) -> None:
    """The new token at p attends to itself and the window - 1 tokens before it."""
    for lengths in ([6, 6], [7, 2], [0, 1]):
        new = NextTokens.after(lengths, window=window, device=CPU)
        columns = torch.arange(new.first, new.stop)
        for row, length in enumerate(lengths):
            seen = columns if new.visible is None else columns[new.visible[row, 0, 0]]
            assert seen.tolist() == list(range(max(0, length + 1 - window), length + 1))
    assert NextTokens.after([6, 6], window=window, device=CPU).visible is None


def test_memory_doubles_up_to_the_limit() -> None:
    cache = KeyValueCache(limit=37)
    cache.fill("a", values(1, 5, 0), values(1, 5, 1))
    rooms = []
    for length in range(5, 37):
        cache.append("a", values(1, 1, 0), values(1, 1, 1), NextTokens.after([length], window=None, device=CPU))
        rooms.append(cache._entries["a"][0].shape[2])
    assert sorted(set(rooms)) == [10, 20, 37]
