"""Registry entries for the duration of a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megalite.config.registry import Registry


@contextmanager
def registered(registry: Registry[Any], name: str, implementation: Any, **facts: Any) -> Iterator[None]:
    """Register an implementation inside the block."""
    registry.register(name, **facts)(implementation)
    try:
        yield
    finally:
        del registry.entries[name]
