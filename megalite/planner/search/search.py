"""`find`: the best layouts for a request. All of the space in closed form, then the best of it by the cost model proper.

What is refined runs its own action lists through the simulator and is sized rank by rank, so that closed forms only choose
what to look at. The cut into stages is made again by predicted seconds instead of FLOPs, and kept where that is faster.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config.describe import replace as with_settings
from megalite.config.describe import settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.rules.pipeline import stage_layers
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.pipeline.ir.partition import partition_layers
from megalite.planner.cost.operations import Pricing
from megalite.planner.cost.stage import layer_seconds, stage_cost
from megalite.planner.cost.step import Prediction, predict
from megalite.planner.cost.workload import workload_of
from megalite.planner.hardware.cluster import Cluster
from megalite.planner.hardware.stack import SoftwareStack
from megalite.planner.memory import RankMemory
from megalite.planner.pipeline import placement_of, plan_stages
from megalite.planner.search.misses import nothing_fits, nothing_legal
from megalite.planner.search.request import Request
from megalite.planner.search.space import Layout
from megalite.planner.search.survey import Survey, survey

SPARE = 2
"""Layouts that are refined beyond those asked for: the closed form may have the order of neighbours wrong."""
RECUT = 2
"""Of the best, how many are cut again by predicted seconds."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that was refined."""

    layout: Layout
    settings: Mapping[str, Any]
    """What the plan decides, flat; with pipeline_layers where the cut was made again."""
    config: RunConfig
    """Validated."""
    estimate: float
    """Seconds of a step in closed form."""
    prediction: Prediction

    @property
    def fullest(self) -> tuple[int, RankMemory]:
        """The pipeline rank that holds most, and what it holds."""
        memory = self.prediction.memory
        rank = max(range(len(memory)), key=lambda at: memory[at].total_bytes)
        return rank, memory[rank]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to a request."""

    request: Request
    cluster: Cluster
    stack: SoftwareStack
    survey: Survey
    candidates: tuple[Candidate, ...]
    """Fastest first, each the best of its tp, ep, pp and schedule."""


def find(request: Request, cluster: Cluster, stack: SoftwareStack, *, top: int = 5) -> Plan:
    """The `top` fastest layouts that fit.

    Raises:
        ConfigError: no layout is legal, or none fits: what comes nearest, and what would make it fit.
    """
    found = survey(request, cluster, stack)
    if not len(found.space):
        raise nothing_legal(request)
    candidates: dict[tuple[Any, ...], Candidate] = {}
    for layout, seconds in found.fastest():
        if len(candidates) == top + SPARE:
            break
        kind = (layout.tp, layout.ep, layout.pipeline.pp, layout.pipeline.schedule)
        if kind not in candidates:  # others of its kind are its variants
            candidate = _predicted(request, layout, layout.settings(), seconds, cluster, stack)
            if candidate is not None:
                candidates[kind] = candidate
    if not candidates:
        raise nothing_fits(found, cluster, stack)
    ranked = sorted(candidates.values(), key=_step_seconds)[:top]
    ranked[:RECUT] = [_recut(request, each, cluster, stack) for each in ranked[:RECUT]]
    ranked.sort(key=_step_seconds)
    return Plan(request=request, cluster=cluster, stack=stack, survey=found, candidates=tuple(ranked))


def _step_seconds(candidate: Candidate) -> float:
    return candidate.prediction.step_seconds


def config_of(request: Request, chosen: Mapping[str, Any]) -> RunConfig:
    """The validated config of some settings over the request's, as a file with them would be read.

    Raises:
        ConfigError: it is not legal.
    """
    base = dict(chosen)
    if base["cp"] == 1:
        base["cp_comm_type"] = settings()["cp_comm_type"].default
    if base["recompute_granularity"] != "selective":
        base["recompute_modules"] = settings()["recompute_modules"].default
    config = with_settings(request.config, **base)
    return validate(config, request.world_size, not_default(config))


def not_default(config: RunConfig) -> frozenset[str]:
    """Settings that a file has to give: their values are not the default."""
    return frozenset(name for name, value in values_of(config).items() if value != settings()[name].default)


def _predicted(
    request: Request,
    layout: Layout,
    chosen: Mapping[str, Any],
    seconds: float,
    cluster: Cluster,
    stack: SoftwareStack,
) -> Candidate | None:
    """The layout refined; None if a rule about another setting or its exact memory refuses it."""
    try:
        config = config_of(request, chosen)
        prediction = predict(config, cluster, stack)
    except ConfigError:
        return None
    candidate = Candidate(
        layout=layout, settings=chosen, config=config, estimate=seconds, prediction=prediction
    )
    return candidate if candidate.fullest[1].total_bytes <= request.memory_limit else None


def _recut(request: Request, candidate: Candidate, cluster: Cluster, stack: SoftwareStack) -> Candidate:
    """The candidate with its stages cut by predicted seconds, if that is faster."""
    config = candidate.config
    if candidate.layout.pipeline.pp == 1 or stage_layers(config):
        return candidate
    work, model = workload_of(config), config.model
    price = Pricing.of(work, cluster, stack)
    kinds = [model.is_moe_layer(index) for index in range(model.num_layers)]
    each = {moe: float(layer_seconds(work, cluster, stack, moe=moe).total) for moe in set(kinds)}
    constant = 2.0 * stack.microbatch_seconds
    first, last = (
        max(float(stage_cost(price, **{end: 1.0}).total) - constant, 0.0)
        for end in ("has_embedding", "has_head")
    )
    cut = partition_layers(
        model.num_layers,
        placement_of(config),
        layer_cost=[each[moe] for moe in kinds],
        first_cost=first,
        last_cost=last,
    )
    if list(cut) == [plan.num_layers for plan in plan_stages(config)]:
        return candidate
    chosen = {**candidate.settings, "pipeline_layers": list(cut)}
    other = _predicted(request, candidate.layout, chosen, candidate.estimate, cluster, stack)
    if other is None or other.prediction.step_seconds >= candidate.prediction.step_seconds:
        return candidate
    return other
