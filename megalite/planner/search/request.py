"""What a plan is asked for: a model, a number of ranks, and what the search may not change."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.config.values import nearest
from megalite.pipeline.ir.generators.registry import SCHEDULES

STRATEGIES = ("all-reduce", "distributed-optimizer", "zero-2", "fully-sharded")
"""What the search chooses among; zero-2 is distributed-optimizer with shard_gradients."""
RECOMPUTE = ("none", "selective", "full")
SIZES = ("tp", "pp", "vpp", "cp", "ep", "dp", "micro_batch_size")
CHOICES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "recompute_granularity": RECOMPUTE,
        "pipeline_schedule": SCHEDULES,
        "dp_strategy": STRATEGIES,
        "sequence_parallel": (False, True),
    }
)
SEARCHED = (*SIZES, *CHOICES)
"""Settings that the search decides, unless they are fixed."""
_SHORT = {
    "schedule": "pipeline_schedule",
    "recompute": "recompute_granularity",
    "strategy": "dp_strategy",
    "mbs": "micro_batch_size",
    "sp": "sequence_parallel",
}
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One question to the planner."""

    config: RunConfig
    """Everything that is not searched; validated, with global_batch_size and the vocabulary known."""
    world_size: int
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Of the searched settings, the values that are allowed; what is missing is free."""
    memory_limit: float = float("inf")
    """Bytes that a rank may hold."""

    def allows(self, name: str, value: Any) -> bool:
        """The value is not ruled out by a constraint."""
        return name not in self.fixed or value in self.fixed[name]

    def of(self, name: str) -> tuple[Any, ...]:
        """The values of one of CHOICES that are allowed."""
        return tuple(value for value in CHOICES[name] if self.allows(name, value))


def parse_constraint(text: str) -> tuple[str, tuple[Any, ...]]:
    """(setting, allowed values) of `schedule=zb-v`, `tp=4,8`.

    Raises:
        ConfigError: no such setting, or a value that it cannot have.
    """
    name, equals, words = text.partition("=")
    name = name.strip().replace("-", "_")
    name = _SHORT.get(name, name)
    if not equals or not words.strip():
        raise ConfigError(f"--fix {text} is no constraint; write NAME=VALUE, e.g. schedule=zb-v or tp=4,8")
    if name not in SEARCHED:
        known = sorted({*SEARCHED, *_SHORT})
        raise ConfigError(
            f"--fix {text}: {name} is not searched{nearest(name, known)} (searched are {', '.join(SEARCHED)}); give "
            f"other settings as flags"
        )
    return name, tuple(_value(name, word.strip(), text) for word in words.split(","))


def _value(name: str, word: str, text: str) -> Any:
    if name in SIZES:
        if not word.isdecimal() or int(word) < 1:
            raise ConfigError(f"--fix {text}: {name} takes whole numbers from 1 on such as 4, got {word}")
        return int(word)
    if name == "sequence_parallel":
        if word not in _WORDS:
            raise ConfigError(f"--fix {text}: {name} takes true or false, got {word}")
        return _WORDS[word]
    if word not in CHOICES[name]:
        raise ConfigError(
            f"--fix {text}: {name} cannot be {word}{nearest(word, CHOICES[name])} (the search knows "
            f"{', '.join(CHOICES[name])})"
        )
    return word
