"""`Registry`: implementations by name, each with the facts that rules, dry run and planner need of it.

What megalite contains is imported when a config names it. What users add comes in by the same door: a decorator, in a
module that `imports` names, or that an installed package has as an entry point of `megalite.plugins`.
"""

import importlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from megalite.config.errors import ConfigError

T = TypeVar("T")
PLUGINS = "megalite.plugins"
"""Group of entry points: each names a module that registers something. Imported when a name is not known otherwise."""


def imported(path: str) -> Any:
    """What `module:attribute` names; for what only some runs need."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def optional(module: str, remedy: str) -> Any:
    """A module of a package that need not be installed. Raises ConfigError, with the remedy: it is not."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(remedy) from None


@dataclass
class _Entry:
    facts: Any
    path: str | None = None
    """`module:attribute`, until it is imported."""
    implementation: Any = None


class Registry(Collection[str], Generic[T]):
    """Name -> implementation and its facts; as a collection, the names, those of megalite first.

    Args:
        setting: what chooses among them, for errors.
        builtin: name -> `module:attribute`, imported at the first `get`, with facts or without.
        facts: makes the facts of what `register` adds from the decorator's keywords; default: there are none.
    """

    def __init__(
        self, setting: str, builtin: Mapping[str, str | tuple[str, Any]] = {}, facts: Callable[..., Any] = lambda: None
    ) -> None:
        self._setting, self._make_facts = setting, facts
        self.builtin = tuple(builtin)
        self.entries: dict[str, _Entry] = {}
        for name, of in builtin.items():
            path, known = (of, facts()) if isinstance(of, str) else of
            self.entries[name] = _Entry(known, path)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if name not in self.entries:
            _load_entry_points()
        return name in self.entries

    def register(self, name: str, **facts: Any) -> Callable[[T], T]:
        """Decorator: `@OPTIMIZERS.register("lion", states=("exp_avg",))`. What is defined again at the same place, as by a
        notebook's cell, takes the place of the former.
        Raises ConfigError: the name is taken, or the facts are not those of this registry."""

        def add(implementation: T) -> T:
            former = self.entries.get(name)
            if former is not None and _place(former.implementation) != _place(implementation):
                raise ConfigError(f"{self._setting} {name} exists already; register it under another name")
            try:
                stated = self._make_facts(**facts)
            except TypeError as error:
                raise ConfigError(
                    f"{self._setting} {name} is registered with other facts than it has: {error}"
                ) from None
            self.entries[name] = _Entry(stated, implementation=implementation)
            return implementation

        return add

    def _entry(self, name: str) -> _Entry:
        if name not in self.entries and name not in self:
            known = ", ".join(self.names) or "none, for nothing is registered"
            raise ConfigError(f"{self._setting} is {name!r}; it must be one of {known}")
        return self.entries[name]

    def get(self, name: str) -> T:
        """The implementation of that name.
        Raises ConfigError: there is none."""
        entry = self._entry(name)
        if entry.implementation is None and entry.path is not None:
            entry.implementation = imported(entry.path)
        implementation: T = entry.implementation
        return implementation

    def facts(self, name: str) -> Any:
        """What is stated of it, without importing it. Errors as for `get`."""
        return self._entry(name).facts

    def name_of(self, given: str | T) -> str:
        """The name that was given, or the one under which what was given is registered.
        Raises ConfigError: there is none."""
        if isinstance(given, str):
            self._entry(given)
            return given
        for name, entry in self.entries.items():
            if entry.implementation is given:
                return name
        shown = getattr(given, "__name__", type(given).__name__)
        raise ConfigError(
            f"{self._setting}: {shown} is not registered; decorate it with the registry's register(name, ...), or give one "
            f"of {', '.join(self.names)}"
        )


def _place(implementation: Any) -> tuple[Any, ...]:
    """Where something is defined; of what says nothing of that, itself."""
    place = getattr(implementation, "__module__", None), getattr(implementation, "__qualname__", None)
    return place if None not in place else (id(implementation),)


def import_modules(modules: Iterable[str]) -> None:
    """Import the user's modules, which register what is in them; from the working folder too, behind all other places.
    Raises ConfigError: one of them cannot be imported; names it, the reason and the line."""
    for name in modules:
        if name in sys.modules:
            continue
        if not {"", str(Path.cwd())} & set(sys.path):
            sys.path.append(str(Path.cwd()))
        _loaded(f"--import {name}", lambda name=name: importlib.import_module(name))  # type: ignore[misc]


@cache
def _load_entry_points() -> None:
    for point in imported("importlib.metadata:entry_points")(group=PLUGINS):
        package = "" if point.dist is None else f" of the package {point.dist.name}"
        _loaded(f"plug-in {point.value}{package}", point.load)


def _loaded(what: str, load: Callable[[], object]) -> None:
    try:
        load()
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of_user(frame.filename)]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        missing = isinstance(error, ModuleNotFoundError) and not frames
        hint = "; give a dotted name that Python finds from the working folder, on PYTHONPATH or installed" * missing
        reason = str(error) or "it says no more"
        raise ConfigError(f"{what} cannot be imported: {type(error).__name__}: {reason}{where}{hint}") from error


def _is_of_user(file: str) -> bool:
    return file != __file__ and "importlib" not in file
