"""Split the model into virtual stages and count their FLOPs. No torch.

Training, dry run and planner all split it with `cut_stages`."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from megalite.config.run import RunConfig, cache_by_reading, stage_layers
from megalite.models.shapes import (
    ParameterShape,
    StageLayers,
    end_forward_flops,
    layer_kinds,
    layers_forward_flops,
    stage_shapes,
)
from megalite.pipeline.ir.partition import partition_layers


@dataclass(frozen=True, kw_only=True)
class StagePlan(StageLayers):
    """One virtual stage, on pipeline rank `rank`."""

    stage: int
    rank: int

    @property
    def num_layers(self) -> int:
        """Transformer blocks of the stage."""
        return self.last_layer - self.first_layer


def message_parts(config: RunConfig) -> int:
    """Return the parts of a message between stages, one per tensor-parallel rank; 1: each sends the whole message."""
    p = config.parallel
    return int(
        parts_of_message(p.scatter_gather_tensors_in_pipeline, p.sequence_parallel, config.model.hidden_size, p.tp)
    )


def parts_of_message(scattered: Any, sequence_parallel: Any, hidden_size: Any, tp: Any) -> Any:
    """Return `message_parts` for settings that may be arrays."""
    return 1 + (tp - 1) * (scattered * (1 - sequence_parallel) * (hidden_size % tp == 0))


@cache_by_reading
def shapes_of(config: RunConfig, plan: StagePlan) -> tuple[ParameterShape, ...]:
    """Return the full shapes of a stage's parameters, in forward order."""
    return tuple(stage_shapes(config.model, plan.first_layer, plan.last_layer, plan.has_embedding, plan.has_head))


def cut_stages(config: RunConfig, placement: Sequence[int]) -> tuple[StagePlan, ...]:
    """Split a validated config with a known vocabulary into stages on these ranks, in stage order.

    The split is pipeline_layers or pipeline_layout if they are set. Otherwise it minimizes the FLOPs of the slowest
    pipeline rank, including the head; the embedding is a lookup and counts as 0."""
    placement = tuple(placement)
    layers = stage_layers(config)
    if layers:
        return _plans(tuple(layers), placement)
    costs = layers_forward_flops(config.model, range(config.model.num_layers), config.training.seq_length)
    return _plans(
        _partition(tuple(costs), placement, end_forward_flops(config.model, config.training.seq_length)), placement
    )


@lru_cache(maxsize=256)
def _partition(layer_cost: tuple[int, ...], placement: tuple[int, ...], last_cost: int) -> tuple[int, ...]:
    # Every function that needs the stages splits the config again.
    return partition_layers(len(layer_cost), placement, layer_cost=layer_cost, last_cost=last_cost)


@lru_cache(maxsize=256)
def _plans(layers: tuple[int, ...], placement: tuple[int, ...]) -> tuple[StagePlan, ...]:
    last = len(placement) - 1
    return tuple(
        StagePlan(
            stage=stage,
            rank=rank,
            first_layer=end - count,
            last_layer=end,
            has_embedding=stage == 0,
            has_head=stage == last,
        )
        for stage, (rank, count, end) in enumerate(zip(placement, layers, accumulate(layers), strict=True))
    )


def shapes_of_rank(config: RunConfig, stages: list[StagePlan]) -> list[ParameterShape]:
    """Return the full shapes of the parameters on a pipeline rank with these stages, a tied embedding once."""
    return list({shape.name: shape for plan in stages for shape in shapes_of(config, plan)}.values())


def shares_embedding(stages: Sequence[StagePlan]) -> bool:
    """Return whether the first and last stage share a rank, so that a tied embedding needs no second copy."""
    return stages[0].rank == stages[-1].rank


def stage_forward_flops(config: RunConfig, plan: StagePlan) -> int:
    """Return the FLOPs of one token's forward through the stage."""
    layers = range(plan.first_layer, plan.last_layer)
    total = sum(layers_forward_flops(config.model, layers, config.training.seq_length))
    return total + (end_forward_flops(config.model, config.training.seq_length) if plan.has_head else 0)


def kind_of_stage(config: RunConfig, plan: StagePlan) -> Hashable:
    """Return a key that is equal for stages that differ only in their position and layer names; fp8 and lr_multipliers
    depend on these."""
    layers, last = range(plan.first_layer, plan.last_layer), config.model.num_layers - 1
    ends = [index for index in (0, last) if index in layers] if config.compute.fp8 else []
    places = [*ends, plan.first_layer] if config.optimizer.lr_multipliers else ends
    kinds = layer_kinds(config.model)[plan.first_layer : plan.last_layer]
    return plan.has_embedding, plan.has_head, kinds, tuple(places)
