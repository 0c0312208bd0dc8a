"""A plan as one dict: what `megalite plan --json` prints, and what the text and the page are made of."""

import itertools
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megalite.config.byte_size import format_bytes
from megalite.models.shapes import parameter_count
from megalite.planner.search.misses import describe
from megalite.planner.search.search import Candidate, Plan

PARTS: Mapping[str, str] = {
    "products": "matrix products",
    "memory": "operations that move bytes",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "exchange between experts",
    "host": "operations started late",
    "bubble": "bubble",
    "given": "cores left to others while waiting",
    "pipeline": "pipeline messages",
    "gradients": "gradients that nothing hides",
    "parameters": "parameters that nothing hides",
    "optimizer": "optimizer",
    "step": "constants of a step",
}
"""Part of a step -> what it is."""
_NAMED = 2
"""Parts that a comparison names."""


def plan_data(plan: Plan, tokens: float) -> dict[str, Any]:
    """Keys: `model`, `cluster`, `space`, `tokens`, `layouts` (fastest first), `frontier` ([bytes, seconds] in closed form).

    Args:
        tokens: of the training whose length is told.
    """
    request, config = plan.request, plan.request.config
    best = plan.candidates[0]
    return {
        "model": {
            "parameters": parameter_count(config.model),
            "seq_length": config.training.seq_length,
            "global_batch_size": config.training.global_batch_size,
            "precision": config.training.precision,
        },
        "cluster": {
            "name": plan.cluster.name,
            "stack": plan.stack.name,
            "ranks": request.world_size,
            "memory_limit_bytes": request.memory_limit,
            "provenance": {**plan.cluster.provenance, **plan.stack.provenance},
        },
        "constraints": {name: list(values) for name, values in request.fixed.items()},
        "space": {"layouts": len(plan.survey.space), "fitting": plan.survey.fitting},
        "tokens": tokens,
        "layouts": [_layout(each, best, tokens) for each in plan.candidates],
        "frontier": [list(point) for point in plan.survey.frontier()],
    }


def _layout(candidate: Candidate, best: Candidate, tokens: float) -> dict[str, Any]:
    found = candidate.prediction
    rank, memory = candidate.fullest
    parts = {name: float(value) for name, value in found.parts.items()}
    return {
        "settings": dict(candidate.settings),
        "words": describe(candidate.layout),
        "microbatches": candidate.layout.pipeline.microbatches,
        "step_seconds": float(found.step_seconds),
        "estimated_step_seconds": candidate.estimate,
        "tokens_per_second": float(found.tokens_per_second),
        "mfu": {"palm": float(found.mfu), "megatron": float(found.mfu_causal)},
        "bubble": float(found.bubble),
        "exposed_seconds": {name: float(value) for name, value in found.exposed.items()},
        "parts": parts,
        "memory": {"pipeline_rank": rank, **asdict(memory), "total_bytes": memory.total_bytes},
        "training_seconds": tokens / float(found.tokens_per_second),
        "layers": layers_in_words(candidate),
        "why": "" if candidate is best else why_slower(candidate, best),
    }


def layers_in_words(candidate: Candidate) -> str:
    """`12 x 8`, or `11, 12 x 6, 13` if stages differ; nothing where the default cut is kept."""
    layers = candidate.settings.get("pipeline_layers")
    if layers is None:
        return ""
    runs = [(count, len(list(run))) for count, run in itertools.groupby(layers)]
    return ", ".join(f"{count} x {times}" if times > 1 else str(count) for count, times in runs)


def why_slower(candidate: Candidate, best: Candidate) -> str:
    """Which parts of the step are longer than the best one's: one line."""
    mine, other = candidate.prediction.parts, best.prediction.parts
    slower = candidate.prediction.step_seconds - best.prediction.step_seconds
    if slower <= 1e-9 * best.prediction.step_seconds:
        held, least = candidate.fullest[1].total_bytes, best.fullest[1].total_bytes
        return f"as fast, with {format_bytes(held)} a rank instead of {format_bytes(least)}"
    longer = {name: mine.get(name, 0.0) - other.get(name, 0.0) for name in {*mine, *other}}
    ranked = sorted(longer, key=lambda name: (-longer[name], name))
    named = [name for name in ranked[:_NAMED] if longer[name] > 0.1 * longer[ranked[0]]]
    parts = " and ".join(f"{PARTS.get(name, name)} (+{seconds_in_words(longer[name])})" for name in named)
    return f"{slower / best.prediction.step_seconds:.1%} slower: more {parts}"


def seconds_in_words(seconds: float) -> str:
    """`1.25 s`, `3.1 ms`."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2g} ms"


def duration_in_words(seconds: float) -> str:
    """`34.2 days`, `5.1 hours`, `2.0 years`."""
    for unit, length in (("years", 365.25 * 86400.0), ("days", 86400.0), ("hours", 3600.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 60.0:.1f} minutes"


def count_in_words(number: float) -> str:
    """`300B`, `1.5T`, `175B`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"
