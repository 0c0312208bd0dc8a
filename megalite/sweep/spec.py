"""`sweep.yaml`: which configurations to run, for how long, and how."""

import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megalite.config.byte_size import parse_byte_size
from megalite.config.errors import ConfigError
from megalite.config.reading import OR_ZERO, build
from megalite.sweep import rules

_OPTION = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
DEFAULT_TIMEOUT = 300.0  # seconds that a run may take, its start included


def _settings(value: Any, where: str) -> dict[str, Any]:
    found = rules.plain_settings(rules.mapping(value, where), where)
    rules.refuse_fixed(found, where)
    return found


def _grid(value: Any, where: str) -> tuple[tuple[str, tuple[dict[str, Any], ...]], ...]:
    axes = []
    taken: dict[str, str] = {}
    for name, values in rules.mapping(value, where).items():
        points = []
        for each in rules.entries(values, f"{where}: {name}"):
            point = _settings({name: each}, where)
            if point in points:
                raise ConfigError(f"{where}: {name} has {reprlib.repr(each)} twice; keep one of them")
            points.append(point)
        for setting in sorted({setting for point in points for setting in point}):
            if setting in taken:
                raise ConfigError(f"{where}: {taken[setting]} and {name} both give {setting}; keep one of them")
            taken[setting] = name
        axes.append((name, tuple(points)))
    return tuple(axes)


def _listed(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    listed = enumerate(rules.entries(value, where), 1)
    return tuple(_settings(each, f"{where}, entry {number}") for number, each in listed)


def _conditions(value: Any, where: str) -> tuple[rules.Condition, ...]:
    return tuple(rules.read_condition(each, where) for each in rules.entries(value, where))


def _bytes(value: Any, where: str) -> float:
    size = parse_byte_size(value) if isinstance(value, str) else None
    if size is None:
        raise ConfigError(f"{where} takes a size such as 70GB or 64GiB, got {reprlib.repr(value)}")
    return size


def _options(value: Any, where: str) -> dict[str, str]:
    """Each becomes a line `#SBATCH --name=value`."""
    found = rules.words(value, where)
    for name, word in found.items():
        if not _OPTION.fullmatch(name):
            raise ConfigError(f"{where}: {reprlib.repr(name)} is no long option of sbatch such as cpus-per-task")
        if not word.isprintable() or any(letter in word for letter in "'\"\\"):
            raise ConfigError(f"{where}: {name} is {reprlib.repr(word)}; use no quotes, backslashes or line breaks")
    return found


def _environment(value: Any, where: str) -> dict[str, str]:
    """Each becomes a line `export NAME='value'`."""
    found = rules.words(value, where)
    for name, word in found.items():
        if not _VARIABLE.fullmatch(name) or "\0" in word:
            raise ConfigError(f"{where}: {reprlib.repr(name)} is no variable such as OMP_NUM_THREADS with a text")
    return found


def _read(reader: Callable[[Any, str], Any]) -> dict[str, Any]:
    return {"read": reader}


@dataclass(frozen=True, kw_only=True)
class SbatchSpec:
    gpus_per_node: int = 8  # ranks on one node; a job has as many nodes as it needs
    at_once: int = 1  # jobs in the queue at one time
    poll_seconds: float = 10.0  # between two looks at the queue
    options: Mapping[str, str] = field(default_factory=dict, metadata=_read(_options))  # by long names: partition, ...
    setup: tuple[str, ...] = ()  # shell lines before the run: modules, virtual environments


@dataclass(frozen=True, kw_only=True)
class _Keys:
    """Of a sweep.yaml."""

    preset: str | None = None
    base: tuple[Path, ...] = ()  # config files, later ones win
    settings: Mapping[str, Any] = field(default_factory=dict, metadata=_read(_settings))  # over the base, in all
    ranks: int | None = None  # of every configuration; default tp·pp·cp·dp of each
    # Axes: key, settings of each value.
    grid: tuple[tuple[str, tuple[Mapping[str, Any], ...]], ...] = field(default=(), metadata=_read(_grid))
    list: tuple[Mapping[str, Any], ...] = field(default=(), metadata=_read(_listed))
    from_plan: Path | None = None
    top: int | None = None  # of the plan's entries, from the first on; default all
    exclude: tuple[rules.Condition, ...] = field(default=(), metadata=_read(_conditions))
    only: tuple[rules.Condition, ...] = field(default=(), metadata=_read(_conditions))
    steps: int = 8  # of each run
    warm_up_steps: int = field(default=3, metadata=OR_ZERO)  # the first of them, which are not measured
    timeout: float = DEFAULT_TIMEOUT
    memory_limit: float | None = field(
        default=None, metadata=_read(_bytes)
    )  # what is predicted to need more is refused
    cluster: str | None = None
    stack: str = "fused"
    environment: Mapping[str, str] = field(default_factory=dict, metadata=_read(_environment))
    program: Path | None = None  # script that trains in place of `megalite train`
    sbatch: SbatchSpec = field(default_factory=SbatchSpec)


@dataclass(frozen=True, kw_only=True)
class SweepSpec(_Keys):
    path: Path


KEYS = tuple(key.name for key in fields(_Keys))


def read_spec(path: Path) -> SweepSpec:
    """The sweep that a file describes. Paths in it are relative to its folder."""
    tree = rules.read_mapping(path, "sweep")
    found = {name: value for name, value in vars(build(_Keys, tree, f"sweep {path}")).items() if name in tree}
    if not {"grid", "list", "from_plan"} & set(found):
        raise ConfigError(f"sweep {path} is empty; add from_plan, list or grid: {{tp: [1, 2], pp: [1, 2]}}")
    for name, needs in (("top", "from_plan"), ("stack", "cluster")):
        if name in found and needs not in found:
            raise ConfigError(f"sweep {path}: {name} has no effect without {needs}; add {needs} or remove it")
    for name in ("from_plan", "program"):
        if name in found:
            found[name] = path.parent / found[name]
    found["base"] = tuple(path.parent / each for each in found.get("base", ()))
    # A name, unless there is such a file beside the sweep.
    for name in ("cluster", "stack"):
        if name in found and (path.parent / found[name]).is_file():
            found[name] = str(path.parent / found[name])
    spec = SweepSpec(path=path, **found)
    if spec.warm_up_steps >= spec.steps:
        raise ConfigError(f"sweep {path}: warm_up_steps {spec.warm_up_steps} needs steps: {spec.warm_up_steps + 5}")
    if spec.program is not None and not spec.program.is_file():
        raise ConfigError(f"sweep {path}: program {spec.program} does not exist; leave it out to use megalite train")
    return spec
