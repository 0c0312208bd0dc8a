"""What a plan is asked for: a model, a number of ranks, and what the search may not change."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megalite.config.describe import replace as with_settings
from megalite.config.describe import settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.rules.data_parallel import OPTIMIZER, STRATEGY
from megalite.config.run import RunConfig
from megalite.config.validate import check_rules, validate
from megalite.config.values import nearest
from megalite.pipeline.ir.generators.registry import SCHEDULES

# What the search chooses among; zero-2 is distributed-optimizer with shard_gradients.
STRATEGIES = ("all-reduce", "distributed-optimizer", "zero-2", "fully-sharded")
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
SEARCHED = (*SIZES, *CHOICES)  # settings that the search decides, unless they are fixed
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

    config: RunConfig  # everything that is not searched; validated, with global_batch_size and the vocabulary known
    world_size: int
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # setting -> allowed values; others are free
    memory_limit: float = float("inf")  # bytes that a rank may hold

    def allows(self, name: str, value: Any) -> bool:
        """The value is not ruled out by a constraint."""
        return name not in self.fixed or value in self.fixed[name]

    def of(self, name: str) -> tuple[Any, ...]:
        """The values of one of CHOICES that are allowed."""
        return tuple(value for value in CHOICES[name] if self.allows(name, value))


def parse_constraint(text: str) -> tuple[str, tuple[Any, ...]]:
    """(setting, allowed values) of `schedule=zb-v`, `tp=4,8`. Raises ConfigError if there is no such setting or value."""
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
        if word.isdecimal() and int(word) > 0:
            return int(word)
        takes = "whole numbers from 1 on such as 4"
    elif name == "sequence_parallel":
        if word in _WORDS:
            return _WORDS[word]
        takes = "true or false"
    else:
        if word in CHOICES[name]:
            return word
        takes = ", ".join(CHOICES[name])
        word += nearest(word, CHOICES[name])
    raise ConfigError(f"--fix {text}: {name} takes {takes}, got {word}")


USUAL_MEMORY = 0.9  # of the device's: allocator, kernels and communication need some that is not in the formulas
_NOT_SEARCHED = {
    "pipeline_schedule_file": "is for one schedule",
    "pipeline_costs": "belongs to schedule auto, which is built, not searched",
    "pipeline_memory_limit": "is what --max-memory says of all memory",
    "recompute_ahead": "is not searched",
    "recompute_method": "is not searched: full recompute is of each layer",
    "recompute_num_layers": "is not searched: full recompute is of each layer",
}


def refuse_not_searched(config: RunConfig, explicit: frozenset[str]) -> None:
    """Raise ConfigError if the user gave a setting that the search has no place for."""
    for name, why in _NOT_SEARCHED.items():
        if name in explicit:
            raise ConfigError(f"{name} {values_of(config)[name]} {why}; remove it")


def fixed_settings(config: RunConfig, names: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Those of the settings in `names` that are searched, as constraints: setting -> the one value that it may have.
    Raises ConfigError for a strategy or schedule that is not searched."""
    values, given = values_of(config), set(names)
    fixed = {name: (values[name],) for name in SEARCHED if name in given and values[name] is not None}
    if "shard_gradients" in given and values["shard_gradients"]:
        fixed["dp_strategy"] = ("zero-2",)
    (strategy,) = fixed.get("dp_strategy", ("all-reduce",))
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"dp_strategy {strategy} is not searched; use one of {', '.join(STRATEGIES)}, or leave it out"
        )
    if fixed.get("pipeline_schedule") == ("auto",):
        raise ConfigError("pipeline_schedule auto is built, not searched; name another, or leave it out")
    return fixed


def request_for(
    config: RunConfig, *, world_size: int, fixed: Mapping[str, tuple[Any, ...]], memory_limit: float
) -> Request:
    """A request for any layout of `config`, the given one says nothing here; its batch and vocabulary are known.

    Raises ConfigError if the model is not legal, or no allowed strategy goes with the other settings.
    """
    shared = _without_layout(config)
    strategies = [name for name in STRATEGIES if _is_possible(shared, name)]
    allowed = tuple(name for name in fixed.get("dp_strategy", STRATEGIES) if name in strategies)
    if not allowed:
        raise ConfigError(
            f"dp_strategy {','.join(fixed['dp_strategy'])} does not go with the other settings; use "
            f"{', '.join(strategies) or 'other settings'}"
        )
    if allowed != STRATEGIES:
        fixed = {**fixed, "dp_strategy": allowed}
    return Request(config=shared, world_size=world_size, fixed=fixed, memory_limit=memory_limit)


def _without_layout(config: RunConfig) -> RunConfig:
    """What is not searched, validated and with all sizes known."""
    p, default = config.parallel, settings()
    searched = {name: default[name].default for name in (*SEARCHED, "shard_gradients", "dp")}
    cut = {"pipeline_layers": p.pipeline_layers, "pipeline_layout": p.pipeline_layout}
    bare = with_settings(config, **searched, **dict.fromkeys(cut))
    alone = validate(with_settings(bare, cp_comm_type="p2p"), 1)
    return with_settings(alone, dp=None, etp=p.etp, cp_comm_type=p.cp_comm_type, **cut)


def _is_possible(config: RunConfig, strategy: str) -> bool:
    """The optimizer and the other settings of data parallelism go with the strategy."""
    zero = strategy == "zero-2"
    tried = with_settings(config, dp=2, dp_strategy="distributed-optimizer" if zero else strategy, shard_gradients=zero)
    return not check_rules(tried, not_default(tried), *STRATEGY, *OPTIMIZER).found


def not_default(config: RunConfig) -> frozenset[str]:
    """Settings that a file has to give: their values are not the default."""
    return frozenset(name for name, value in values_of(config).items() if value != settings()[name].default)
