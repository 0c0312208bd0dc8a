"""What a test registers is gone after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megalite.config.registry import Registry


@contextmanager
def registered(registry: Registry[Any], name: str, implementation: Any, **facts: Any) -> Iterator[None]:
    """Inside, the registry has it."""
    registry.register(name, **facts)(implementation)
    try:
        yield
    finally:
        del registry.entries[name]
