"""`relayout`: the layout that an elastic run takes on the ranks that it has.

In this order: the layout of the settings, if they give one that these ranks can have; that of the checkpoint, if it was
written by as many ranks; the planner's. So a restart on the same ranks changes nothing, and where ranks come back the run
goes back to what the user wrote.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megalite.config.byte_size import format_bytes
from megalite.config.describe import replace as with_settings
from megalite.config.describe import settings, value_of
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.planner.cost.step import predict
from megalite.planner.hardware import Cluster, SoftwareStack
from megalite.planner.search.request import SEARCHED, Request, fixed_settings, not_default, request_for
from megalite.planner.search.search import Candidate, describe, find, survey
from megalite.planner.search.space import enumerate_space

# Settings that a layout consists of.
LAYOUT = (*SEARCHED, "shard_gradients", "pipeline_layers", "pipeline_layout", "cp_comm_type", "recompute_modules")
_AXES = ("tp", "pp", "cp", "ep", "dp")  # who gives one of them gives a layout; a micro batch size alone is none
KEPT = ("tp", "pp", "cp", "ep")  # what stays as it was, where that costs little: how a replica's weights are cut
ALMOST = 1.1  # times the fastest step that it may cost
_COUNTS, _DOUBLINGS = 64, 6  # numbers of ranks that are tried, to say what would work


class Former(NamedTuple):
    """What the run was, up to its newest checkpoint."""

    step: int
    world_size: int
    layout: Mapping[str, Any]  # of the settings in LAYOUT, by name


class Relayout(NamedTuple):
    """The answer."""

    layout: Mapping[str, Any]  # all settings in LAYOUT, dp among them
    why: str  # for the log


def relayout(
    config: RunConfig,
    *,
    world_size: int,
    explicit: frozenset[str],
    fixed: frozenset[str],
    former: Former | None,
    cluster: Cluster,
    stack: SoftwareStack,
    memory_limit: float,
) -> Relayout:
    """The layout for `world_size` ranks. A pure function: the same ranks and checkpoint give the same layout.

    Args:
        config: with global_batch_size and vocab_size known; its layout is a wish but for `fixed`.
        explicit: settings that were given.
        fixed: those of them that must stay.
        memory_limit: bytes that a rank may hold.

    Raises ConfigError if these ranks can have no layout, with the nearest numbers of ranks that can.
    """
    if not explicit.isdisjoint(_AXES):
        own = _legal(config, world_size, explicit)
        if own is not None and max(r.total_bytes for r in predict(own, cluster, stack).memory) <= memory_limit:
            return Relayout(_layout(own), "the layout of the settings")
    unchanged = former is not None and all(
        former.layout.get(name) == value_of(config, name) for name in fixed.intersection(LAYOUT)
    )
    if former is not None and former.world_size == world_size and unchanged:
        changed = with_settings(config, **former.layout)
        again = _legal(changed, world_size, not_default(changed))
        if again is not None:
            return Relayout(_layout(again), f"the layout of the checkpoint of step {former.step}")
    if former is not None:
        wished = former.layout
    else:
        wished = {name: value for name, value in _layout(config).items() if name in explicit}
    cut = {name: settings()[name].default for name in ("pipeline_layers", "pipeline_layout") if name not in fixed}
    constraints = fixed_settings(config, fixed)
    request = request_for(
        with_settings(config, **cut), world_size=world_size, fixed=constraints, memory_limit=memory_limit
    )
    return _planned(request, wished, cluster, stack)


def _layout(config: RunConfig) -> dict[str, Any]:
    return {name: value_of(config, name) for name in LAYOUT}


def _legal(config: RunConfig, world_size: int, explicit: frozenset[str]) -> RunConfig | None:
    try:
        return validate(config, world_size, explicit)
    except ConfigError:
        return None


def _planned(request: Request, wished: Mapping[str, Any], cluster: Cluster, stack: SoftwareStack) -> Relayout:
    """The planner's fastest, or one that keeps more of what was and is almost as fast."""
    best = _best(request, cluster, stack)
    fastest = best.prediction.step_seconds
    shape = {name: (wished[name],) for name in KEPT if name in wished}
    manner = _manner(wished)
    for wish in ({**shape, **manner}, shape, manner):
        more = {name: values for name, values in wish.items() if name not in request.fixed}
        if not more:
            continue
        try:
            found = find(replace(request, fixed={**request.fixed, **more}), cluster, stack, top=1).candidates[0]
        except ConfigError:  # these ranks cannot have it
            continue
        seconds = found.prediction.step_seconds
        if seconds <= ALMOST * fastest:
            why = f"planned, keeping {', '.join(more)}: predicted {seconds:.3g} s a step on {cluster.name}, at best {fastest:.3g} s"
            return Relayout(_layout(found.config), why)
    return Relayout(_layout(best.config), f"planned: the fastest, predicted {fastest:.3g} s a step on {cluster.name}")


def _manner(wished: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """How things were done, where the search decides it."""
    found: dict[str, tuple[Any, ...]] = {}
    if "dp_strategy" in wished:
        found["dp_strategy"] = ("zero-2",) if wished.get("shard_gradients") else (wished["dp_strategy"],)
    if "pipeline_schedule" in wished:
        schedule = wished["pipeline_schedule"]
        found["pipeline_schedule"] = ("1f1b", "interleaved") if schedule in (None, "interleaved") else (schedule,)
    if "recompute_granularity" in wished:
        found["recompute_granularity"] = (wished["recompute_granularity"],)
    return found


def _best(request: Request, cluster: Cluster, stack: SoftwareStack) -> Candidate:
    world = request.world_size
    words = [f"{name} {' or '.join(map(str, values))}" for name, values in request.fixed.items()]
    given = f" with {' and '.join(words)}" if words else ""
    if not len(enumerate_space(request)):
        batch = request.config.training.global_batch_size
        raise ConfigError(
            f"elastic: no layout of {ranks(world)} is legal{given} with global_batch_size {batch}. "
            f"{_remedy(_legal_counts(request))}"
        )
    try:
        return find(request, cluster, stack, top=1).candidates[0]
    except ConfigError:
        found = survey(request, cluster, stack)
        if found.fitting:
            raise
        layout, least = found.leanest()
        more = (world << doublings for doublings in range(1, _DOUBLINGS))
        enough = next((n for n in more if survey(replace(request, world_size=n), cluster, stack).fitting), None)
        raise ConfigError(
            f"elastic: no layout of {ranks(world)}{given} fits into {format_bytes(request.memory_limit)} per rank; the least "
            f"takes {format_bytes(least)}: {describe(layout)}. {_remedy([] if enough is None else [enough])}"
        ) from None


def _legal_counts(request: Request) -> list[int]:
    """The nearest numbers of ranks below and above that divide as they have to."""
    sizes = [request.fixed[name][0] for name in ("tp", "pp", "cp") if len(request.fixed.get(name, ())) == 1]
    unit, world = math.prod(sizes), request.world_size
    under, over = (world - 1) // unit * unit, world // unit * unit + unit
    ways = (range(under, max(under - _COUNTS * unit, 0), -unit), range(over, over + _COUNTS * unit, unit))
    nearest = (next((n for n in way if len(enumerate_space(replace(request, world_size=n)))), None) for way in ways)
    return [count for count in nearest if count is not None]


def _remedy(counts: Sequence[int]) -> str:
    if not counts:
        return "Nor does any number of ranks near it work: give fewer flags of the layout, or another batch"
    start = ranks(counts[0]) if len(counts) == 1 else f"{counts[0]} or {counts[1]} ranks"
    return f"Start {start}, or give fewer flags of the layout"


def ranks(count: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} rank{'s' if count > 1 else ''}"
