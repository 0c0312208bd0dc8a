"""`--dry-run`: report groups, stages, memory and schedule of a config on any number of ranks, or on one, as data.
`megalite config`: show a resolved config, the source of each value, or the presets.

dry_run_text.py formats the reports; docs/dry-run.md explains each key. Sizes are in bytes, layer ranges half open,
FLOPs those of the model."""

import math
import os
from argparse import Namespace
from typing import Any

from megalite.cli.display import table
from megalite.cli.dry_run_text import format_rank, format_report
from megalite.cli.output import json_text, notify, show
from megalite.config.batch import (
    batch_sizes,
    microbatch_counts,
    samples_per_microbatch,
    size_changes,
    tokens_after,
    total_samples,
    total_steps,
)
from megalite.config.describe import replace, sectioned, settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.files import dump, preset_names
from megalite.config.flags import Invocation
from megalite.config.registry import gc_paused
from megalite.config.run import RunConfig, least_ranks
from megalite.config.validate import validate
from megalite.conversion.huggingface.choose import choose_family
from megalite.models.shapes import flops_per_token, parameter_count
from megalite.partition.buckets import local_size
from megalite.partition.memory import (
    USUAL_MEMORY,
    HeldBucket,
    HeldParameter,
    held_buckets,
    held_matrix_bytes,
    held_parameters,
    host_peaks,
    is_built_without_limit,
    planned_memory,
    stages_of_rank,
)
from megalite.partition.pipeline import (
    bubble_fraction,
    flops_per_token_with_recompute,
    layout_of,
    lowered,
    plan_stages,
    proved,
    schedule_of,
)
from megalite.partition.stages import StagePlan, shapes_of_rank
from megalite.pipeline.ir.draw import render_grid
from megalite.pipeline.ir.memory import Sizes, memory_peaks
from megalite.pipeline.ir.schedule import Program, Schedule
from megalite.planner.communication import group_sizes, step_volumes, time_basis, wire_factor
from megalite.tokenizers.build import build_tokenizer
from megalite.topology.layout import ParallelLayout

LISTED_RANKS = 64
"""Largest world size for which all ranks and groups are listed. Above it only the first groups of each kind are."""
LISTED_GROUPS = 4
GRID_STAGES, GRID_MICROBATCHES = 8, 16
"""Largest number of virtual stages and of microbatches for which the schedule is drawn."""
USUAL_SIZES = {"GPT2BPETokenizer": 50_257, "HuggingFaceTokenizer": 128_256, "TikTokenizer": 131_072}
"""Assumed vocabulary size by tokenizer type if the tokenizer's files are missing; 32,000 for other types."""
_HELD = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
_HOST = "host_bytes"


def world_size_of(invocation: Invocation) -> int:
    """Return --world-size, or the smallest world size of the layout if the flag is missing."""
    return invocation.world_size or least_ranks(invocation.config)


def dry_run(invocation: Invocation) -> str:
    """Return the report as text, or as JSON with --json; with --rank the report of that rank."""
    config, world_size, explicit = invocation.config, world_size_of(invocation), invocation.explicit
    with gc_paused():
        if invocation.rank is None:
            found, as_text = report(config, world_size, explicit), format_report
        else:
            found, as_text = rank_report(checked(config, world_size, explicit), invocation.rank), format_rank
        return json_text(found) if invocation.json else as_text(found)


def report(config: RunConfig, world_size: int, explicit: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Validate a config and return the report of `--dry-run`. `explicit`: see `Invocation`."""
    config = checked(config, world_size, explicit)
    layout, stages = layout_of(config), plan_stages(config)
    *smaller, largest = microbatch_counts(config)
    for count in smaller:
        if config.parallel.schedule_name != "auto":  # auto accepts any number of microbatches and is slow to build
            schedule_of(config, count)
    schedule = schedule_of(config, largest)
    if config.parallel.pipeline_memory_limit is not None:
        proved(config, lowered(config, schedule), stages)
    memory = _memory_report(config, schedule, layout)
    return {
        "world_size": world_size,
        "layout": _layout_report(config, layout),
        "stages": [_stage_report(config, plan) for plan in stages],
        "memory": memory,
        "communication": [
            row
            for rank in range(config.parallel.pp)
            for row in communication_rows(config, rank, schedule.num_microbatches)
        ],
        "schedule": _schedule_report(config, stages, schedule, memory["fullest_bytes"]),
        "batch": _batch_report(config),
        "model": _model_report(config),
        "config": sectioned(config),
    }


def checked(config: RunConfig, world_size: int, explicit: frozenset[str]) -> RunConfig:
    """Validate a config and add the vocabulary size. Errors of other settings come before those of the tokenizer."""
    config = validate(with_vocabulary(validate(config, world_size, explicit)), world_size, explicit)
    if config.checkpoint.export_hf is not None:
        choose_family(config.model, config.training.seq_length, None)
    return config


def with_vocabulary(config: RunConfig) -> RunConfig:
    """Set the vocabulary size from the tokenizer, or to a usual size if the tokenizer's files are missing."""
    if config.model.vocab_size is not None:
        return config
    files = [file for file in (config.data.tokenizer_model, config.data.vocab_file, config.data.merge_file) if file]
    if files and not any(map(os.path.exists, files)):
        size = USUAL_SIZES.get(
            config.data.tokenizer_type or ("GPT2BPETokenizer" if config.data.vocab_file else ""), 32_000
        )
        notify(f"{files[0]} is missing: a vocabulary of {size} is assumed; set another with --vocab-size")
        return replace(config, vocab_size=size)
    tokenizer = build_tokenizer(config.data, None)
    if tokenizer is None:
        raise ConfigError("the size of the vocabulary is not known; add --vocab-size 50257 or --tokenizer-model FILE")
    return replace(config, vocab_size=tokenizer.vocab_size)


def _layout_report(config: RunConfig, layout: ParallelLayout) -> dict[str, Any]:
    p = config.parallel
    small = layout.world_size <= LISTED_RANKS
    groups = {}
    for kind in _kinds(layout):
        lists = layout.groups(kind, None if small else LISTED_GROUPS)
        ranks = [list(ranks) for ranks in lists]
        groups[kind] = {"count": layout.group_count(kind), "size": len(ranks[0]), "complete": small, "ranks": ranks}
    listed = range(layout.world_size if small else 0)
    return {
        "axes": {"tp": p.tp, "cp": p.cp, "dp": p.dp, "pp": p.pp, "vpp": p.vpp, "ep": p.ep, "etp": p.expert_tp},
        "order": p.rank_order,
        "groups": groups,
        "ranks": [{"rank": rank, **layout.coordinate(rank)._asdict()} for rank in listed],
    }


def _kinds(layout: ParallelLayout) -> list[str]:
    """Return the kinds of groups. cp-heads and cp-keys are included only if cp is split into both."""
    is_split = 1 < layout.cp_heads < layout.cp
    return [kind for kind in layout.kinds if is_split or kind not in ("cp-heads", "cp-keys")]


def _layers_report(plan: StagePlan) -> dict[str, Any]:
    return {
        "first_layer": plan.first_layer,
        "last_layer": plan.last_layer,
        "embedding": plan.has_embedding,
        "head": plan.has_head,
    }


def _stage_report(config: RunConfig, plan: StagePlan) -> dict[str, Any]:
    shapes = shapes_of_rank(config, [plan])
    return {
        "stage": plan.stage,
        "pipeline_rank": plan.rank,
        **_layers_report(plan),
        "layers": plan.num_layers,
        "parameters": sum(shape.size for shape in shapes),
        "parameters_per_rank": sum(local_size(shape, config) for shape in shapes),
    }


def _memory_report(config: RunConfig, schedule: Schedule, layout: ParallelLayout) -> dict[str, Any]:
    """Return the memory at the largest batch size."""
    rows = [
        {"pipeline_rank": rank, **vars(memory), "total_bytes": memory.total_bytes}
        for rank, memory in enumerate(planned_memory(config, schedule))
    ]
    fullest = max(rows, key=lambda row: row["total_bytes"])
    return {
        "pipeline_ranks": rows,
        "fullest_pipeline_rank": fullest["pipeline_rank"],
        "fullest_rank": layout.rank(pp=fullest["pipeline_rank"]),
        "fullest_bytes": fullest["total_bytes"],
    }


def _schedule_report(
    config: RunConfig, stages: tuple[StagePlan, ...], schedule: Schedule, fullest_bytes: int
) -> dict[str, Any]:
    drawn = schedule.num_stages <= GRID_STAGES and schedule.num_microbatches <= GRID_MICROBATCHES
    peaks = memory_peaks(Program(schedule, schedule.actions), Sizes.uniform(schedule.num_stages))
    return {
        "name": schedule.name,
        "virtual_stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "all_microbatch_counts": list(microbatch_counts(config)),
        "bubble_fraction": bubble_fraction(config, stages, schedule.num_microbatches),
        "costs": config.parallel.pipeline_costs or "FLOPs",
        "peak_activations": [int(peak.size) for peak in peaks],
        "grid": render_grid(schedule) if drawn else None,
        "device_bytes": math.ceil(fullest_bytes / USUAL_MEMORY) if is_built_without_limit(config) else None,
    }


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
        "rampup_samples": size_changes(config)[-1][0],
        "train_steps": total_steps(config) if length_known else None,
        "train_samples": samples,
        "train_tokens": None if samples is None else tokens_after(config, total_steps(config), samples),
        "seq_length_warmup": t.seq_length_warmup,
    }


def _model_report(config: RunConfig) -> dict[str, Any]:
    model, s = config.model, config.training.seq_length
    palm = flops_per_token(model, s, "palm")
    assert config.training.global_batch_size is not None
    tokens, recomputed = s * config.training.global_batch_size, flops_per_token_with_recompute(config)
    megatron = flops_per_token(model, s, "megatron")
    return {
        "parameters": parameter_count(model),
        "padded_vocab_size": model.padded_vocab_size,
        "flops_per_token": {"palm": palm, "megatron": megatron, "with_recompute": recomputed},
        "flops_per_step": palm * tokens,
        "flops_per_step_with_recompute": recomputed * tokens,
    }


def rank_report(config: RunConfig, rank: int) -> dict[str, Any]:
    """Return the report of `--dry-run --rank` for a config from `checked`.

    Parameters, buckets and states are exact for this rank. Activations, workspace and communication are those of its
    pipeline rank, at the largest batch size."""
    layout = layout_of(config)
    if rank >= layout.world_size:
        last = layout.world_size - 1
        raise ConfigError(f"rank is {rank}, but a world of {last + 1} has the ranks 0 to {last}; use --rank {last}")
    schedule = schedule_of(config, microbatch_counts(config)[-1])
    pipeline_rank, buckets = layout.coordinate(rank).pp, held_buckets(config, rank)
    groups = {
        kind: {"index": ranks.index(rank), "size": len(ranks), "ranks": list(ranks)}
        for kind in _kinds(layout)
        if (ranks := layout.group_of(kind, rank)) is not None
    }
    experts = {"ep": "ep", "etp": "expert-tp", "edp": "expert-dp"}
    return {
        "rank": rank,
        "world_size": layout.world_size,
        "coordinate": {
            **layout.coordinate(rank)._asdict(),
            **{axis: groups[kind]["index"] for axis, kind in experts.items()},
        },
        "groups": groups,
        "stages": [
            {"stage": plan.stage, "chunk": chunk, **_layers_report(plan)}
            for chunk, plan in enumerate(stages_of_rank(config, rank))
        ],
        "parameters": [_parameter(config, held) for held in held_parameters(config, rank)],
        "buckets": [_bucket(held) for held in buckets],
        "memory": _rank_memory(config, rank, schedule, buckets),
        "communication": communication_rows(config, pipeline_rank, schedule.num_microbatches),
        "schedule": {"name": schedule.name, "microbatches": schedule.num_microbatches},
        "actions": [str(action) for action in lowered(config, schedule).actions[pipeline_rank]],
    }


def communication_rows(config: RunConfig, pipeline_rank: int, num_microbatches: int) -> list[dict[str, Any]]:
    """Return the communication volume per step of a rank at this pipeline rank, by group and operation.

    `basis` is not empty if steps differ in volume; it names the steps that the row describes."""
    sizes, rows = group_sizes(config), []
    prefixes = ("inter-", "intra-") if config.parallel.strategy.weights == "local" else ("intra-",)
    for (group, operation), volume in sorted(step_volumes(config, pipeline_rank, num_microbatches).items()):
        is_of_replicas = any(group.removeprefix(prefix) in ("dp-cp", "expert-dp") for prefix in prefixes)
        varies = is_of_replicas and operation != "all-reduce"
        rows.append(
            {
                "pipeline_rank": pipeline_rank,
                "group": group,
                "size": sizes[group],
                "operation": operation,
                "volume_bytes": volume,
                "sent_bytes": round(volume * wire_factor(operation, sizes[group])),
                "basis": time_basis(config) if varies else "",
            }
        )
    return rows


def _parameter(config: RunConfig, held: HeldParameter) -> dict[str, Any]:
    return {
        "stage": held.stage,
        "name": held.spec.name,
        "shape": list(held.spec.shape),
        "global_shape": list(held.spec.global_shape),
        "slice": [list(bounds) for bounds in held.spec.slice],
        "dtype": config.training.precision,
        "bytes": held.bytes,
    }


def _bucket(held: HeldBucket) -> dict[str, Any]:
    bucket = held.bucket
    return {
        "stage": held.stage,
        "group": bucket.group,
        "index": held.place,
        "size": bucket.replicas,
        "elements": bucket.elements,
        **{name: getattr(held, name) for name in (*_HELD, _HOST)},
        "parameters": list(bucket.names),
    }


def _rank_memory(config: RunConfig, rank: int, schedule: Schedule, buckets: list[HeldBucket]) -> dict[str, int]:
    pipeline_rank = layout_of(config).coordinate(rank).pp
    planned = planned_memory(config, schedule)[pipeline_rank]
    parts = {
        **{name: sum(getattr(held, name) for held in buckets) for name in _HELD},
        "activation_bytes": planned.activation_bytes,
        "workspace_bytes": planned.workspace_bytes,
    }
    host = host_peaks(config, plan_stages(config), schedule)[pipeline_rank] + sum(held.host_bytes for held in buckets)
    matrices = held_matrix_bytes(config, rank)
    if config.optimizer.optimizer_cpu_offload:
        host += matrices
    else:
        parts["optimizer_bytes"] += matrices
    return {**parts, "total_bytes": sum(parts.values()), _HOST: host}


def run_config(flags: Namespace) -> int:
    invocation = flags.invocation
    if not (flags.show or flags.explain):
        sources = [source for source in invocation.provenance.values() if source != "default"]
        if sources:
            raise ConfigError(f"{sources[0].removeprefix('flag ')} has no effect with --presets; remove it")
        show("\n".join(preset_names()))
        return 0
    # Resolution depends on the number of ranks; --world-size sets it, as in a dry run.
    config = validate(invocation.config, world_size_of(invocation), invocation.explicit)
    if flags.explain:
        rows = _explain(config, invocation)
        lines = table([(name, str(row["value"]), row["source"]) for name, row in rows.items()])
        show(json_text(rows) if invocation.json else "\n".join(lines))
    else:
        show(json_text(sectioned(config)) if invocation.json else dump(config).removesuffix("\n"))
    return 0


def _explain(config: RunConfig, invocation: Invocation) -> dict[str, dict[str, Any]]:
    """Return setting -> value and source, for settings with a source other than the default."""
    rows = {}
    for name, value in values_of(config).items():
        source = invocation.provenance[name]
        if source == "default" and value != settings()[name].default:
            source = "derived"
        if source != "default":
            rows[name] = {"value": value, "source": source}
    return rows
