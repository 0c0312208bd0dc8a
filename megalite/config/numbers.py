"""Numbers as users write and read them: their types and bounds, byte sizes such as `12GiB` and `800MB`, durations and rates."""

import math
import re
from typing import Any, NamedTuple

from megalite.config.errors import ConfigError, shortened

MOST = 2.0**40
"""Upper bound of numbers without another one: above any real run, yet small enough for fast arithmetic."""
_LARGEST = 2**63


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


def parse_number(value: Any, kind: type) -> Any:
    """Return the int or float that `value` is or spells: 1e6 is a whole number, 1.5 is not; nan and inf are not numbers.
    Raises ConfigError: `takes a whole number such as 4, got 'x'`, before which the caller names the setting."""
    text = str(value).strip() if isinstance(value, str | int | float) else ""
    is_decimal = text.lstrip("+-").replace("_", "").isdecimal()
    found = as_number(text)
    if kind is int and is_decimal and abs(found) <= _LARGEST:
        found = int(text)  # all digits
    if abs(found) < (_LARGEST if kind is int else math.inf) and found == kind(found):
        return kind(found)
    wanted = "a number" if kind is float else "a whole number"
    limit = " below 2^63" if is_decimal else ""
    raise ConfigError(f"takes {wanted}{limit} such as {'0.1' if kind is float else '4'}, got {shortened(value)}")


def whole_number(text: str, where: str = "", least: int = 1) -> int:
    """Parse a whole number. Raises ConfigError: another text, or a smaller number; the message starts with `where`."""
    if not text.isdecimal() or (found := parse_number(text, int)) < least:
        raise ConfigError(f"{where} takes a whole number of at least {least}, such as 4, got {text}".lstrip())
    return int(found)


def plain(value: float) -> str:
    """Format a number; large whole numbers keep all digits."""
    return str(int(value)) if value == int(value) and abs(value) >= 1e6 else f"{value:g}"


_UNITS = {"B": 1.0}
_UNITS |= {f"{prefix}B": 1000.0**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", 1)}
_FORM = re.compile(r"\s*(\d+(?:\.\d*)?(?:e\d{1,2})?)\s*([KMGT]?i?B)\s*", re.ASCII)


def parse_byte_size(text: str) -> float | None:
    """Return the bytes; None unless the text is a number above 0 with a unit of B, KB, MB, GB, TB, KiB, MiB, GiB,
    TiB."""
    match = _FORM.fullmatch(text)
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        return None
    return float(match[1]) * _UNITS[match[2]]


def format_bytes(size: float) -> str:
    """Return e.g. `1.50 GiB` or `512 B`."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"


def readable_bytes(size: float) -> str:
    """Return e.g. `1.50 GiB (1610612736)`; below 1024 the bare number, which may be in another unit."""
    return f"{size:g}" if size < 1024 else f"{format_bytes(size)} ({size:.0f})"


def decimal_bytes(size: float) -> str:
    """Return e.g. `1.2 GB`, in powers of 1000."""
    units = ["bytes", "KB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"


def _digits(value: float) -> str:
    """Return at least three digits, without an exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """Return three digits and a unit, such as `1.2 ms`; nothing for None."""
    if seconds is None:
        return ""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{_digits(seconds / scale)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def rate(value: float, unit: str) -> str:
    """Return three digits and an SI prefix, such as `95.2 GF`."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{_digits(value / scale)} {prefix}{unit}"
    return f"{value:.3g} {unit}"
