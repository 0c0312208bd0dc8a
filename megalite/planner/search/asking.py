"""From a run's settings to a request: what was asked for of what is searched becomes constraints, the rest holds for all."""

from collections.abc import Iterable, Mapping
from typing import Any

from megalite.config.describe import replace as with_settings
from megalite.config.describe import settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.rules.data_parallel import check_data_parallel
from megalite.config.rules.optimizers import check_optimizer
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.planner.search.request import SEARCHED, STRATEGIES, Request
from megalite.planner.search.search import not_default

USUAL_MEMORY = 0.9
"""Of the device's: allocator, kernels and communication need some that is not in the formulas."""
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

    Raises:
        ConfigError: a strategy or schedule that is not searched.
    """
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
    """A request for any layout of `config`, whose own one says nothing here.

    Args:
        config: with global_batch_size and vocab_size known.

    Raises:
        ConfigError: the model is not legal, or no allowed strategy goes with the other settings.
    """
    shared = _without_layout(config)
    fixed = dict(fixed)
    strategies = _possible_strategies(shared)
    allowed = tuple(name for name in fixed.get("dp_strategy", STRATEGIES) if name in strategies)
    if not allowed:
        raise ConfigError(
            f"dp_strategy {','.join(fixed['dp_strategy'])} does not go with the other settings; use "
            f"{', '.join(strategies) or 'other settings'}"
        )
    if allowed != STRATEGIES:
        fixed["dp_strategy"] = allowed
    return Request(config=shared, world_size=world_size, fixed=fixed, memory_limit=memory_limit)


def _without_layout(config: RunConfig) -> RunConfig:
    """What is not searched, validated and with all sizes known."""
    p, default = config.parallel, settings()
    searched = {name: default[name].default for name in (*SEARCHED, "shard_gradients", "dp")}
    cut = {"pipeline_layers": p.pipeline_layers, "pipeline_layout": p.pipeline_layout}
    bare = with_settings(config, **searched, **dict.fromkeys(cut))
    alone = validate(with_settings(bare, cp_comm_type="p2p"), 1)
    return with_settings(alone, dp=None, etp=p.etp, cp_comm_type=p.cp_comm_type, **cut)


def _possible_strategies(config: RunConfig) -> list[str]:
    """Those that the optimizer and the other settings of data parallelism go with."""
    found = []
    for name in STRATEGIES:
        zero = name == "zero-2"
        strategy = "distributed-optimizer" if zero else name
        tried = with_settings(config, dp=2, dp_strategy=strategy, shard_gradients=zero)
        try:
            check_data_parallel(tried, not_default(tried))
            check_optimizer(tried, not_default(tried))
        except ConfigError:
            continue
        found.append(name)
    return found
