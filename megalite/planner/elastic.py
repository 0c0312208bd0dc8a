"""`--elastic`: choose the layout for the available ranks before anything is built. The training loop receives
`take_layout` as a function; it does not import the planner.

The settings' layout is used if it is legal on these ranks; else the checkpoint's if it has as many ranks; else the
planner's. So a restart on the same ranks keeps the layout, and a restart on the original ranks returns to the settings'
layout."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megalite.checkpoint.files import read_text
from megalite.checkpoint.folders import candidates
from megalite.checkpoint.manifest import MANIFEST_NAME, Manifest
from megalite.config.describe import replace, settings, value_of
from megalite.config.errors import CheckpointError, ConfigError, plural
from megalite.config.numbers import format_bytes
from megalite.config.run import RunConfig
from megalite.config.validate import require_startable, validate
from megalite.partition.memory import USUAL_MEMORY
from megalite.planner.cost.step import predict
from megalite.planner.hardware import Cluster, SoftwareStack, cluster_of_device, load_cluster, load_stack
from megalite.planner.search.search import Candidate, describe, find, survey
from megalite.planner.search.space import (
    AS_GIVEN,
    HOST,
    SEARCHED,
    Request,
    enumerate_space,
    fixed_settings,
    not_default,
    request_for,
)
from megalite.tokenizers.build import build_tokenizer
from megalite.topology.group import Group

# Settings that make up a layout.
LAYOUT = (*SEARCHED, "shard_gradients", "pipeline_layers", "pipeline_layout", *AS_GIVEN, "recompute_modules")
_AXES = ("tp", "pp", "cp", "ep", "dp")  # setting any of these sets a layout; a micro batch size alone does not
KEPT = ("tp", "pp", "cp", "ep")  # the cut of a replica's weights, kept if that costs little
ALMOST = 1.1  # largest step time for keeping settings, relative to the fastest step
_COUNTS, _DOUBLINGS = 64, 6  # numbers of ranks tried for the suggestion in an error


class Former(NamedTuple):
    step: int
    world_size: int
    layout: Mapping[str, Any]  # setting in LAYOUT -> value


class Relayout(NamedTuple):
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
    """Return the layout for `world_size` ranks; a pure function of its arguments.

    Raises ConfigError, with the nearest possible numbers of ranks, if no layout is possible. `config` has a known
    global_batch_size and vocab_size; its layout is a preference except for the settings `fixed`, which must not change.
    `explicit`: settings that the user set. `memory_limit`: bytes per rank."""
    if not explicit.isdisjoint(_AXES):
        own = _legal(config, world_size, explicit)
        if own is not None and max(r.total_bytes for r in predict(own, cluster, stack).memory) <= memory_limit:
            return Relayout(_layout(own), "the layout of the settings")
    unchanged = former is not None and all(
        former.layout.get(name) == value_of(config, name) for name in fixed.intersection(LAYOUT)
    )
    if former is not None and former.world_size == world_size and unchanged:
        changed = replace(config, **former.layout)
        again = _legal(changed, world_size, not_default(changed))
        if again is not None:
            return Relayout(_layout(again), f"the layout of the checkpoint of step {former.step}")
    if former is not None:
        preferred = former.layout
    else:
        preferred = {name: value for name, value in _layout(config).items() if name in explicit}
    cut = {name: settings()[name].default for name in ("pipeline_layers", "pipeline_layout") if name not in fixed}
    constraints = fixed_settings(config, fixed)
    request = request_for(
        replace(config, **cut), world_size=world_size, fixed=constraints, memory_limit=memory_limit, cluster=cluster
    )
    return _planned(request, preferred, cluster, stack)


def _layout(config: RunConfig) -> dict[str, Any]:
    return {name: value_of(config, name) for name in LAYOUT}


def _legal(config: RunConfig, world_size: int, explicit: frozenset[str]) -> RunConfig | None:
    try:
        return validate(config, world_size, explicit)
    except ConfigError:
        return None


def _planned(request: Request, preferred: Mapping[str, Any], cluster: Cluster, stack: SoftwareStack) -> Relayout:
    """Return the planner's fastest layout, or an almost as fast one that keeps more of the previous settings."""
    best = _best(request, cluster, stack)
    fastest = best.prediction.step_seconds
    shape = {name: (preferred[name],) for name in KEPT if name in preferred}
    choices = _choices(preferred)
    for wish in ({**shape, **choices}, shape, choices):
        more = {name: values for name, values in wish.items() if name not in request.fixed}
        if not more:
            continue
        try:
            found = find(
                dataclasses.replace(request, fixed={**request.fixed, **more}), cluster, stack, top=1
            ).candidates[0]
        except ConfigError:  # not possible on these ranks
            continue
        seconds = found.prediction.step_seconds
        if seconds <= ALMOST * fastest:
            why = f"planned, keeping {', '.join(more)}: predicted {seconds:.3g} s per step on {cluster.name}, at best {fastest:.3g} s"
            return Relayout(_layout(found.config), why)
    return Relayout(_layout(best.config), f"planned: the fastest, predicted {fastest:.3g} s per step on {cluster.name}")


def _choices(preferred: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    if "dp_strategy" in preferred:
        found["dp_strategy"] = ("zero-2",) if preferred.get("shard_gradients") else (preferred["dp_strategy"],)
    if preferred.get("dp_instances", 1) > 1:
        found["dp_instances"] = (preferred["dp_instances"],)
    found |= {name: (preferred[name],) for name in HOST if preferred.get(name)}
    if "pipeline_schedule" in preferred:
        schedule = preferred["pipeline_schedule"]
        found["pipeline_schedule"] = ("1f1b", "interleaved") if schedule in (None, "interleaved") else (schedule,)
    if "recompute_granularity" in preferred:
        found["recompute_granularity"] = (preferred["recompute_granularity"],)
    return found


def _best(request: Request, cluster: Cluster, stack: SoftwareStack) -> Candidate:
    world = request.world_size
    words = [f"{name} {' or '.join(map(str, values))}" for name, values in request.fixed.items()]
    given = f" with {' and '.join(words)}" if words else ""
    if not len(enumerate_space(request)):
        batch = request.config.training.global_batch_size
        raise ConfigError(
            f"elastic: no layout of {plural(world, 'rank')} is legal{given} with global_batch_size {batch}. "
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
        enough = next(
            (n for n in more if survey(dataclasses.replace(request, world_size=n), cluster, stack).fitting), None
        )
        raise ConfigError(
            f"elastic: no layout of {plural(world, 'rank')}{given} fits into {format_bytes(request.memory_limit)} per rank; the least "
            f"takes {format_bytes(least)}: {describe(layout)}. {_remedy([] if enough is None else [enough])}"
        ) from None


def _legal_counts(request: Request) -> list[int]:
    """Return the nearest numbers of ranks, below and above, with a legal layout."""
    sizes = [request.fixed[name][0] for name in ("tp", "pp", "cp") if len(request.fixed.get(name, ())) == 1]
    unit, world = math.prod(sizes), request.world_size
    under, over = (world - 1) // unit * unit, world // unit * unit + unit
    ways = (range(under, max(under - _COUNTS * unit, 0), -unit), range(over, over + _COUNTS * unit, unit))
    nearest = (
        next((n for n in way if len(enumerate_space(dataclasses.replace(request, world_size=n)))), None) for way in ways
    )
    return [count for count in nearest if count is not None]


def _remedy(counts: Sequence[int]) -> str:
    if not counts:
        return "No near number of ranks works either: set fewer layout flags, or another batch"
    start = plural(counts[0], "rank") if len(counts) == 1 else f"{counts[0]} or {counts[1]} ranks"
    return f"Start {start}, or set fewer layout flags"


def take_layout(
    config: RunConfig, *, explicit: frozenset[str], fixed: frozenset[str], world: Group, log: Callable[[str], None]
) -> tuple[RunConfig, frozenset[str]]:
    """Return the config with the layout for these ranks, and its settings that count as set by the user.

    Rank 0 reads the newest checkpoint and plans; the others receive the result, so all ranks agree.

    Raises ConfigError on every rank if no layout is possible or the cluster is unknown. `explicit`: settings from the
    user. `fixed`: those from the command line, which must not change. `log`: called on rank 0.

    Collectives: a gather and a broadcast over the world."""
    layout: Mapping[str, Any] = {}
    with world.errors_on_all_ranks(Exception):
        if world.rank == 0:
            layout, note = _find(config, explicit=explicit, fixed=fixed, world_size=world.size, device=world.device)
            log(note)
    config = replace(config, **world.broadcast_json(dict(layout)))
    return config, not_default(config)


def _find(
    config: RunConfig, *, explicit: frozenset[str], fixed: frozenset[str], world_size: int, device: torch.device
) -> tuple[Mapping[str, Any], str]:
    """Return (layout, log message)."""
    require_startable(config)
    if config.model.vocab_size is None:
        tokenizer = build_tokenizer(config.data, None)
        assert tokenizer is not None, "require_startable() requires one"
        config = replace(config, vocab_size=tokenizer.vocab_size)
    assert config.checkpoint.load is not None, "check_elastic() requires it"
    former = newest_layout(Path(config.checkpoint.load))
    cluster, memory = _machine(config, device)
    layout, why = relayout(
        config,
        world_size=world_size,
        explicit=explicit,
        fixed=fixed,
        former=former,
        cluster=cluster,
        stack=load_stack("fused"),
        memory_limit=memory * USUAL_MEMORY,
    )
    was = ""
    if former is not None and former.world_size != world_size:
        was = f"; the checkpoint of step {former.step} has {plural(former.world_size, 'rank')} as {_in_words(former.layout)}"
    return layout, f"elastic: {plural(world_size, 'rank')}{was}; continuing as {_in_words(layout)} ({why})"


def newest_layout(folder: Path) -> Former | None:
    """Return the layout of the newest checkpoint with a readable manifest, or None. Its files are not verified: if they
    are damaged, loading reports it and falls back to an older checkpoint, but the layout stays that of the newest."""
    try:
        found = candidates(folder)
    except CheckpointError:
        return None  # loading reports the reason
    for candidate in found:
        try:
            manifest = Manifest.from_json(read_text(folder / candidate.name / MANIFEST_NAME))
            layout = {name: _saved(manifest.config, name) for name in LAYOUT if name != "dp"}
            layout["dp"] = _saved({"parallel": manifest.layout}, "dp")  # may be None in the config
        except CheckpointError:
            continue
        world_size = math.prod(layout[axis] for axis in ("tp", "cp", "dp", "pp"))
        return Former(manifest.step, world_size, layout)
    return None


def _saved(config: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a checkpoint's config, its default if the setting is newer; CheckpointError if it is
    illegal."""
    setting = settings()[name]
    section = config.get(setting.section)
    value = section.get(name, setting.default) if isinstance(section, dict) else setting.default
    elements = value if isinstance(value, list) and setting.is_list else [value]
    fits = value is None and (setting.optional or name == "dp")
    legal = fits or all(type(element) is setting.type for element in elements)
    if not legal or (name in ("tp", "cp", "dp", "pp") and (value is None or value < 1)):
        raise CheckpointError(f"{name} is {value!r} in the checkpoint's config")
    return value


def _machine(config: RunConfig, device: torch.device) -> tuple[Cluster, float]:
    name = config.parallel.elastic_cluster
    if device.type != "cuda":
        cluster = load_cluster(name or "cpu-box")
        return cluster, cluster.accelerator.memory_bytes
    properties = torch.cuda.get_device_properties(device)
    known = name or cluster_of_device(properties.name)
    if known is None:
        raise ConfigError(f"elastic has no cluster file for {properties.name}; set --elastic-cluster, e.g. dgx-h100")
    cluster = load_cluster(known)
    return cluster, min(float(properties.total_memory), cluster.accelerator.memory_bytes)


def _in_words(layout: Mapping[str, Any]) -> str:
    """Format as the log's first lines do: `tp 2 x cp 1 x dp 2 x pp 2 (vpp 2), micro batch 1`."""
    chunks = f" (vpp {layout['vpp']})" if layout["vpp"] > 1 else ""
    instances = f" in {layout['dp_instances']} instances" if layout.get("dp_instances", 1) > 1 else ""
    return (
        f"tp {layout['tp']} x cp {layout['cp']} x dp {layout['dp']} x pp {layout['pp']}{chunks}, micro batch "
        f"{layout['micro_batch_size']}, {layout['dp_strategy']}{instances}, recompute {layout['recompute_granularity']}"
    )
