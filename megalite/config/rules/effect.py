"""What several rules say: a setting without effect, and the divisors that would work."""

import math
from collections.abc import Iterable, Mapping

from megalite.config.describe import value_of
from megalite.config.errors import Findings
from megalite.config.run import RunConfig


def divisors(number: int) -> str:
    """The divisors of a number: `1, 2, 3, 6`."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return ", ".join(map(str, sorted({*small, *(number // d for d in small)})))


def next_multiple(number: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `number`."""
    return -(-number // unit) * unit


def shown(config: RunConfig, name: str) -> str:
    """`ep 2`, `recompute_modules mlp moe`, and for a switch its name alone."""
    value = value_of(config, name)
    if value is True:
        return name
    if isinstance(value, float):
        return f"{name} {value:g}"
    return f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def refuse_idle(
    config: RunConfig, explicit: frozenset[str], names: Iterable[str], *, cause: str, remedy: str
) -> Findings:
    """`NAME VALUE has no effect CAUSE; REMEDY or remove it` for each of the settings that the user gave."""
    for name in names:
        if name in explicit:
            yield _idle(config, name, cause=cause, remedy=remedy)


def _idle(config: RunConfig, name: str, *, cause: str, remedy: str) -> Findings:
    value = value_of(config, name)
    if value is not None and value is not False:  # that turns it off
        yield f"{shown(config, name)} has no effect {cause}; {remedy} or remove it"


def refuse_elsewhere(
    config: RunConfig, explicit: frozenset[str], setting: str, known: Mapping[str, tuple[str, ...]]
) -> Findings:
    """Each setting that the user gave and that means nothing to the value that `setting` has.

    Args:
        known: setting -> the values of `setting` that it means something to.
    """
    value = value_of(config, setting)
    for name in known:
        if value not in known[name]:
            cause = f"with {setting} {value}"
            remedy = f"use --{setting.replace('_', '-')} {known[name][0]}"
            yield refuse_idle(config, explicit, [name], cause=cause, remedy=remedy)
