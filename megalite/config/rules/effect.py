"""The words for a setting that would do nothing."""

from collections.abc import Iterable, Mapping

from megalite.config.describe import value_of
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig


def shown(config: RunConfig, name: str) -> str:
    """`ep 2`, `recompute_modules mlp moe`, and for a switch its name alone."""
    value = value_of(config, name)
    if value is True:
        return name
    if isinstance(value, float):
        return f"{name} {value:g}"
    return f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def asked_for(config: RunConfig, explicit: frozenset[str], names: Iterable[str]) -> list[str]:
    """Those of the settings that the user gave, other than to turn them off."""
    given = ((name, value_of(config, name)) for name in names if name in explicit)
    return [name for name, value in given if value is not None and value is not False]


def refuse_idle(
    config: RunConfig, explicit: frozenset[str], names: Iterable[str], *, cause: str, remedy: str
) -> None:
    """Raise ConfigError if the user gave one of the settings: `NAME VALUE has no effect CAUSE; REMEDY or remove it`."""
    for name in asked_for(config, explicit, names):
        raise ConfigError(f"{shown(config, name)} has no effect {cause}; {remedy} or remove it")


def refuse_elsewhere(
    config: RunConfig, explicit: frozenset[str], setting: str, known: Mapping[str, tuple[str, ...]]
) -> None:
    """Raise ConfigError if the user gave a setting that means nothing to the value that `setting` has.

    Args:
        known: setting -> the values of `setting` that it means something to.
    """
    value = value_of(config, setting)
    for name in asked_for(config, explicit, known):
        if value not in known[name]:
            cause = f"with {setting} {value}"
            remedy = f"use --{setting.replace('_', '-')} {known[name][0]}"
            refuse_idle(config, explicit, [name], cause=cause, remedy=remedy)
