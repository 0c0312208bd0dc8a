"""What may stand in a sweep.yaml: values by type, conditions over settings, and what the sweep decides itself."""

import ast
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from megalite.config.describe import replace, settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.files import level_from_text
from megalite.config.reading import read_yaml
from megalite.config.run import RunConfig
from megalite.config.values import coerce, nearest

Reader = Callable[[Any, str], Any]  # from a value and where it stands to the value with its type; raises ConfigError


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The mapping that a YAML file holds; raises ConfigError if it holds something else, or gives a key twice."""
    if not path.is_file():
        raise ConfigError(f"{what} file {path} does not exist")
    return read_yaml(path, kind=what)


def read_keys(tree: Mapping[str, Any], readers: Mapping[str, Reader], source: str) -> dict[str, Any]:
    """Each value read by its key's reader; raises ConfigError for another key (the nearest are named)."""
    found = {}
    for key, value in tree.items():
        if key not in readers:
            raise ConfigError(f"{source}: unknown key {key}{nearest(str(key), readers)} (one of {', '.join(readers)})")
        found[key] = readers[key](value, f"{source}: {key}")
    return found


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _taking(what: str, legal: Callable[[Any], bool], convert: Callable[[Any], Any] = lambda value: value) -> Reader:
    def read(value: Any, where: str) -> Any:
        if not legal(value):
            raise ConfigError(f"{where} takes {what}, got {reprlib.repr(value)}")
        return convert(value)

    return read


whole = _taking("a whole number of at least 1, such as 4", lambda v: _number(v) and isinstance(v, int) and v >= 1)
count = _taking("a whole number such as 3", lambda v: _number(v) and isinstance(v, int) and v >= 0)
seconds = _taking("a number of seconds such as 300", lambda v: _number(v) and 0 < v < float("inf"), float)
text = _taking("text (in quotes if it looks like a number)", lambda v: isinstance(v, str) and bool(v.strip()))
entries = _taking("a list with something in it", lambda v: isinstance(v, list) and bool(v))
mapping = _taking(
    "`name: value` lines", lambda v: isinstance(v, dict) and bool(v) and all(isinstance(key, str) for key in v)
)


def texts(value: Any, where: str) -> tuple[str, ...]:
    """One text or a list of them."""
    return tuple(text(each, where) for each in (value if isinstance(value, list) else [value]))


def words(value: Any, where: str) -> dict[str, str]:
    """A mapping of names to text; numbers are taken as they are written."""
    take = _taking("text or a number", lambda word: isinstance(word, str) or _number(word), str)
    return {name: take(word, f"{where}: {name}") for name, word in mapping(value, where).items()}


def plain_settings(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings of training by their own names, for any spelling in a mapping, each with its type. Raises ConfigError for
    a key that stands for a rule over other settings."""
    level = level_from_text(yaml.safe_dump(dict(tree)), where)
    if level.derived:
        flag = next(iter(level.derived))
        raise ConfigError(f"{where}: {flag.removeprefix('--')} stands for other settings; use vpp or num_query_groups")
    return {name: given.value for name, given in level.given.items()}


RANKS = "ranks"  # beside the settings: the number of ranks that a configuration runs on
_BINARY: Mapping[type, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
)
_COMPARE: Mapping[type, Callable[[Any, Any], bool]] = MappingProxyType(
    {
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
        ast.In: lambda value, among: value in among,
        ast.NotIn: lambda value, among: value not in among,
    }
)
_EXAMPLE = '"tp * pp > 8" or {tp: 4, pp: [2, 4]}'


@dataclass(frozen=True)
class Condition:
    where: str
    values: tuple[tuple[str, tuple[Any, ...]], ...] = ()  # setting -> values; all must hold
    formula: ast.expr | None = None

    def holds(self, of: Mapping[str, Any]) -> bool:
        """Whether it is true of these settings; raises ConfigError where a setting of the formula has no value."""
        if self.formula is None:
            return all(of[name] in allowed for name, allowed in self.values)
        try:
            return bool(_value(self.formula, of))
        except (TypeError, ZeroDivisionError) as error:
            raise ConfigError(f"{self.where}: {ast.unparse(self.formula)} cannot be worked out: {error}") from None


def read_condition(given: Any, where: str) -> Condition:
    if isinstance(given, dict) and given:
        return Condition(where, values=tuple(_allowed(name, value, where) for name, value in given.items()))
    if not isinstance(given, str) or not given.strip():
        raise ConfigError(f"{where} takes conditions such as {_EXAMPLE}, got {reprlib.repr(given)}")
    try:
        formula = ast.parse(given.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        raise ConfigError(f"{where}: {given} is not a formula such as {_EXAMPLE}") from None
    _check(formula, where)
    return Condition(where, formula=formula)


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


_NODES = (
    *(ast.Name, ast.Constant, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.List, ast.Tuple),
    *(ast.Load, ast.boolop, ast.Not, ast.USub, *_BINARY, *_COMPARE),
)


def _check(formula: ast.expr, where: str) -> None:
    """Only numbers, text, settings, sums and comparisons."""
    known = (*settings(), RANKS)
    for node in ast.walk(formula):
        plain = not isinstance(node, ast.Constant) or isinstance(node.value, bool | int | float | str | None)
        if not isinstance(node, _NODES) or not plain:
            raise ConfigError(f"{where}: {ast.unparse(formula)} is no condition; write conditions such as {_EXAMPLE}")
        if isinstance(node, ast.Name) and node.id not in known:
            raise ConfigError(f"{where}: {node.id} is not a setting{nearest(node.id, known)}")


def _value(node: ast.expr, of: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name():
            return of[node.id]
        case ast.Constant():
            return node.value
        case ast.BoolOp():
            wanted = isinstance(node.op, ast.Or)
            return wanted if any(bool(_value(each, of)) == wanted for each in node.values) else not wanted
        case ast.UnaryOp():
            value = _value(node.operand, of)
            return not value if isinstance(node.op, ast.Not) else -value
        case ast.BinOp():
            return _BINARY[type(node.op)](_value(node.left, of), _value(node.right, of))
        case ast.Compare():
            left = _value(node.left, of)
            for op, right_node in zip(node.ops, node.comparators):
                right = _value(right_node, of)
                if not _COMPARE[type(op)](left, right):
                    return False
                left = right
            return True
        case ast.List() | ast.Tuple():
            return [_value(each, of) for each in node.elts]
    raise AssertionError(node)


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


def refuse_fixed(names: Iterable[str], where: str) -> None:
    """Raise ConfigError for the first setting that the sweep decides."""
    for name in names:
        why = _why(name)
        if why is not None:
            raise ConfigError(f"{where}: {name} cannot be set: {why}; remove it")


def fix(config: RunConfig, steps: int) -> tuple[RunConfig, frozenset[str]]:
    """The config as a sweep runs it, but for the run folder, and the settings that it no longer goes by."""
    values: dict[str, Any] = values_of(RunConfig())
    names = frozenset(name for name in settings() if _why(name) is not None)
    fixed = {name: values[name] for name in names} | {"train_iters": steps, "log_interval": 1}
    return replace(config, **fixed), names


def ignored(config: RunConfig) -> list[str]:
    """Settings of the base that no run of the sweep goes by, though they are not the default."""
    given, plain = values_of(config), values_of(RunConfig())
    return [name for name in settings() if _why(name) is not None and given[name] != plain[name]]
