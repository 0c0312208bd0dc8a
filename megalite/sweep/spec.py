"""`sweep.yaml`: which configurations to run, for how long, and how; conditions over settings, and what the sweep decides itself."""

import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megalite.config.byte_size import parse_byte_size
from megalite.config.describe import replace, settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.files import level_from_text
from megalite.config.reading import OR_ZERO, build, read_yaml
from megalite.config.run import RunConfig
from megalite.config.values import coerce, nearest


def entries(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} takes a list with something in it, got {reprlib.repr(value)}")
    return value


def mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where} takes `name: value` lines, got {reprlib.repr(value)}")
    return value


def words(value: Any, where: str) -> dict[str, str]:
    """A mapping of names to text; numbers are taken as they are written."""
    found = mapping(value, where)
    for name, word in found.items():
        if not isinstance(word, str | int | float) or isinstance(word, bool):
            raise ConfigError(f"{where}: {name} takes text or a number, got {reprlib.repr(word)}")
    return {name: str(word) for name, word in found.items()}


def plain_settings(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings of training by their own names, for any spelling in a mapping, each with its type. Raises ConfigError for
    a key that stands for a rule over other settings."""
    level = level_from_text(yaml.safe_dump(dict(tree)), where)
    if level.derived:
        flag = next(iter(level.derived))
        raise ConfigError(f"{where}: {flag.removeprefix('--')} stands for other settings; use vpp or num_query_groups")
    return {name: given.value for name, given in level.given.items()}


RANKS = "ranks"  # beside the settings: the number of ranks that a configuration runs on
_FORMULAS = ImmutableSandboxedEnvironment()  # of which a formula is an expression
_EXAMPLE = '"tp * pp > 8" or {tp: 4, pp: [2, 4]}'


@dataclass(frozen=True)
class Condition:
    where: str
    text: str
    values: tuple[tuple[str, tuple[Any, ...]], ...] = ()  # setting -> values; all must hold
    formula: Callable[..., Any] | None = field(default=None, compare=False)

    def holds(self, of: Mapping[str, Any]) -> bool:
        """Whether it is true of these settings; raises ConfigError where a setting of the formula has no value."""
        if self.formula is None:
            return all(of[name] in allowed for name, allowed in self.values)
        try:
            return bool(self.formula(of))
        except (TypeError, ArithmeticError, jinja2.TemplateError) as error:
            raise ConfigError(f"{self.where}: {self.text} cannot be worked out: {error}") from None


def read_condition(given: Any, where: str) -> Condition:
    if isinstance(given, dict) and given:
        return Condition(where, str(given), tuple(_allowed(name, value, where) for name, value in given.items()))
    if not isinstance(given, str) or not given.strip():
        raise ConfigError(f"{where} takes conditions such as {_EXAMPLE}, got {reprlib.repr(given)}")
    try:
        names = find_undeclared_variables(_FORMULAS.parse(f"{{{{ {given} }}}}"))
        formula = _FORMULAS.compile_expression(given, undefined_to_none=False)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{where}: {given} is not a formula such as {_EXAMPLE}: {error}") from None
    known = (*settings(), RANKS)
    for name in sorted(names.difference(known)):
        raise ConfigError(f"{where}: {name} is not a setting{nearest(name, known)}")
    return Condition(where, given, formula=formula)


def _allowed(name: Any, value: Any, where: str) -> tuple[str, tuple[Any, ...]]:
    """Setting and values; a list is several values, or one where the setting itself is a list."""
    if name == RANKS:
        return RANKS, tuple(value) if isinstance(value, list) else (value,)
    several = isinstance(value, list) and not (name in settings() and settings()[name].is_list)
    found: list[Any] = []
    canonical = str(name)
    for each in value if several else [value]:
        if each is None and canonical in settings():
            found.append(coerce(settings()[canonical], None, where))
            continue
        given = plain_settings({name: each}, where)
        if len(given) != 1:
            raise ConfigError(f"{where}: {name} stands for {' and '.join(given)}; write those")
        ((canonical, plain),) = given.items()
        found.append(plain)
    return canonical, tuple(found)


_WHY = {
    "the length of a run is steps": ("train_iters", "train_samples", "exit_interval"),
    "every step has the full batch": ("rampup_batch_size", "step_batch_size_schedule", "seq_length_warmup"),
    "the runs of a sweep only train": ("eval_interval", "eval_iters", "test_data_path"),
    "each run has its own folder": ("run_dir", "tensorboard_dir"),
    "every step is written": ("log_interval",),
    "tracing takes time": ("trace", "trace_steps"),
    "profiling takes time": ("profile", "profile_step_start", "profile_step_end", "profile_ranks"),
    "noting allocations takes time": ("record_memory_history",),
    "the sweep reads metrics.jsonl alone": ("metrics", "wandb_project", "wandb_entity", "wandb_exp_name"),
    "so short a run needs no schedule of the learning rate": ("min_lr",),
}
_FIXED = {name: why for why, names in _WHY.items() for name in names}


def _why(name: str) -> str | None:
    """Why the sweep itself decides a setting, or None."""
    if settings()[name].section == "checkpoint":
        return "the runs of a sweep neither load nor save"
    return _FIXED["min_lr"] if name.startswith("lr_") else _FIXED.get(name)


def fix(config: RunConfig, steps: int) -> tuple[RunConfig, frozenset[str]]:
    """The config as a sweep runs it, but for the run folder, and the settings that it no longer goes by."""
    fixed = _decided() | {"train_iters": steps, "log_interval": 1}
    return replace(config, **fixed), frozenset(fixed)


@cache
def _decided() -> dict[str, Any]:
    """What the sweep decides, at the defaults."""
    return {name: setting.default for name, setting in settings().items() if _why(name) is not None}


def ignored(config: RunConfig) -> list[str]:
    """Settings of the base that no run of the sweep goes by, though they are not the default."""
    given, plain = values_of(config), values_of(RunConfig())
    return [name for name in settings() if _why(name) is not None and given[name] != plain[name]]


_OPTION = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def _settings(value: Any, where: str) -> dict[str, Any]:
    found = plain_settings(mapping(value, where), where)
    for name in found:
        if (why := _why(name)) is not None:
            raise ConfigError(f"{where}: {name} cannot be set: {why}; remove it")
    return found


def _grid(value: Any, where: str) -> tuple[tuple[str, tuple[dict[str, Any], ...]], ...]:
    axes = []
    taken: dict[str, str] = {}
    for name, values in mapping(value, where).items():
        points = []
        for each in entries(values, f"{where}: {name}"):
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
    listed = enumerate(entries(value, where), 1)
    return tuple(_settings(each, f"{where}, entry {number}") for number, each in listed)


def _conditions(value: Any, where: str) -> tuple[Condition, ...]:
    return tuple(read_condition(each, where) for each in entries(value, where))


def _bytes(value: Any, where: str) -> float:
    size = parse_byte_size(value) if isinstance(value, str) else None
    if size is None:
        raise ConfigError(f"{where} takes a size such as 70GB or 64GiB, got {reprlib.repr(value)}")
    return size


def _options(value: Any, where: str) -> dict[str, str]:
    """Each becomes a line `#SBATCH --name=value`."""
    found = words(value, where)
    for name, word in found.items():
        if not _OPTION.fullmatch(name):
            raise ConfigError(f"{where}: {reprlib.repr(name)} is no long option of sbatch such as cpus-per-task")
        if not word.isprintable() or any(letter in word for letter in "'\"\\"):
            raise ConfigError(f"{where}: {name} is {reprlib.repr(word)}; use no quotes, backslashes or line breaks")
    return found


def _environment(value: Any, where: str) -> dict[str, str]:
    """Each becomes a line `export NAME='value'`."""
    found = words(value, where)
    for name, word in found.items():
        if not _VARIABLE.fullmatch(name) or "\0" in word:
            raise ConfigError(f"{where}: {reprlib.repr(name)} is no variable such as OMP_NUM_THREADS with a text")
    return found


def _resources(value: Any, where: str) -> dict[str, float]:
    found = words(value, where)
    for name, word in found.items():
        if not re.fullmatch(r"\d+(\.\d+)?", word, re.ASCII) or float(word) == 0:
            raise ConfigError(f"{where}: {name} is {reprlib.repr(word)}; give a number of them, such as 1")
    return {name: float(word) for name, word in found.items()}


@dataclass(frozen=True, kw_only=True)
class NodesSpec:
    """Of runs on the nodes of a cluster."""

    gpus_per_node: int = 8  # ranks on one node; a run has as many nodes as it needs
    at_once: int = 1  # runs that wait or run at one time
    poll_seconds: float = 10.0  # between two looks at each


@dataclass(frozen=True, kw_only=True)
class SbatchSpec(NodesSpec):
    # By long names: partition, ...
    options: Mapping[str, str] = field(default_factory=dict, metadata={"read": _options})
    setup: tuple[str, ...] = ()  # shell lines before the run: modules, virtual environments


@dataclass(frozen=True, kw_only=True)
class RaySpec(NodesSpec):
    address: str | None = None  # of the cluster; default: RAY_ADDRESS, or one of this host alone
    # Of one rank, by Ray's names.
    resources: Mapping[str, float] = field(default_factory=lambda: {"GPU": 1.0}, metadata={"read": _resources})


@dataclass(frozen=True, kw_only=True)
class KubernetesSpec(NodesSpec):
    image: str | None = None  # with megalite in it, where `python` finds it
    claim: str | None = None  # PersistentVolumeClaim that has the output folder, writable by many
    mount: Path = Path("/runs")  # where this host and the pods have it
    # Of one rank, by the cluster's names.
    resources: Mapping[str, float] = field(
        default_factory=lambda: {"nvidia.com/gpu": 1.0}, metadata={"read": _resources}
    )


@dataclass(frozen=True, kw_only=True)
class _Keys:
    """Of a sweep.yaml."""

    preset: str | None = None
    base: tuple[Path, ...] = ()  # config files, later ones win
    settings: Mapping[str, Any] = field(default_factory=dict, metadata={"read": _settings})  # over the base, in all
    ranks: int | None = None  # of every configuration; default tp·pp·cp·dp of each
    # Axes: key, settings of each value.
    grid: tuple[tuple[str, tuple[Mapping[str, Any], ...]], ...] = field(default=(), metadata={"read": _grid})
    list: tuple[Mapping[str, Any], ...] = field(default=(), metadata={"read": _listed})
    from_plan: Path | None = None
    top: int | None = None  # of the plan's entries, from the first on; default all
    exclude: tuple[Condition, ...] = field(default=(), metadata={"read": _conditions})
    only: tuple[Condition, ...] = field(default=(), metadata={"read": _conditions})
    steps: int = 8  # of each run
    warm_up_steps: int = field(default=3, metadata=OR_ZERO)  # the first of them, which are not measured
    timeout: float = 300.0  # seconds that a run may take, its start included
    # What is predicted to need more is refused.
    memory_limit: float | None = field(default=None, metadata={"read": _bytes})
    cluster: str | None = None
    stack: str = "fused"
    environment: Mapping[str, str] = field(default_factory=dict, metadata={"read": _environment})
    program: Path | None = None  # script that trains in place of `megalite train`
    sbatch: SbatchSpec = field(default_factory=SbatchSpec)
    ray: RaySpec = field(default_factory=RaySpec)
    kubernetes: KubernetesSpec = field(default_factory=KubernetesSpec)


@dataclass(frozen=True, kw_only=True)
class SweepSpec(_Keys):
    path: Path


def read_spec(path: Path) -> SweepSpec:
    """The sweep that a file describes. Paths in it are relative to its folder."""
    tree = read_yaml(path, kind="sweep")
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
