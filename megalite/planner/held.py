"""What one rank of a layout holds between two steps: every parameter with its slice, every bucket with its bytes.

The rest of this package speaks of a pipeline rank, whose tensor- and data-parallel ranks hold equal amounts. Here is one
global rank: which rows are its own, and what padding and strategy make of its buckets, to the byte. A test builds the
real modules, buckets and optimizers without memory and compares.
"""

import math
from dataclasses import dataclass

from megalite.config.run import RunConfig
from megalite.models.shapes import ParameterShape, stage_shapes
from megalite.planner.activations import ELEMENT_BYTES
from megalite.planner.buckets import PlannedBucket, planned_buckets
from megalite.planner.pipeline import layout_of, plan_stages
from megalite.planner.stages import StagePlan, shares_embedding
from megalite.planner.states import element_bytes
from megalite.topology.layout import ParallelLayout
from megalite.topology.sharding import ShardSpec


@dataclass(frozen=True, kw_only=True)
class HeldParameter:
    """One parameter of a rank."""

    stage: int
    spec: ShardSpec
    """Name, global shape and this rank's slice."""
    bytes: int
    """Of the slice in the model's precision, whole; with fully-sharded each replica keeps a part of it."""


@dataclass(frozen=True, kw_only=True)
class HeldBucket:
    """One bucket of a rank: what it keeps of it from step to step, padding included."""

    stage: int
    bucket: PlannedBucket
    place: int
    """This rank's among the replicas."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """Main parameters apart from the model's, states of the optimizer and of the strategy."""


def stages_of_rank(config: RunConfig, rank: int) -> list[StagePlan]:
    """The virtual stages of a global rank, in order: its chunks 0, 1, ..."""
    place = layout_of(config).coordinate(rank).pp
    return [plan for plan in plan_stages(config) if plan.rank == place]


def held_parameters(config: RunConfig, rank: int) -> list[HeldParameter]:
    """Every parameter of a global rank, by stage and in the order of the forward.

    Args:
        config: validated, vocabulary known.
        rank: below the layout's world size.
    """
    layout, stages = layout_of(config), plan_stages(config)
    element = ELEMENT_BYTES[config.training.precision]
    found = []
    for plan in stages_of_rank(config, rank):
        shapes = stage_shapes(
            config.model, plan.first_layer, plan.last_layer, plan.has_embedding, plan.has_head
        )
        for shape in shapes:
            again = plan.has_head and not plan.has_embedding and shares_embedding(stages)
            if again and shape.name == "embedding.word.weight":
                continue  # it is the first stage's, on this same rank
            spec = local_spec(layout, rank, shape)
            size = element * math.prod(spec.shape)
            found.append(HeldParameter(stage=plan.stage, spec=spec, bytes=size))
    return found


def local_spec(layout: ParallelLayout, rank: int, shape: ParameterShape) -> ShardSpec:
    """The slice of a parameter that a rank holds: of experts those of its ep rank, of the rest what tp leaves it."""
    spec = ShardSpec.whole(shape.name, shape.shape)
    if shape.shard_dim is not None:
        place, parts = _place(layout, "expert-tp" if shape.expert else "tp", rank)
        spec = ShardSpec.split(shape.name, shape.shape, dim=shape.shard_dim, index=place, parts=parts)
    if not shape.expert:
        return spec
    place, parts = _place(layout, "ep", rank)
    own = ShardSpec.split(shape.name, shape.shape, dim=0, index=place, parts=parts).slice[0]
    return ShardSpec(name=shape.name, global_shape=shape.shape, slice=(own, *spec.slice[1:]))


def held_buckets(config: RunConfig, rank: int) -> list[HeldBucket]:
    """Every bucket of a global rank, by stage and in the order in which gradients come.

    A parameter server's main parameters and optimizer states are on the first replica alone; what it has of pushes that
    wait is counted as in `element_bytes`.

    Args:
        config: validated, vocabulary known.
        rank: below the layout's world size.
    """
    layout, stages = layout_of(config), plan_stages(config)
    served = config.parallel.dp_strategy in ("parameter-server", "async-parameter-server")
    found = []
    for plan in stages_of_rank(config, rank):
        for bucket in planned_buckets(config, plan, stages):
            place, _ = _place(layout, bucket.group, rank)
            each = element_bytes(config, bucket.shapes[0], bucket.replicas)
            works_only = served and place > 0
            found.append(
                HeldBucket(
                    stage=plan.stage,
                    bucket=bucket,
                    place=place,
                    parameter_bytes=round(each.parameter * bucket.elements),
                    gradient_bytes=round(each.gradient * bucket.elements),
                    optimizer_bytes=0 if works_only else round(each.optimizer * bucket.elements),
                )
            )
    return found


def _place(layout: ParallelLayout, kind: str, rank: int) -> tuple[int, int]:
    """(index, size) of a rank in its group of this kind."""
    ranks = layout.group_of(kind, rank)
    assert ranks is not None, kind
    return ranks.index(rank), len(ranks)
