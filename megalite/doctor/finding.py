"""`Finding`: one thing that was looked at, how it is, and what to do about it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")
"""A warning costs speed, or works on one node alone; an error keeps a run from working."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    topic: str
    """What it belongs to, such as `network`."""
    name: str
    level: Level = "ok"
    text: str
    """What was found, in a line."""
    remedy: str | None = None
    """What to do, in a line; every warning and error has one."""
    data: dict[str, Any] = field(default_factory=dict)
    """The same for programs; JSON can hold it."""

    def __post_init__(self) -> None:
        if self.level != "ok" and self.remedy is None:
            raise ValueError(f"{self.topic} {self.name}: a {self.level} without a remedy")


def worst(findings: Iterable[Finding]) -> Level:
    """The highest level among them; ok if there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
