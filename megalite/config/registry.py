"""`Registry`: implementations by name. What megalite contains is imported when a config names it; a user's own code adds
to the same table by the decorator."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from megalite.config.errors import ConfigError

T = TypeVar("T")


def imported(path: str) -> Any:
    """What `module:attribute` names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Registry(Generic[T]):
    """Name -> implementation.

    Args:
        setting: what chooses among them, for errors.
        builtin: name -> `module:attribute`, imported at the first `get`.
    """

    def __init__(self, setting: str, builtin: Mapping[str, str]) -> None:
        self._setting, self._builtin = setting, builtin
        self._registered: dict[str, T] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, those of megalite first."""
        return tuple(dict.fromkeys((*self._builtin, *self._registered)))

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: `@STRATEGIES.register("mine")`.

        Raises:
            ConfigError: the name is taken.
        """

        def add(implementation: T) -> T:
            if name in self.names:
                raise ConfigError(f"{self._setting} {name} exists already; register it under another name")
            self._registered[name] = implementation
            return implementation

        return add

    def get(self, name: str) -> T:
        """The implementation of that name.

        Raises:
            ConfigError: there is none.
        """
        if name in self._builtin and name not in self._registered:
            self._registered[name] = imported(self._builtin[name])
        if name not in self._registered:
            raise ConfigError(f"{self._setting} is {name!r}; it must be one of {', '.join(self.names)}")
        return self._registered[name]
