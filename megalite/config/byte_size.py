"""Parse and format byte sizes such as `12GiB` and `800MB`."""

import re

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
