"""YAML files with the keys of a sweep: read so that nothing in them is dropped without a word."""

import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megalite.config.errors import ConfigError
from megalite.config.files import level_from_text
from megalite.config.values import nearest
from megalite.planner.hardware.reading import read_yaml

Reader = Callable[[Any, str], Any]
"""From a value and where it stands to the value with its type; raises ConfigError."""


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        ConfigError: there is no such file, it is not YAML, holds something else, or gives a key twice.
    """
    if not path.is_file():
        raise ConfigError(f"{what} file {path} does not exist")
    return read_yaml(path, kind=what)


def read_keys(tree: Mapping[str, Any], readers: Mapping[str, Reader], source: str) -> dict[str, Any]:
    """Each value read by its key's reader.

    Raises:
        ConfigError: a key that nobody reads (the nearest are named), or a value of another type.
    """
    found = {}
    for key, value in tree.items():
        if key not in readers:
            raise ConfigError(
                f"{source}: unknown key {key}{nearest(str(key), readers)} (one of {', '.join(readers)})"
            )
        found[key] = readers[key](value, f"{source}: {key}")
    return found


def whole(value: Any, where: str) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where} takes a whole number of at least 1, such as 4, got {reprlib.repr(value)}")
    return value


def count(value: Any, where: str) -> int:
    """A whole number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{where} takes a whole number such as 3, got {reprlib.repr(value)}")
    return value


def seconds(value: Any, where: str) -> float:
    """A length of time above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{where} takes a number of seconds such as 300, got {reprlib.repr(value)}")
    return float(value)


def text(value: Any, where: str) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} takes text, got {reprlib.repr(value)}; write it in quotes if you mean it")
    return value


def texts(value: Any, where: str) -> tuple[str, ...]:
    """One text or a list of them."""
    values = value if isinstance(value, list) else [value]
    return tuple(text(each, where) for each in values)


def entries(value: Any, where: str) -> list[Any]:
    """A list that is not empty."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} takes a list with something in it, got {reprlib.repr(value)}")
    return value


def mapping(value: Any, where: str) -> dict[str, Any]:
    """A mapping of names that is not empty."""
    if not isinstance(value, dict) or not value or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where} takes `name: value` lines, got {reprlib.repr(value)}")
    return value


def words(value: Any, where: str) -> dict[str, str]:
    """A mapping of names to text; numbers are taken as they are written."""
    found = {}
    for name, word in mapping(value, where).items():
        if isinstance(word, bool) or not isinstance(word, str | int | float):
            raise ConfigError(f"{where}: {name} takes text or a number, got {reprlib.repr(word)}")
        found[name] = str(word)
    return found


def plain_settings(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings of training by their own names, whichever spelling a mapping has, each with its type.

    Raises:
        ConfigError: no such setting, a value of another type, or a key that stands for a rule over other settings.
    """
    level = level_from_text(yaml.safe_dump(dict(tree)), where)
    if level.derived:
        flag = next(iter(level.derived))
        raise ConfigError(
            f"{where}: {flag.removeprefix('--').replace('-', '_')} is worked out of other settings and cannot be varied; "
            f"use vpp, pipeline_layers or num_query_groups"
        )
    return {name: given.value for name, given in level.given.items()}
