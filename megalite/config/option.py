"""`option()`: a dataclass field that also knows how it is spelled on the command line, and what it may be."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, NamedTuple

MOST = 2.0**40
"""Where a number has no other upper bound: more than any run needs, little enough that counting with it is quick."""


class Bounds(NamedTuple):
    """What a number (of a list, each of them) may be."""

    at_least: float = -math.inf
    above: float = -math.inf
    below: float = MOST
    at_most: float = math.inf

    def error(self, value: float) -> str | None:
        """`must be above 0`, or None."""
        if value < self.at_least:
            return f"must be at least {plain(self.at_least)}"
        if value <= self.above:
            return f"must be above {plain(self.above)}"
        if value >= self.below:
            return f"must be below {plain(self.below)}"
        return f"must be at most {plain(self.at_most)}" if value > self.at_most else None


def plain(value: float) -> str:
    """A number, whole ones with all their digits."""
    return str(int(value)) if value == int(value) and abs(value) >= 1e6 else f"{value:g}"


def option(
    default: Any, *, flags: tuple[str, ...] = (), choices: Collection[str] = (), basic: bool = False, **bounds: float
) -> Any:
    """Declare one setting of a config dataclass.

    The attribute docstring under the field is its help text; the field's name, with dashes, is its flag.

    Args:
        default: value when no preset, file or flag sets it. A list default is copied for each instance.
        flags: further spellings (`("--tensor-model-parallel-size",)`); Megatron-LM's long names go here.
        choices: the legal values, where they are few.
        basic: shown by `--help`; the others only by `--help-all`.
        bounds: of a number, as in `Bounds`.
    """
    metadata = {"flags": flags, "legal": choices, "basic": basic, "bounds": Bounds(**bounds) if bounds else None}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
