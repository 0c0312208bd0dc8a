"""The forms in which token files may be named: lists, weights, YAML mappings, and Megatron-LM's files of them."""

import json
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megalite.config.errors import ConfigError

PATH_SETTINGS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
"""Settings that name token files: prefixes, or weights and prefixes by turns."""

_SPLITS = {"train": "train_data_path", "valid": "valid_data_path", "test": "test_data_path"}
_FORMS = "[a, b], [0.3, a, 0.7, b], {a: 0.3, b: 0.7} or '0.3 a 0.7 b'"


def parse_data_path(entries: Sequence[str], name: str = "data_path") -> list[tuple[float | None, str]]:
    """(weight or None, prefix) of each dataset: `a b`, or weight/prefix pairs `0.3 a 0.7 b` (Megatron's rule).

    What reads as a number is a weight, whatever files there are; but in pairs the second may be a number too.

    Raises:
        ConfigError: a number that is no weight of a pair, or a weight that is not a finite number above 0.
    """
    numbers = [_number(entry) for entry in entries]
    if entries and len(entries) % 2 == 0 and all(number is not None for number in numbers[::2]):
        pairs: list[tuple[float | None, str]] = []
        for weight, prefix in zip(numbers[::2], entries[1::2], strict=True):
            if weight is None or not 0 < weight < math.inf:
                raise ConfigError(
                    f"{name}: weight {weight} of {prefix} must be a finite number above 0; leave the pair out to skip "
                    f"{prefix}"
                )
            pairs.append((weight, prefix))
        return pairs
    for entry, number in zip(entries, numbers, strict=True):
        if number is not None:
            raise ConfigError(
                f"{name}: {entry!r} looks like a weight, but {' '.join(entries)!r} is not weight/prefix pairs; "
                f"give every prefix a weight, as in 0.3 a 0.7 b, or none; a token file of this name is ./{entry}"
            )
    return [(None, prefix) for prefix in entries]


def _number(entry: str) -> float | None:
    """The number that a word spells; None for 1_0, which float() takes for 10."""
    try:
        return None if "_" in entry else float(entry)
    except ValueError:
        return None


def words_of(name: str, value: Any, where: str) -> list[str]:
    """The words of a command line for what YAML or JSON gives.

    A list is taken as it is, its numbers as they are written; a mapping has a weight for each prefix; text is cut at
    white space.

    Raises:
        ConfigError: nothing of this; the message starts with `where`.
    """
    if isinstance(value, str):
        words = value.split()
        if not words:
            raise ConfigError(f"{where}: {name} is empty; leave it out or give it a value")
        return words
    if isinstance(value, dict):
        words = []
        for prefix, weight in value.items():
            words += [_weight(name, prefix, weight, where), _word(name, prefix, where)]
        if not words:
            raise ConfigError(f"{where}: {name} is empty; leave it out or give it a value")
        return words
    if isinstance(value, list | tuple):
        return [_word(name, element, where) for element in value]
    raise ConfigError(
        f"{where}: {name} takes prefixes of token files such as {_FORMS}, got {reprlib.repr(value)}"
    )


def _word(name: str, value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value)  # of floats the shortest text with this value: 0.3 stays 0.3
    raise ConfigError(
        f"{where}: {name} takes weights and prefixes such as {_FORMS}, got the {type(value).__name__} "
        f"{reprlib.repr(value)} among them"
    )


def _weight(name: str, prefix: Any, weight: Any, where: str) -> str:
    if isinstance(weight, bool) or _number(str(weight)) is None:
        raise ConfigError(
            f"{where}: {name} takes a number as the weight of {prefix}, such as 0.3, got {reprlib.repr(weight)}"
        )
    return _word(name, weight, where)


def read_args_file(path: str, where: str) -> dict[str, list[str]]:
    """`--data-args-path FILE`: what --data-path would be given, on any number of lines.

    Raises:
        ConfigError: the file cannot be read or is empty; the message starts with `where`.
    """
    words = _read(path, where).split()
    if not words:
        raise ConfigError(f"{where} {path} is empty; it holds what --data-path takes, e.g. 0.3 a 0.7 b")
    return {"data_path": words}


def read_split_file(path: str, where: str) -> dict[str, list[str]]:
    """`--per-split-data-args-path FILE`: JSON with what each split's --..-data-path would be given.

    Raises:
        ConfigError: the file cannot be read or holds something else; the message starts with `where`.
    """
    example = '{"train": ["0.3", "a", "0.7", "b"], "valid": ["c"]}'
    try:
        tree = json.loads(_read(path, where), object_pairs_hook=_unique)
    except ConfigError as error:
        raise ConfigError(f"{where} {path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} {path} is not JSON: {error}; it holds e.g. {example}") from None
    if not isinstance(tree, dict) or not tree or set(tree) - set(_SPLITS):
        raise ConfigError(
            f"{where} {path} must hold paths for train, valid and test, e.g. {example}; found {reprlib.repr(tree)}"
        )
    found = {}
    for split, value in tree.items():
        if value is not None:  # Megatron-LM's way to leave a split out
            found[_SPLITS[split]] = words_of(split, value, f"{where} {path}")
    return found


DATA_FILES: Mapping[str, Callable[[str, str], dict[str, list[str]]]] = MappingProxyType(
    {"--data-args-path": read_args_file, "--per-split-data-args-path": read_split_file}
)
"""Megatron-LM's flag -> (its FILE, the flag) -> the settings in it."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a key given twice, the last one would win without a word."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{key} is given twice; keep one of them")
        found[key] = value
    return found


def _read(path: str, where: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{where} {path} cannot be read: {reason}") from None
