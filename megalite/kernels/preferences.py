"""Which backend goes first where several serve an operation: rules with what they rest on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch
import yaml

from megalite.config.compute import BACKENDS, OPERATIONS
from megalite.config.errors import ConfigError
from megalite.kernels.implementations import Use
from megalite.kernels.probes import cpu_kinds


@dataclass(frozen=True)
class Rule:
    """Of an operation on one kind of device."""

    operation: str
    device: str
    """`cpu`, `cuda`, or a narrower kind, which goes before them: `amd-avx512`, a compute capability such as `sm_90`."""
    dtypes: frozenset[str]
    """Empty: any."""
    from_size: int
    """It holds for this size of the last dimension and up; the largest that fits wins."""
    order: tuple[str, ...]
    because: str
    """Measured where, with what; or assumed, and from what."""


class Preferences:
    """The rules, and the order that follows for a use."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)

    def order(self, operation: str, use: Use, device: torch.device) -> tuple[tuple[str, ...], str]:
        """(backends, best first; why). torch alone where no rule fits."""
        kinds = _kinds(device)
        dtype = str(use.dtype).removeprefix("torch.")
        fitting = [
            (kinds.index(rule.device), -rule.from_size, number, rule)
            for number, rule in enumerate(self.rules)
            if rule.operation == operation
            and rule.device in kinds
            and (not rule.dtypes or dtype in rule.dtypes)
            and rule.from_size <= use.size
        ]
        if not fitting:
            return ("torch",), "no rule: torch"
        rule = min(fitting)[3]
        return rule.order, rule.because


def _kinds(device: torch.device) -> list[str]:
    """What rules may call a device, the most special first."""
    if device.type == "cpu":
        return [*cpu_kinds(), "cpu"]
    if device.type != "cuda":
        return [device.type]
    major, minor = torch.cuda.get_device_capability(device)
    return [f"sm_{major}{minor}", "cuda"]


def read_preferences(text: str, source: str) -> Preferences:
    """From YAML: a list of rules.

    Raises:
        ConfigError: naming `source`, the rule and what is wrong with it.
    """
    rows = yaml.safe_load(text)
    if not isinstance(rows, list):
        raise ConfigError(f"{source}: a list of rules is wanted, got {type(rows).__name__}")
    return Preferences([_rule(row, f"{source}, rule {number}") for number, row in enumerate(rows, start=1)])


def _rule(row: Any, where: str) -> Rule:
    keys = {"operation", "device", "order", "because"}
    if not isinstance(row, Mapping) or not keys <= set(row) <= keys | {"dtypes", "from_size"}:
        raise ConfigError(f"{where}: wanted are {', '.join(sorted(keys))}, and may be dtypes and from_size")
    if row["operation"] not in OPERATIONS:
        raise ConfigError(f"{where}: no operation {row['operation']} (one of {', '.join(OPERATIONS)})")
    unknown = [backend for backend in row["order"] if backend not in BACKENDS]
    if unknown:
        raise ConfigError(f"{where}: no backend {unknown[0]} (one of {', '.join(BACKENDS)})")
    return Rule(
        operation=row["operation"],
        device=row["device"],
        dtypes=frozenset(row.get("dtypes", ())),
        from_size=row.get("from_size", 0),
        order=tuple(row["order"]),
        because=row["because"],
    )


@cache
def shipped_preferences() -> Preferences:
    """Those that come with megalite."""
    file = resources.files("megalite.kernels").joinpath("preferences.yaml")
    return read_preferences(file.read_text(encoding="utf-8"), "megalite/kernels/preferences.yaml")
