"""Convert text and YAML values to the types of settings."""

import math
from typing import Any

from megalite.config.describe import Setting
from megalite.config.errors import ConfigError, nearest, shortened
from megalite.config.registry import Registry
from megalite.config.strategies import ALIASES

_LARGEST = 2**63
_EXAMPLES = {int: "4", float: "0.1", bool: "true", str: "some text"}


def _number(text: str, kind: type) -> int | float | None:
    """Return the number that `text` spells, or None. `1e6` is an integer, `1.5` is not; nan and inf are not numbers."""
    try:
        if kind is int and text.strip().lstrip("+-").replace("_", "").isdecimal():
            return int(text) if abs(int(text)) < _LARGEST else None
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value) or (kind is int and (value != int(value) or abs(value) >= _LARGEST)):
        return None
    return kind(value)


def whole_number(text: str, where: str, least: int = 1) -> int:
    """Parse a whole number. Raises ConfigError: another text, or a smaller number; the message starts with `where`."""
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{where} takes a whole number of at least {least}, such as 4, got {text}")
    return int(text)


def _element(setting: Setting, value: Any, where: str) -> Any:
    """Convert one value to the setting's element type; text that spells a number becomes that number."""
    if setting.type is str:
        if not isinstance(value, str):
            nested = isinstance(value, list | tuple | dict)
            remedy = "" if nested else f"; write it in quotes if you mean it: '{value}'"
            raise ConfigError(
                f"{where}: {setting.name} takes text, got the {type(value).__name__} {shortened(value)}{remedy}"
            )
        if not value.strip():
            raise ConfigError(f"{where}: {setting.name} is empty; leave it out or give it a value")
        return value
    if setting.type is bool:
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{where}: {setting.name} takes true or false, got {shortened(value)}")
    if not isinstance(value, bool):
        number = _number(str(value), setting.type) if isinstance(value, str | int | float) else None
        if number is not None:
            return number
    kind = "a whole number" if setting.type is int else "a number"
    if str(value).lstrip("+-").isdecimal():
        kind += " below 2^63"
    raise ConfigError(f"{where}: {setting.name} takes {kind} such as {_EXAMPLES[setting.type]}, got {shortened(value)}")


def check_choice(setting: Setting, value: Any, where: str) -> None:
    """Raise ConfigError unless the value is one of the setting's choices, if it has any."""
    registered = isinstance(setting.legal, Registry)
    if (registered or setting.legal) and value is not None and value not in setting.legal:
        known = f"one of {', '.join(setting.choices)}" if setting.choices else "nothing is registered for it"
        more = "; --import MODULE registers others" if registered else ""
        raise ConfigError(
            f"{where}: {setting.name} cannot be {shortened(value)}{nearest(str(value), setting.choices)} ({known}{more})"
        )


def coerce(setting: Setting, value: Any, where: str) -> Any:
    """Convert a value from YAML or a caller to the setting's type; dp_strategy also accepts aliases. Raises
    ConfigError: another type or not among the choices; the message starts with `where`."""
    if value is None:
        if setting.optional:
            return None
        raise ConfigError(f"{where}: {setting.name} cannot be null; its default is {setting.default!r}")
    if setting.is_list:
        if isinstance(value, str) and setting.type is int:
            value = value.split(",")
        if not isinstance(value, list | tuple):
            example = f"[{_EXAMPLES[setting.type]}]"
            raise ConfigError(f"{where}: {setting.name} takes a list such as {example}, got {shortened(value)}")
        return [_element(setting, element, where) for element in value]
    if isinstance(value, list | tuple | dict):
        raise ConfigError(f"{where}: {setting.name} takes one {setting.type.__name__}, got {shortened(value)}")
    coerced = _element(setting, value, where)
    if setting.name != "dp_strategy" or coerced not in ALIASES:
        check_choice(setting, coerced, where)
    return coerced


def from_words(setting: Setting, words: list[str], flag: str) -> Any:
    """Convert command-line words to a value. `none` unsets an optional setting."""
    if setting.optional and words in (["none"], ["None"]):
        return None
    if setting.is_list:
        if setting.type is int:
            words = [part for word in words for part in word.split(",") if part]
        return coerce(setting, words, flag)
    return coerce(setting, words[0], flag)
