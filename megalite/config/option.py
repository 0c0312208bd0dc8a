"""`option()`: a dataclass field with its command-line flags and its legal values."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, NamedTuple

MOST = 2.0**40
"""Upper bound of numbers without another one: above any real run, yet small enough for fast arithmetic."""


class Bounds(NamedTuple):
    """Bounds of a number, or of each number of a list."""

    at_least: float = -math.inf
    above: float = -math.inf
    below: float = MOST
    at_most: float = math.inf

    def error(self, value: float) -> str | None:
        """Return an error such as `must be above 0`; None if the value is legal."""
        if value < self.at_least:
            return f"must be at least {plain(self.at_least)}"
        if value <= self.above:
            return f"must be above {plain(self.above)}"
        if value >= self.below:
            return f"must be below {plain(self.below)}"
        return f"must be at most {plain(self.at_most)}" if value > self.at_most else None


def as_number(text: str) -> float:
    """Return the number that a text spells, or NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def plain(value: float) -> str:
    """Format a number; large whole numbers keep all digits."""
    return str(int(value)) if value == int(value) and abs(value) >= 1e6 else f"{value:g}"


def option(
    default: Any, *, flags: tuple[str, ...] = (), choices: Collection[str] = (), basic: bool = False, **bounds: float
) -> Any:
    """Declare one setting of a config dataclass.

    The attribute docstring under the field is its help text; the field's name, with dashes, is its flag.

    Args:
        default: value if no preset, file or flag sets it. A list default is copied for each instance.
        flags: additional spellings (`("--tensor-model-parallel-size",)`), such as Megatron-LM's long names.
        choices: legal values, if they are few.
        basic: whether `--help` lists the setting; `--help-all` lists all.
        bounds: bounds of a number, see `Bounds`."""
    metadata = {"flags": flags, "legal": choices, "basic": basic, "bounds": Bounds(**bounds) if bounds else None}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
