"""How the model is cut into virtual stages, and what a microbatch costs on each by FLOPs. No torch.

Training, dry run and planner cut the model by `cut_stages` alone.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from megalite.config.run import RunConfig, stage_layers
from megalite.models.shapes import ParameterShape, end_forward_flops, layer_forward_flops, stage_shapes
from megalite.pipeline.ir.partition import partition_layers

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Itself(Generic[T]):
    """A value as a key: the object, whatever is in it, which may be lists."""

    value: T

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def once_per_config(function: Callable[Concatenate[RunConfig, P], T]) -> Callable[Concatenate[RunConfig, P], T]:
    """Remembers what the function says of the last configs: all that is predicted of one asks for the same parts."""

    @lru_cache(maxsize=64)
    def known(key: Itself[RunConfig], *given: Hashable) -> T:
        return function(key.value, *given)  # type: ignore[call-arg, arg-type]

    return lambda config, *given: known(Itself(config), *given)  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One virtual stage: layers `first_layer <= i < last_layer`, on pipeline rank `rank`."""

    stage: int
    rank: int
    first_layer: int
    last_layer: int
    has_embedding: bool
    has_head: bool

    @property
    def num_layers(self) -> int:
        """Transformer blocks of the stage."""
        return self.last_layer - self.first_layer


def message_parts(config: RunConfig) -> int:
    """Parts that a message between stages is cut in, one per tensor-parallel rank; 1: each sends whole what it has."""
    p = config.parallel
    return int(
        parts_of_message(p.scatter_gather_tensors_in_pipeline, p.sequence_parallel, config.model.hidden_size, p.tp)
    )


def parts_of_message(scattered: Any, sequence_parallel: Any, hidden_size: Any, tp: Any) -> Any:
    """`message_parts` by the settings, which may be arrays."""
    return 1 + (tp - 1) * (scattered * (1 - sequence_parallel) * (hidden_size % tp == 0))


@once_per_config
def shapes_of(config: RunConfig, plan: StagePlan) -> tuple[ParameterShape, ...]:
    """Full shapes of the parameters of a stage, in the order of the forward."""
    return tuple(stage_shapes(config.model, plan.first_layer, plan.last_layer, plan.has_embedding, plan.has_head))


def cut_stages(config: RunConfig, placement: Sequence[int]) -> tuple[StagePlan, ...]:
    """The cut of a validated config with a known vocabulary into stages on these ranks, in stage order.

    pipeline_layers or pipeline_layout if they are set; else the cut with the fastest slowest pipeline rank, the head
    counting by its FLOPs and the embedding, a lookup, as nothing.
    """
    placement = tuple(placement)
    layers = stage_layers(config)
    if layers:
        return _plans(tuple(layers), placement)
    costs = _layer_flops(config, range(config.model.num_layers))
    return _plans(
        _partition(tuple(costs), placement, end_forward_flops(config.model, config.training.seq_length)), placement
    )


@lru_cache(maxsize=256)
def _partition(layer_cost: tuple[int, ...], placement: tuple[int, ...], last_cost: int) -> tuple[int, ...]:
    # Everything that asks about a config cuts it again.
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


def _layer_flops(config: RunConfig, layers: range) -> list[int]:
    """FLOPs of one token's forward through each of these layers, of which there are four kinds at most."""
    kinds = [(config.model.is_moe_layer(index), config.model.has_window(index)) for index in layers]
    of_kind = {
        kind: layer_forward_flops(config.model, layers[kinds.index(kind)], config.training.seq_length)
        for kind in set(kinds)
    }
    return [of_kind[kind] for kind in kinds]


def shapes_of_rank(config: RunConfig, stages: list[StagePlan]) -> list[ParameterShape]:
    """Full shapes of the parameters that a pipeline rank with these stages holds, a tied embedding once."""
    return list({shape.name: shape for plan in stages for shape in shapes_of(config, plan)}.values())


def shares_embedding(stages: Sequence[StagePlan]) -> bool:
    """The first and the last stage are on one rank, so that a tied embedding needs no second copy."""
    return stages[0].rank == stages[-1].rank


def stage_forward_flops(config: RunConfig, plan: StagePlan) -> int:
    """FLOPs of one token's forward through the stage."""
    layers = sum(_layer_flops(config, range(plan.first_layer, plan.last_layer)))
    return layers + (end_forward_flops(config.model, config.training.seq_length) if plan.has_head else 0)
