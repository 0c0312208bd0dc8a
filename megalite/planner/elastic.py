"""`--elastic`: the layout of a run for the ranks that have come, before anything is built on it. The training loop is
given `take_layout`; it does not import the planner.

The layout is that of the settings, if these ranks can have it; that of the checkpoint, if as many ranks wrote it; or the
planner's. So a restart on the same ranks changes nothing, and where ranks come back the run goes back to the settings.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megalite.checkpoint.files import read_text
from megalite.checkpoint.folders import candidates
from megalite.checkpoint.manifest import MANIFEST_NAME, Manifest
from megalite.config.byte_size import format_bytes
from megalite.config.describe import replace, settings, value_of
from megalite.config.errors import CheckpointError, ConfigError
from megalite.config.run import RunConfig
from megalite.config.validate import require_startable, validate
from megalite.partition.memory import USUAL_MEMORY
from megalite.planner.cost.step import predict
from megalite.planner.hardware import Cluster, SoftwareStack, cluster_of_device, load_cluster, load_stack
from megalite.planner.search.search import Candidate, counted, describe, find, survey
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

# Settings that a layout consists of.
LAYOUT = (*SEARCHED, "shard_gradients", "pipeline_layers", "pipeline_layout", *AS_GIVEN, "recompute_modules")
_AXES = ("tp", "pp", "cp", "ep", "dp")  # who gives one of them gives a layout; a micro batch size alone is none
KEPT = ("tp", "pp", "cp", "ep")  # what stays as it was, where that costs little: how a replica's weights are cut
ALMOST = 1.1  # times the fastest step that it may cost
_COUNTS, _DOUBLINGS = 64, 6  # numbers of ranks that are tried, to say what would work


class Former(NamedTuple):
    step: int
    world_size: int
    layout: Mapping[str, Any]  # of the settings in LAYOUT, by name


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
    """The layout for `world_size` ranks. A pure function: the same ranks and checkpoint give the same layout.

    Raises ConfigError if these ranks can have no layout, with the nearest numbers of ranks that can. `config`: with
    global_batch_size and vocab_size known; its layout is a wish but for `fixed`. `explicit`: settings that were given.
    `fixed`: those of them that must stay. `memory_limit`: bytes that a rank may hold."""
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
        wished = former.layout
    else:
        wished = {name: value for name, value in _layout(config).items() if name in explicit}
    cut = {name: settings()[name].default for name in ("pipeline_layers", "pipeline_layout") if name not in fixed}
    constraints = fixed_settings(config, fixed)
    request = request_for(
        replace(config, **cut), world_size=world_size, fixed=constraints, memory_limit=memory_limit, cluster=cluster
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
            found = find(
                dataclasses.replace(request, fixed={**request.fixed, **more}), cluster, stack, top=1
            ).candidates[0]
        except ConfigError:  # these ranks cannot have it
            continue
        seconds = found.prediction.step_seconds
        if seconds <= ALMOST * fastest:
            why = f"planned, keeping {', '.join(more)}: predicted {seconds:.3g} s per step on {cluster.name}, at best {fastest:.3g} s"
            return Relayout(_layout(found.config), why)
    return Relayout(_layout(best.config), f"planned: the fastest, predicted {fastest:.3g} s per step on {cluster.name}")


def _manner(wished: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    if "dp_strategy" in wished:
        found["dp_strategy"] = ("zero-2",) if wished.get("shard_gradients") else (wished["dp_strategy"],)
    if wished.get("dp_instances", 1) > 1:
        found["dp_instances"] = (wished["dp_instances"],)
    found |= {name: (wished[name],) for name in HOST if wished.get(name)}
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
            f"elastic: no layout of {counted(world, 'rank')} is legal{given} with global_batch_size {batch}. "
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
            f"elastic: no layout of {counted(world, 'rank')}{given} fits into {format_bytes(request.memory_limit)} per rank; the least "
            f"takes {format_bytes(least)}: {describe(layout)}. {_remedy([] if enough is None else [enough])}"
        ) from None


def _legal_counts(request: Request) -> list[int]:
    """The nearest numbers of ranks below and above that divide as they have to."""
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
        return "Nor does any number of ranks near it work: give fewer flags of the layout, or another batch"
    start = counted(counts[0], "rank") if len(counts) == 1 else f"{counts[0]} or {counts[1]} ranks"
    return f"Start {start}, or give fewer flags of the layout"


def take_layout(
    config: RunConfig, *, explicit: frozenset[str], fixed: frozenset[str], world: Group, log: Callable[[str], None]
) -> tuple[RunConfig, frozenset[str]]:
    """The config with the layout that these ranks get, and what counts as given in it.

    Rank 0 looks at the newest checkpoint and plans; the others take what it says, so that none can differ.

    Raises ConfigError if these ranks can have no layout, or the cluster is not known; the same on every rank.
    `explicit`: settings that the user gave. `fixed`: those that stay: of the command line. `log`: called on rank 0.

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
    """The layout, and what the log says of it."""
    require_startable(config)
    if config.model.vocab_size is None:
        tokenizer = build_tokenizer(config.data, None)
        assert tokenizer is not None, "require_startable asks for one"
        config = replace(config, vocab_size=tokenizer.vocab_size)
    assert config.checkpoint.load is not None, "check_elastic asks for it"
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
        was = f"; the checkpoint of step {former.step} is of {counted(former.world_size, 'rank')} as {_in_words(former.layout)}"
    return layout, f"elastic: {counted(world_size, 'rank')}{was}; continuing as {_in_words(layout)} ({why})"


def newest_layout(folder: Path) -> Former | None:
    """What the newest checkpoint with a readable manifest says of its layout; None if there is none. Its files are not
    verified here. If they are damaged, loading says so and takes an older one; only the layout was then chosen by this
    one."""
    try:
        found = candidates(folder)
    except CheckpointError:
        return None  # loading says why
    for candidate in found:
        try:
            manifest = Manifest.from_json(read_text(folder / candidate.name / MANIFEST_NAME))
            layout = {name: _saved(manifest.config, name) for name in LAYOUT if name != "dp"}
            layout["dp"] = _saved({"parallel": manifest.layout}, "dp")  # as a rule derived: open in the config
        except CheckpointError:
            continue
        world_size = math.prod(layout[axis] for axis in ("tp", "cp", "dp", "pp"))
        return Former(manifest.step, world_size, layout)
    return None


def _saved(config: Mapping[str, Any], name: str) -> Any:
    """A setting as a checkpoint has it (one that came later had its default's meaning); raises CheckpointError if it is no
    value of that setting."""
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
    given = config.parallel.elastic_cluster
    if device.type != "cuda":
        cluster = load_cluster(given or "cpu-box")
        return cluster, cluster.accelerator.memory_bytes
    properties = torch.cuda.get_device_properties(device)
    known = given or cluster_of_device(properties.name)
    if known is None:
        raise ConfigError(f"elastic does not know {properties.name}; give --elastic-cluster, e.g. dgx-h100")
    cluster = load_cluster(known)
    return cluster, min(float(properties.total_memory), cluster.accelerator.memory_bytes)


def _in_words(layout: Mapping[str, Any]) -> str:
    """`tp 2 x cp 1 x dp 2 x pp 2 (vpp 2), micro batch 1`, as the first lines of the log have it."""
    chunks = f" (vpp {layout['vpp']})" if layout["vpp"] > 1 else ""
    instances = f" in {layout['dp_instances']} instances" if layout.get("dp_instances", 1) > 1 else ""
    return (
        f"tp {layout['tp']} x cp {layout['cp']} x dp {layout['dp']} x pp {layout['pp']}{chunks}, micro batch "
        f"{layout['micro_batch_size']}, {layout['dp_strategy']}{instances}, recompute {layout['recompute_granularity']}"
    )
