"""`--dry-run`: what a config would do on any number of ranks, as data (`report`); dry_run_text.py prints it."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megalite.cli.dry_run_rank import communication_rows, rank_report
from megalite.cli.dry_run_rank_text import format_rank
from megalite.cli.dry_run_text import format_report
from megalite.config.batch import batch_sizes, microbatch_counts, samples_per_microbatch, total_samples, total_steps
from megalite.config.describe import replace, sectioned
from megalite.config.errors import ConfigError
from megalite.config.flags import Invocation
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.models.shapes import flops_per_token, parameter_count
from megalite.partition.memory import RankMemory, activation_peaks, local_size, rank_memory
from megalite.partition.pipeline import layout_of, lowered, plan_stages, proved, schedule_of
from megalite.partition.stages import StagePlan, shapes_of_rank
from megalite.pipeline.ir.memory import Sizes, memory_peaks
from megalite.pipeline.ir.render import render_grid
from megalite.pipeline.ir.schedule import Program, Schedule
from megalite.planner.clock import bubble_fraction
from megalite.tokenizers.build import build_tokenizer
from megalite.topology.layout import ParallelLayout

__all__ = ["dry_run", "format_report", "report", "world_size_of"]

LISTED_RANKS = 64
"""Up to this world size every rank and every group is listed; above, the first groups of each kind."""
LISTED_GROUPS = 4
GRID_STAGES, GRID_MICROBATCHES = 8, 16
"""The schedule is drawn up to this many virtual stages and microbatches."""


def world_size_of(invocation: Invocation) -> int:
    """--world-size if it was given, else tp·pp·cp·dp with dp 1 if that is open."""
    p = invocation.config.parallel
    return invocation.world_size or p.tp * p.pp * p.cp * (p.dp or 1)


def dry_run(invocation: Invocation) -> str:
    """What `--dry-run` prints: text, or JSON with --json; with --rank of that rank alone."""
    config, world_size, explicit = invocation.config, world_size_of(invocation), invocation.explicit
    with _no_collector():
        if invocation.rank is None:
            found, as_text = report(config, world_size, explicit), format_report
        else:
            found, as_text = rank_report(_checked(config, world_size, explicit), invocation.rank), format_rank
        return json.dumps(found, indent=2) if invocation.json else as_text(found)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Schedules are up to a million small tuples without a cycle; to look for one takes a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def report(config: RunConfig, world_size: int, explicit: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Everything `--dry-run` shows; the dict is what `--json` prints. docs/dry-run.md explains each key.

    Keys: `world_size`, `layout` (axes, order, groups, ranks), `stages`, `memory`, `communication`, `schedule`, `batch`,
    `model`, `config`.
    Sizes are in bytes, layer ranges half open, FLOPs those of the model.

    Args:
        config: as parsed; it is validated here.
        world_size: number of ranks.
        explicit: `Invocation.explicit`.

    Raises:
        ConfigError: the config is not legal for this world size, its schedule does not take the number of microbatches,
            or the size of the vocabulary is not known.
    """
    config = _checked(config, world_size, explicit)
    layout = layout_of(config)
    stages = plan_stages(config)
    *smaller, largest = microbatch_counts(config)
    for count in smaller:
        if config.parallel.schedule_name != "auto":  # takes every number, and is slow to build
            schedule_of(config, count)
    schedule = schedule_of(config, largest)
    if config.parallel.pipeline_memory_limit is not None:
        proved(config, lowered(config, schedule), stages)
    memory = _memory(config, stages, schedule)
    return {
        "world_size": world_size,
        "layout": _layout_report(config, layout),
        "stages": [_stage_report(config, plan) for plan in stages],
        "memory": _memory_report(memory, layout),
        "communication": [
            row
            for rank in range(config.parallel.pp)
            for row in communication_rows(config, rank, schedule.num_microbatches)
        ],
        "schedule": _schedule_report(config, stages, schedule),
        "batch": _batch_report(config),
        "model": _model_report(config),
        "config": sectioned(config),
    }


def _checked(config: RunConfig, world_size: int, explicit: frozenset[str]) -> RunConfig:
    # What the vocabulary has no part in is reported first.
    config = validate(config, world_size, explicit)
    return validate(_with_vocabulary(config), world_size, explicit)


def _with_vocabulary(config: RunConfig) -> RunConfig:
    if config.model.vocab_size is not None:
        return config
    tokenizer = build_tokenizer(config.data, None)
    if tokenizer is None:
        raise ConfigError(
            "the size of the vocabulary is not known, and the embedding's size depends on it; add --vocab-size 50257 "
            "(or --tokenizer-model FILE)"
        )
    return replace(config, vocab_size=tokenizer.vocab_size)


def _layout_report(config: RunConfig, layout: ParallelLayout) -> dict[str, Any]:
    p = config.parallel
    small = layout.world_size <= LISTED_RANKS
    groups = {}
    for kind in ParallelLayout.KINDS:
        lists = layout.groups(kind, None if small else LISTED_GROUPS)
        groups[kind] = {
            "count": layout.group_count(kind),
            "size": len(lists[0]),
            "complete": small,
            "ranks": [list(ranks) for ranks in lists],
        }
    return {
        "axes": {"tp": p.tp, "cp": p.cp, "dp": p.dp, "pp": p.pp, "vpp": p.vpp, "ep": p.ep, "etp": p.expert_tp},
        "order": p.rank_order,
        "groups": groups,
        "ranks": [
            {"rank": rank, **layout.coordinate(rank)._asdict()} for rank in range(layout.world_size if small else 0)
        ],
    }


def _stage_report(config: RunConfig, plan: StagePlan) -> dict[str, Any]:
    shapes = shapes_of_rank(config, [plan])
    return {
        "stage": plan.stage,
        "pipeline_rank": plan.rank,
        "first_layer": plan.first_layer,
        "last_layer": plan.last_layer,
        "layers": plan.num_layers,
        "embedding": plan.has_embedding,
        "head": plan.has_head,
        "parameters": sum(shape.size for shape in shapes),
        "parameters_per_rank": sum(local_size(shape, config) for shape in shapes),
    }


def _memory(config: RunConfig, stages: tuple[StagePlan, ...], schedule: Schedule) -> list[RankMemory]:
    """Per pipeline rank, its memory at the largest batch."""
    return [
        rank_memory(config, [plan for plan in stages if plan.rank == rank], peak)
        for rank, peak in enumerate(activation_peaks(config, stages, schedule))
    ]


def _memory_report(memory: list[RankMemory], layout: ParallelLayout) -> dict[str, Any]:
    rows = [
        {"pipeline_rank": rank, **vars(of_rank), "total_bytes": of_rank.total_bytes}
        for rank, of_rank in enumerate(memory)
    ]
    fullest = max(range(len(rows)), key=lambda rank: memory[rank].total_bytes)
    return {
        "pipeline_ranks": rows,
        "fullest_pipeline_rank": fullest,
        "fullest_rank": layout.rank(pp=fullest),
        "fullest_bytes": memory[fullest].total_bytes,
    }


def _schedule_report(config: RunConfig, stages: tuple[StagePlan, ...], schedule: Schedule) -> dict[str, Any]:
    drawn = schedule.num_stages <= GRID_STAGES and schedule.num_microbatches <= GRID_MICROBATCHES
    return {
        "name": schedule.name,
        "virtual_stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "all_microbatch_counts": list(microbatch_counts(config)),
        "bubble_fraction": bubble_fraction(config, stages, schedule.num_microbatches),
        "costs": config.parallel.pipeline_costs or "FLOPs",
        "peak_activations": _peak_activations(schedule),
        "grid": render_grid(schedule) if drawn else None,
    }


def _peak_activations(schedule: Schedule) -> list[int]:
    units = Sizes.uniform(schedule.num_stages)
    return [int(peak.size) for peak in memory_peaks(Program(schedule, schedule.actions), units)]


def _batch_report(config: RunConfig) -> dict[str, Any]:
    t = config.training
    sizes = batch_sizes(config)
    length_known = t.train_iters is not None or t.train_samples is not None
    samples = total_samples(config) if length_known else None
    return {
        "micro_batch_size": t.micro_batch_size,
        "dp": config.parallel.dp,
        "microbatches": sizes[-1] // samples_per_microbatch(config),
        "global_batch_size": sizes[-1],
        "seq_length": t.seq_length,
        "tokens_per_step": sizes[-1] * t.seq_length,
        "batch_sizes": list(sizes),
        "rampup_samples": t.rampup_batch_size[2] if t.rampup_batch_size else 0,
        "train_steps": total_steps(config) if length_known else None,
        "train_samples": samples,
        "train_tokens": None if samples is None else samples * t.seq_length,
    }


def _model_report(config: RunConfig) -> dict[str, Any]:
    model, s = config.model, config.training.seq_length
    palm = flops_per_token(model, s, "palm")
    assert config.training.global_batch_size is not None
    return {
        "parameters": parameter_count(model),
        "padded_vocab_size": model.padded_vocab_size,
        "flops_per_token": {"palm": palm, "megatron": flops_per_token(model, s, "megatron")},
        "flops_per_step": palm * s * config.training.global_batch_size,
    }
