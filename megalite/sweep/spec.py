"""Read `sweep.yaml`: the configurations to run, for how long and where; conditions; settings fixed by a sweep."""

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

from megalite.config.describe import coerce, replace, settings, values_of
from megalite.config.errors import ConfigError, nearest
from megalite.config.files import level_from_text
from megalite.config.numbers import parse_byte_size
from megalite.config.reading import OR_ZERO, build, read_yaml
from megalite.config.run import RunConfig


def entries(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} takes a list that is not empty, got {reprlib.repr(value)}")
    return value


def mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where} takes `name: value` lines, got {reprlib.repr(value)}")
    return value


def words(value: Any, where: str) -> dict[str, str]:
    """Check a mapping of names to text; numbers become text."""
    found = mapping(value, where)
    for name, word in found.items():
        if not isinstance(word, str | int | float) or isinstance(word, bool):
            raise ConfigError(f"{where}: {name} takes text or a number, got {reprlib.repr(word)}")
    return {name: str(word) for name, word in found.items()}


def plain_settings(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return training settings by name, converted to their types. Raises ConfigError for a key that sets other settings."""
    level = level_from_text(yaml.safe_dump(dict(tree)), where)
    if level.derived:
        flag = next(iter(level.derived))
        raise ConfigError(f"{where}: {flag.removeprefix('--')} sets other settings; use vpp or num_query_groups")
    return {name: setting.value for name, setting in level.given.items()}


RANKS = "ranks"  # name in conditions for the number of ranks of a configuration
_FORMULAS = ImmutableSandboxedEnvironment()
_EXAMPLE = '"tp * pp > 8" or {tp: 4, pp: [2, 4]}'


@dataclass(frozen=True)
class Condition:
    where: str
    text: str
    values: tuple[tuple[str, tuple[Any, ...]], ...] = ()  # (setting, allowed values); all must match
    formula: Callable[..., Any] | None = field(default=None, compare=False)

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Evaluate the condition; raises ConfigError if a setting in the formula has no value."""
        if self.formula is None:
            return all(values[name] in allowed for name, allowed in self.values)
        try:
            return bool(self.formula(values))
        except (TypeError, ArithmeticError, jinja2.TemplateError) as error:
            raise ConfigError(f"{self.where}: {self.text} cannot be evaluated: {error}") from None


def read_condition(value: Any, where: str) -> Condition:
    if isinstance(value, dict) and value:
        return Condition(where, str(value), tuple(_allowed(name, each, where) for name, each in value.items()))
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} takes conditions such as {_EXAMPLE}, got {reprlib.repr(value)}")
    try:
        names = find_undeclared_variables(_FORMULAS.parse(f"{{{{ {value} }}}}"))
        formula = _FORMULAS.compile_expression(value, undefined_to_none=False)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{where}: {value} is not a formula such as {_EXAMPLE}: {error}") from None
    known = (*settings(), RANKS)
    for name in sorted(names.difference(known)):
        raise ConfigError(f"{where}: {name} is not a setting{nearest(name, known)}")
    return Condition(where, value, formula=formula)


def _allowed(name: Any, value: Any, where: str) -> tuple[str, tuple[Any, ...]]:
    """Return (setting, values); a list is several values, or a single one if the setting itself is a list."""
    if name == RANKS:
        return RANKS, tuple(value) if isinstance(value, list) else (value,)
    several = isinstance(value, list) and not (name in settings() and settings()[name].is_list)
    found: list[Any] = []
    canonical = str(name)
    for each in value if several else [value]:
        if each is None and canonical in settings():
            found.append(coerce(settings()[canonical], None, where))
            continue
        found_settings = plain_settings({name: each}, where)
        if len(found_settings) != 1:
            raise ConfigError(f"{where}: {name} sets {' and '.join(found_settings)}; write those")
        ((canonical, plain),) = found_settings.items()
        found.append(plain)
    return canonical, tuple(found)


_WHY = {
    "steps sets the length of a run": ("train_iters", "train_samples", "exit_interval"),
    "every step has the full batch": ("rampup_batch_size", "step_batch_size_schedule", "seq_length_warmup"),
    "runs of a sweep only train": (
        *("eval_interval", "eval_iters", "full_validation", "valid_data_path", "test_data_path"),
    ),
    "each run has its own folder": ("run_dir", "tensorboard_dir"),
    "every step is written": ("log_interval",),
    "tracing takes time": ("trace", "trace_steps"),
    "profiling takes time": ("profile", "profile_step_start", "profile_step_end", "profile_ranks"),
    "recording allocations takes time": ("record_memory_history",),
    "the sweep reads only metrics.jsonl": ("metrics", "wandb_project", "wandb_entity", "wandb_exp_name"),
    "short runs need no learning-rate schedule": ("min_lr",),
}
_FIXED = {name: why for why, names in _WHY.items() for name in names}


def _why(name: str) -> str | None:
    """Return why the sweep fixes a setting, or None if it does not."""
    if settings()[name].section == "checkpoint":
        return "runs of a sweep neither load nor save"
    return _FIXED["min_lr"] if name.startswith("lr_") else _FIXED.get(name)


def fix_settings(config: RunConfig, steps: int) -> tuple[RunConfig, frozenset[str]]:
    """Return the config as a sweep runs it, without the run folder, and the settings that the sweep fixes."""
    fixed = _decided() | {"train_iters": steps, "log_interval": 1}
    return replace(config, **fixed), frozenset(fixed)


@cache
def _decided() -> dict[str, Any]:
    """Return the settings that a sweep fixes, at their defaults."""
    return {name: setting.default for name, setting in settings().items() if _why(name) is not None}


def ignored(config: RunConfig) -> list[str]:
    """List settings of the base that differ from the default but are fixed by the sweep."""
    values, plain = values_of(config), values_of(RunConfig())
    return [name for name in settings() if _why(name) is not None and values[name] != plain[name]]


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
                raise ConfigError(f"{where}: {taken[setting]} and {name} both set {setting}; keep one of them")
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
    """Each option becomes a line `#SBATCH --name=value`."""
    found = words(value, where)
    for name, word in found.items():
        if not _OPTION.fullmatch(name):
            raise ConfigError(f"{where}: {reprlib.repr(name)} is not a long option of sbatch such as cpus-per-task")
        if not word.isprintable() or any(letter in word for letter in "'\"\\"):
            raise ConfigError(f"{where}: {name} is {reprlib.repr(word)}; remove quotes, backslashes and line breaks")
    return found


def _environment(value: Any, where: str) -> dict[str, str]:
    """Each variable becomes a line `export NAME='value'`."""
    found = words(value, where)
    for name, word in found.items():
        if not _VARIABLE.fullmatch(name) or "\0" in word:
            raise ConfigError(f"{where}: {reprlib.repr(name)} is not a variable such as OMP_NUM_THREADS with a text")
    return found


def _resources(value: Any, where: str) -> dict[str, float]:
    found = words(value, where)
    for name, word in found.items():
        if not re.fullmatch(r"\d+(\.\d+)?", word, re.ASCII) or float(word) == 0:
            raise ConfigError(f"{where}: {name} is {reprlib.repr(word)}; use a number above 0, such as 1")
    return {name: float(word) for name, word in found.items()}


@dataclass(frozen=True, kw_only=True)
class NodesSpec:
    """How runs use the nodes of a cluster."""

    gpus_per_node: int = 8  # ranks per node; a run uses as many nodes as it needs
    at_once: int = 1  # runs that wait or run at the same time
    poll_seconds: float = 10.0  # between two checks of a run


@dataclass(frozen=True, kw_only=True)
class SbatchSpec(NodesSpec):
    # By long names, such as partition.
    options: Mapping[str, str] = field(default_factory=dict, metadata={"read": _options})
    setup: tuple[str, ...] = ()  # shell lines before the run: modules, virtual environments


@dataclass(frozen=True, kw_only=True)
class RaySpec(NodesSpec):
    address: str | None = None  # of the cluster; default: RAY_ADDRESS, or a new cluster on this host
    # Per rank, by Ray's names.
    resources: Mapping[str, float] = field(default_factory=lambda: {"GPU": 1.0}, metadata={"read": _resources})


@dataclass(frozen=True, kw_only=True)
class KubernetesSpec(NodesSpec):
    image: str | None = None  # image with a `python` that can import megalite
    claim: str | None = None  # PersistentVolumeClaim with the output folder, ReadWriteMany
    mount: Path = Path("/runs")  # its mount point on this host and in the pods
    # Per rank, by the cluster's names.
    resources: Mapping[str, float] = field(
        default_factory=lambda: {"nvidia.com/gpu": 1.0}, metadata={"read": _resources}
    )


@dataclass(frozen=True, kw_only=True)
class _Keys:
    """The keys of sweep.yaml."""

    preset: str | None = None
    base: tuple[Path, ...] = ()  # config files; later ones take precedence
    settings: Mapping[str, Any] = field(default_factory=dict, metadata={"read": _settings})  # of all runs, over base
    ranks: int | None = None  # of each configuration; default: its tp·pp·cp·dp
    # Axes: (key, settings of each of its values).
    grid: tuple[tuple[str, tuple[Mapping[str, Any], ...]], ...] = field(default=(), metadata={"read": _grid})
    list: tuple[Mapping[str, Any], ...] = field(default=(), metadata={"read": _listed})
    from_plan: Path | None = None
    top: int | None = None  # number of the plan's entries, best first; default: all
    exclude: tuple[Condition, ...] = field(default=(), metadata={"read": _conditions})
    only: tuple[Condition, ...] = field(default=(), metadata={"read": _conditions})
    steps: int = 8  # per run
    warm_up_steps: int = field(default=3, metadata=OR_ZERO)  # number of first steps that are not measured
    timeout: float = 300.0  # seconds per run, including its start
    # Runs with a larger predicted memory are refused.
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
    """Read a sweep from a file. Paths in it are relative to its folder."""
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
    # These are names, unless such a file exists beside the sweep.
    for name in ("cluster", "stack"):
        if name in found and (path.parent / found[name]).is_file():
            found[name] = str(path.parent / found[name])
    spec = SweepSpec(path=path, **found)
    if spec.warm_up_steps >= spec.steps:
        raise ConfigError(f"sweep {path}: warm_up_steps {spec.warm_up_steps} needs steps: {spec.warm_up_steps + 5}")
    if spec.program is not None and not spec.program.is_file():
        raise ConfigError(f"sweep {path}: program {spec.program} does not exist; leave it out to use megalite train")
    return spec
