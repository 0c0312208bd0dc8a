"""What a config may say: `option` declares a setting; a `Registry` holds implementations by name, with the facts that rules,
dry run and planner need.

megalite's implementations are imported when a config names them. Users add theirs with a decorator, in a module that
`imports` names or that an installed package lists as an entry point of `megalite.plugins`."""

import contextlib
import dataclasses
import gc
import importlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from megalite.config.errors import ConfigError
from megalite.config.numbers import Bounds

T = TypeVar("T")
PLUGINS = "megalite.plugins"
"""Group of entry points that name modules to import when a name is unknown."""


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector while very many long-lived objects are created: it would scan them repeatedly, a third
    of the time for `import torch` and for manifests and schedules of a million entries."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@gc_paused()
def imported(path: str) -> Any:
    """Import and return `module:attribute`, for code that only some runs need. If this imports torch, later collections
    skip all objects that exist then: scanning torch's takes 0.2 s each time, also at the end of a process."""
    (module, _, attribute), had_torch = path.partition(":"), "torch" in sys.modules
    found = getattr(importlib.import_module(module), attribute)
    if not had_torch and "torch" in sys.modules:
        gc.freeze()
    return found


def call(path: str, *args: Any) -> Any:
    """Call `module:function`, as the target of a new process that needs torch."""
    return imported(path)(*args)


def optional(module: str, remedy: str) -> Any:
    """Import a module of an optional package. Raises ConfigError, with the remedy: it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(remedy) from None


def option(
    default: Any, *, flags: tuple[str, ...] = (), choices: Collection[str] = (), basic: bool = False, **bounds: float
) -> Any:
    """Declare one setting of a config dataclass.

    The attribute docstring under the field is its help text; the field's name, with dashes, is its flag.

    Args:
        default: value if no preset, file or flag sets it. A list default is copied for each instance.
        flags: additional spellings (`("--tensor-model-parallel-size",)`), such as Megatron-LM's long names.
        choices: legal values, if they are few: names, or a `Registry`.
        basic: whether `--help` lists the setting; `--help-all` lists all.
        bounds: bounds of a number, see `Bounds`."""
    metadata = {"flags": flags, "legal": choices, "basic": basic, "bounds": Bounds(**bounds) if bounds else None}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass
class _Entry:
    facts: Any
    path: str | None = None
    """`module:attribute`, until it is imported."""
    implementation: Any = None


class Registry(Collection[str], Generic[T]):
    """Name -> implementation and its facts; as a collection, the names, megalite's first.

    Args:
        setting: the setting that selects an implementation, for errors.
        builtin: name -> `module:attribute`, imported at the first `get`, optionally with facts.
        facts: builds facts from the keywords of `register`; default: none."""

    def __init__(
        self, setting: str, builtin: Mapping[str, str | tuple[str, Any]] = {}, facts: Callable[..., Any] = lambda: None
    ) -> None:
        self._setting, self._make_facts = setting, facts
        self.builtin = tuple(builtin)
        self.entries: dict[str, _Entry] = {}
        for name, of in builtin.items():
            path, known = (of, facts()) if isinstance(of, str) else of
            self.entries[name] = _Entry(known, path)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self.entries))

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if name not in self.entries:
            _load_entry_points()
        return name in self.entries

    def register(self, name: str, **facts: Any) -> Callable[[T], T]:
        """Return a decorator: `@OPTIMIZERS.register("lion", states=("exp_avg",))`. A definition at the same place, such
        as a notebook cell that runs again, replaces the former. Raises ConfigError: the name is taken, or the facts do
        not fit this registry."""

        def add(implementation: T) -> T:
            former = self.entries.get(name)
            if former is not None and _place(former.implementation) != _place(implementation):
                raise ConfigError(f"{self._setting} {name} exists already; register it under another name")
            try:
                stated = self._make_facts(**facts)
            except TypeError as error:
                raise ConfigError(f"{self._setting} {name} is registered with the wrong facts: {error}") from None
            self.entries[name] = _Entry(stated, implementation=implementation)
            return implementation

        return add

    def _entry(self, name: str) -> _Entry:
        if name not in self.entries and name not in self:
            known = ", ".join(self) or "none: nothing is registered"
            raise ConfigError(f"{self._setting} is {name!r}; it must be one of {known}")
        return self.entries[name]

    def get(self, name: str) -> T:
        """Return the implementation of a name. Raises ConfigError: the name is unknown."""
        entry = self._entry(name)
        if entry.implementation is None and entry.path is not None:
            entry.implementation = imported(entry.path)
        return entry.implementation

    def facts(self, name: str) -> Any:
        """Return the facts of a name without importing it. Raises ConfigError: the name is unknown."""
        return self._entry(name).facts

    def name_of(self, given: str | T) -> str:
        """Return a name itself, or that of a registered implementation. Raises ConfigError: it is not registered."""
        if isinstance(given, str):
            self._entry(given)
            return given
        for name, entry in self.entries.items():
            if entry.implementation is given:
                return name
        shown = getattr(given, "__name__", type(given).__name__)
        raise ConfigError(
            f"{self._setting}: {shown} is not registered; decorate it with the registry's register(name, ...), or give one "
            f"of {', '.join(self)}"
        )


def _place(implementation: Any) -> tuple[Any, ...]:
    """Return where an object is defined; if it has no module and name, its identity."""
    place = getattr(implementation, "__module__", None), getattr(implementation, "__qualname__", None)
    return place if None not in place else (id(implementation),)


def import_modules(modules: Iterable[str]) -> None:
    """Import the user's modules, which register parts. The working folder is searched last. Raises ConfigError: an
    import failed; names the module, the reason and the line."""
    for name in modules:
        if name in sys.modules:
            continue
        if not {"", str(Path.cwd())} & set(sys.path):
            sys.path.append(str(Path.cwd()))
        _run_import(f"--import {name}", lambda name=name: importlib.import_module(name))  # type: ignore[misc]


@cache
def _load_entry_points() -> None:
    for point in imported("importlib.metadata:entry_points")(group=PLUGINS):
        package = "" if point.dist is None else f" of the package {point.dist.name}"
        _run_import(f"plug-in {point.value}{package}", point.load)


def _run_import(what: str, load: Callable[[], object]) -> None:
    try:
        load()
    except (Exception, SystemExit) as error:
        files = (frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__)
        frames = [frame for frame in files if "importlib" not in frame.filename]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        missing = isinstance(error, ModuleNotFoundError) and not frames
        hint = "; give a dotted name that Python finds from the working folder, on PYTHONPATH or installed" * missing
        reason = str(error) or "no message"
        raise ConfigError(f"{what} cannot be imported: {type(error).__name__}: {reason}{where}{hint}") from error
