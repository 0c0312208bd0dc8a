"""The buckets of a stage, as the strategies cut its parameters."""

import sys
from dataclasses import dataclass

from megalite.config.run import RunConfig
from megalite.models.shapes import ParameterShape, is_hidden_matrix, stage_shapes
from megalite.planner.activations import ELEMENT_BYTES
from megalite.planner.sharing import local_size
from megalite.planner.stages import StagePlan, shares_embedding

ALIGNMENT = 64
"""A bucket is padded to this many elements for each rank that shares it."""


@dataclass(frozen=True, eq=False)
class PlannedBucket:
    """A bucket of one stage."""

    group: str
    """Of the ranks that hold it too: dp-cp or expert-dp."""
    replicas: int
    partial: bool
    """Each tp rank has a part of the gradient."""
    tied: bool
    elements: int
    shapes: tuple[ParameterShape, ...]
    unit: str = ""
    """fully-sharded: which module's it is."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of its parameters."""
        return tuple(shape.name for shape in self.shapes)


def planned_buckets(config: RunConfig, plan: StagePlan, stages: tuple[StagePlan, ...]) -> list[PlannedBucket]:
    """As `data_parallel.buckets.make_buckets` cuts the parameters of a stage for the run's strategy."""
    shapes = stage_shapes(config.model, plan.first_layer, plan.last_layer, plan.has_embedding, plan.has_head)
    tied_apart = config.model.tie_embeddings and len(stages) > 1
    if tied_apart and plan.has_head and shares_embedding(stages):
        # It is the first stage's.
        shapes = [shape for shape in shapes if shape.name != "embedding.word.weight"]
    if config.parallel.dp_strategy != "fully-sharded":
        return _cut(config, shapes, tied_apart=tied_apart)
    units: dict[str, list[ParameterShape]] = {}
    for shape in shapes:
        units.setdefault(_unit(shape.name), []).append(shape)
    return [
        bucket
        for unit, members in reversed(units.items())
        for bucket in _cut(config, members, tied_apart=tied_apart, unit=unit)
    ]


def _unit(name: str) -> str:
    """The module that a parameter is gathered with."""
    first, second, *_ = name.split(".")
    if first == "layers":
        return f"layers.{second}"
    return "head" if first == "final_norm" else first


def _cut(
    config: RunConfig, shapes: list[ParameterShape], *, tied_apart: bool, unit: str = ""
) -> list[PlannedBucket]:
    p = config.parallel
    assert p.dp is not None
    dense, expert = p.dp * p.cp, p.tp * p.cp * p.dp // (p.expert_tp * p.ep)
    found: list[PlannedBucket] = []
    open_kinds: dict[tuple[bool, ...], list[ParameterShape]] = {}

    def close(kind: tuple[bool, ...]) -> None:
        members = tuple(open_kinds.pop(kind))
        replicas = expert if kind[3] else dense
        elements = sum(local_size(shape, config) for shape in members)
        align = ALIGNMENT * replicas
        found.append(
            PlannedBucket(
                group="expert-dp" if kind[3] else "dp-cp",
                replicas=replicas,
                partial=kind[2],
                tied=kind[4],
                elements=-(-elements // align) * align,
                shapes=members,
                unit=unit,
            )
        )

    muon = config.optimizer.optimizer == "muon"
    for shape in reversed(shapes):
        kind: tuple[bool, ...] = (
            shape.decay,
            shape.shard_dim is not None,
            is_partial(shape, config),
            shape.expert,
            tied_apart and shape.name == "embedding.word.weight",
            muon and is_hidden_matrix(shape.name, shape.shape, decay=shape.decay),
        )
        members = open_kinds.setdefault(kind, [])
        members.append(shape)
        if sum(local_size(member, config) for member in members) >= bucket_size(config):
            close(kind)
    for left in list(open_kinds):
        close(left)
    return found


def bucket_size(config: RunConfig) -> int:
    """Elements after which a bucket is full."""
    p, d = config.parallel, config.data_parallel
    if p.dp_strategy == "fused-all-reduce":
        return sys.maxsize
    if p.dp_strategy == "sharded-parameter-server":
        assert p.dp is not None
        key = int(1e6 * d.server_chunk_mb / wire_width(config)) // ALIGNMENT
        return p.dp * p.cp * max(1, key) * ALIGNMENT
    return p.ddp_bucket_size


def wire_width(config: RunConfig) -> int:
    """Bytes of an element of a gradient on the wire."""
    return (
        2 if config.data_parallel.wire_dtype == "bf16" else max(4, ELEMENT_BYTES[config.training.precision])
    )


def is_partial(shape: ParameterShape, config: RunConfig) -> bool:
    """Each tp rank has a part of the parameter's gradient although it holds the whole parameter."""
    always = ("router.weight", "q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias")
    if shape.name.endswith(always):
        return config.parallel.tp > 1
    in_sequence_region = "norm." in shape.name or shape.name.endswith(("out.bias", "down.bias"))
    return config.parallel.sequence_parallel and in_sequence_region
