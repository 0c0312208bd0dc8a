"""`--dry-run --rank N`: what one rank of any layout holds and does, as data; dry_run_rank_text.py prints it."""

from typing import Any

from megalite.config.batch import microbatch_counts
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.partition.memory import (
    HeldBucket,
    HeldParameter,
    activation_peaks,
    held_buckets,
    held_parameters,
    rank_memory,
    stages_of_rank,
)
from megalite.partition.pipeline import layout_of, lowered, plan_stages, schedule_of
from megalite.pipeline.ir.schedule import Schedule
from megalite.planner.communication import group_sizes, step_volumes, time_basis, wire_factor
from megalite.topology.layout import ParallelLayout


def rank_report(config: RunConfig, rank: int) -> dict[str, Any]:
    """Everything `--dry-run --rank` shows; docs/dry-run.md explains each key.

    Parameters, buckets and state are those of this very rank, to the byte; activations, workspace and communication
    those of its pipeline rank, at the largest batch.

    Args:
        config: validated, vocabulary known.

    Raises:
        ConfigError: there is no such rank, or the schedule does not take the number of microbatches.
    """
    layout = layout_of(config)
    if rank >= layout.world_size:
        last = layout.world_size - 1
        raise ConfigError(
            f"rank is {rank}, but a world of {layout.world_size} has the ranks 0 to {last}; use --rank {last}, or a "
            f"--world-size above {rank}"
        )
    schedule = schedule_of(config, microbatch_counts(config)[-1])
    place, buckets = layout.coordinate(rank).pp, held_buckets(config, rank)
    return {
        "rank": rank,
        "world_size": layout.world_size,
        "coordinate": _coordinate(layout, rank),
        "groups": _groups(layout, rank),
        "stages": [
            {
                "stage": plan.stage,
                "chunk": chunk,
                "first_layer": plan.first_layer,
                "last_layer": plan.last_layer,
                "embedding": plan.has_embedding,
                "head": plan.has_head,
            }
            for chunk, plan in enumerate(stages_of_rank(config, rank))
        ],
        "parameters": [_parameter(config, held) for held in held_parameters(config, rank)],
        "buckets": [_bucket(held) for held in buckets],
        "memory": _memory(config, place, schedule, buckets),
        "communication": communication_rows(config, place, schedule.num_microbatches),
        "schedule": {"name": schedule.name, "microbatches": schedule.num_microbatches},
        "actions": [str(action) for action in lowered(config, schedule).actions[place]],
    }


def communication_rows(config: RunConfig, pipeline_rank: int, num_microbatches: int) -> list[dict[str, Any]]:
    """By group and operation the bytes of a step on a rank at this place of the pipeline.

    `basis` says what they are of where steps are not alike.
    """
    sizes, rows = group_sizes(config), []
    for (group, operation), volume in sorted(step_volumes(config, pipeline_rank, num_microbatches).items()):
        changes = group in ("dp-cp", "expert-dp") and operation != "all-reduce"
        rows.append(
            {
                "pipeline_rank": pipeline_rank,
                "group": group,
                "size": sizes[group],
                "operation": operation,
                "volume_bytes": volume,
                "sent_bytes": round(volume * wire_factor(operation, sizes[group])),
                "basis": time_basis(config) if changes else "",
            }
        )
    return rows


def _coordinate(layout: ParallelLayout, rank: int) -> dict[str, int]:
    """On the dense axes, and on those of the experts, whose pipeline is the same."""
    experts = {"ep": "ep", "etp": "expert-tp", "edp": "expert-dp"}
    places = {axis: _group(layout, kind, rank).index(rank) for axis, kind in experts.items()}
    return {**layout.coordinate(rank)._asdict(), **places}


def _groups(layout: ParallelLayout, rank: int) -> dict[str, dict[str, Any]]:
    """By kind; kinds whose groups this rank is in none of are left out."""
    found = {kind: layout.group_of(kind, rank) for kind in ParallelLayout.KINDS}
    return {
        kind: {"index": ranks.index(rank), "size": len(ranks), "ranks": list(ranks)}
        for kind, ranks in found.items()
        if ranks is not None
    }


def _group(layout: ParallelLayout, kind: str, rank: int) -> tuple[int, ...]:
    ranks = layout.group_of(kind, rank)
    assert ranks is not None, kind
    return ranks


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
        "parameter_bytes": held.parameter_bytes,
        "gradient_bytes": held.gradient_bytes,
        "optimizer_bytes": held.optimizer_bytes,
        "parameters": list(bucket.names),
    }


def _memory(config: RunConfig, place: int, schedule: Schedule, buckets: list[HeldBucket]) -> dict[str, int]:
    stages = plan_stages(config)
    planned = rank_memory(
        config, [plan for plan in stages if plan.rank == place], activation_peaks(config, stages, schedule)[place]
    )
    parts = {
        "parameter_bytes": sum(held.parameter_bytes for held in buckets),
        "gradient_bytes": sum(held.gradient_bytes for held in buckets),
        "optimizer_bytes": sum(held.optimizer_bytes for held in buckets),
        "activation_bytes": planned.activation_bytes,
        "workspace_bytes": planned.workspace_bytes,
    }
    return {**parts, "total_bytes": sum(parts.values())}
