"""Frozen dataclasses from YAML and back, with every key and value checked and named."""

import dataclasses
import math
import reprlib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from megalite.config.errors import ConfigError, Problems
from megalite.config.reading import load_yaml, near_files, read_text
from megalite.config.values import nearest

T = TypeVar("T")
PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
OR_ZERO = {"least": "zero"}
"""Metadata of a field that may be 0."""
AT_LEAST_ONE = {"least": "one"}
"""Metadata of a field that is 1 or more."""
FRACTION = {"least": "positive", "most": 1.0}
"""Metadata of a field that is a share of something: above 0, at most 1."""


def find_file(name_or_path: str, folder: Path, *, kind: str) -> Path:
    """The file of a known name, or the path itself if it ends in .yaml or .yml or exists.

    Raises:
        ConfigError: neither; the nearest names are given.
    """
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name_or_path in names:
        return folder / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(f"{kind} file {path} does not exist{near_files(path)}")
    raise ConfigError(
        f"unknown {kind} {name_or_path}{nearest(name_or_path, names)} (there are {', '.join(names)}, or give the path "
        f"of a YAML file)"
    )


def read_yaml(path: Path, *, kind: str) -> dict[str, Any]:
    """The mapping in a file.

    Raises:
        ConfigError: it cannot be read, is not YAML, or holds something else.
    """
    twice = Problems()
    try:
        tree = load_yaml(read_text(path), twice)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{kind} file {path} cannot be read: {error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{kind} file {path} is not YAML: {' '.join(str(error).split())}") from None
    if twice.found:
        raise ConfigError(*(f"{kind} file {path}: {problem}" for problem in twice.found))
    if not isinstance(tree, dict):
        found = "nothing" if tree is None else reprlib.repr(tree)
        raise ConfigError(f"{kind} file {path} must hold `key: value` lines such as `name: my-{kind}`, found {found}")
    return tree


def build(cls: type[T], tree: Any, where: str) -> T:
    """The dataclass that a mapping describes; dataclasses in it are mappings in turn.

    Args:
        where: how messages begin: the file, and the section in it.

    Raises:
        ConfigError: a key is unknown or missing, or a value is of another type, not finite or out of range.
    """
    if not isinstance(tree, dict):
        raise ConfigError(f"{where} takes `key: value` lines, got {reprlib.repr(tree)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in tree:
        if key not in fields:
            raise ConfigError(f"{where}: unknown key {key}{nearest(str(key), fields)} (keys are {', '.join(fields)})")
    types = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        if name not in tree:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise ConfigError(f"{where}: {name} is missing; add `{name}: {_example(types[name])}`")
            continue
        values[name] = _value(types[name], tree[name], f"{where}: {name}", field.metadata)
    return cls(**values)


def _example(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return "{...}"
    if typing.get_origin(kind) is Mapping or kind is Mapping:
        return "{...}"
    return {int: "8", float: "1.0e9", bool: "true", str: "some text"}[kind]


def _value(kind: Any, value: Any, where: str, metadata: Mapping[str, Any]) -> Any:
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, where)
    if typing.get_origin(kind) is Mapping or str(kind).startswith("collections.abc.Mapping"):
        return _mapping(typing.get_args(kind)[1], value, where, metadata)
    if kind is str:
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{where} takes text, got {reprlib.repr(value)}; write it in quotes")
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{where} takes true or false, got {reprlib.repr(value)}")
        return value
    return _number(kind, value, where, metadata)


def _mapping(kind: Any, value: Any, where: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} takes `name: value` lines, got {reprlib.repr(value)}")
    known = metadata.get("keys")
    for key in value:
        if not isinstance(key, str) or (known is not None and key not in known):
            names = f"{nearest(str(key), known)} (there are {', '.join(known)})" if known else ""
            raise ConfigError(f"{where}: unknown name {key}{names}")
    if known is not None and not value:
        raise ConfigError(f"{where} is empty; give at least one of {', '.join(known)}")
    return {key: _value(kind, inner, f"{where}.{key}", metadata) for key, inner in value.items()}


def _number(kind: type, value: Any, where: str, metadata: Mapping[str, Any]) -> int | float:
    number = value
    if isinstance(value, str):
        try:
            number = float(value)  # YAML takes 1e9 for text: it wants 1.0e+9
        except ValueError:
            number = None
    whole = isinstance(number, int) or (isinstance(number, float) and math.isfinite(number) and number % 1 == 0)
    if isinstance(number, bool) or not isinstance(number, int | float) or (kind is int and not whole):
        wanted = "a whole number such as 8" if kind is int else "a number such as 1.0e9"
        raise ConfigError(f"{where} takes {wanted}, got {reprlib.repr(value)}")
    least = {"zero": 0.0, "one": 1.0}.get(metadata.get("least", ""))
    if not math.isfinite(number) or number < (least or 0.0) or (number == 0 and least is None):
        wanted = "above 0" if least is None else f"{least:g} or more"
        raise ConfigError(f"{where} is {value}; it must be {wanted} and finite")
    if number > metadata.get("most", math.inf):
        raise ConfigError(f"{where} is {value}; it is a share, at most {metadata['most']:g}")
    return kind(number)


def write_yaml(value: Any, path: str | Path, *, header: str = "") -> None:
    """A dataclass as a file that `build` reads back equal; `header` becomes comment lines at its top.

    Raises:
        ConfigError: the file cannot be written.
    """
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    text = yaml.safe_dump(plain(value), sort_keys=False, allow_unicode=True, width=110)
    try:
        Path(path).write_text(comment + text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give a path in a folder that exists") from None


def plain(value: Any) -> Any:
    """Dataclasses and mappings as dicts, numbers as Python's own."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, bool | str):
        return value
    return int(value) if isinstance(value, int) else float(value)
