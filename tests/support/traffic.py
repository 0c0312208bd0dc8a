"""Count the communication of the rank's groups by wrapping their collectives."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megalite.topology.group import Group

# method -> (operation, index of the argument that has the volume)
COUNTED = {
    "all_reduce_async": ("all-reduce", 0),
    "all_gather_async": ("all-gather", 0),
    "reduce_scatter_async": ("reduce-scatter", 1),
    "all_to_all_async": ("all-to-all", 1),
    "all_to_all_equal_async": ("all-to-all", 1),
    "rotate_async": ("send", 0),
    "send_async": ("send", 0),
}


@contextmanager
def counted() -> Iterator[tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]]:
    """(group, operation) -> bytes, and -> number, of this process's collectives inside the block; groups of one rank are
    not counted."""
    volumes: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()

    def wrap(method: Callable[..., Any], operation: str, index: int) -> Callable[..., Any]:
        def wrapped(group: Group, *arguments: Any, **keywords: Any) -> Any:
            tensor = arguments[index]
            assert isinstance(tensor, torch.Tensor)
            if group.size > 1:
                name = "pp" if group.name.startswith("pp edge") else group.name
                volumes[name, operation] += tensor.numel() * tensor.element_size()
                calls[name, operation] += 1
            return method(group, *arguments, **keywords)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name, (operation, index) in COUNTED.items():
            patch.setattr(Group, name, wrap(getattr(Group, name), operation, index))
        yield volumes, calls
