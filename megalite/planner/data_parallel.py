"""What data-parallel ranks send each other in a step: buckets as the strategies cut them, and their collectives.

Of strategies that change with time it is the mean over steps (exchanges every so often) or the later phase (compressed).
Not counted: the sums of LAMB's norms, 16 bytes a tensor, and the matrices that Muon puts together.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.parallel import LOCAL_STRATEGIES
from megalite.config.run import RunConfig
from megalite.models.shapes import ParameterShape, is_hidden_matrix, stage_shapes
from megalite.planner.activations import ELEMENT_BYTES
from megalite.planner.sharing import local_size
from megalite.planner.stages import StagePlan, shares_embedding

Volume = tuple[str, str, int]
"""Group, operation, bytes."""

ALIGNMENT = 64
"""A bucket is padded to this many elements for each rank that shares it."""


@dataclass(frozen=True)
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


def norm_terms(config: RunConfig) -> int:
    """Numbers that tell the gradient's norm, in the all-reduce that all ranks take part in."""
    strategy = config.parallel.dp_strategy
    if strategy in LOCAL_STRATEGIES:
        assert config.parallel.dp is not None
        return config.parallel.dp
    return 2 if strategy == "fused-all-reduce" or config.optimizer.optimizer in ONEBIT_OPTIMIZERS else 1


def gradient_volumes(
    config: RunConfig, plan: StagePlan, stages: tuple[StagePlan, ...], num_microbatches: int
) -> Iterator[Volume]:
    """Of one stage in a step, on the data-parallel rank that sends most."""
    width = max(4, ELEMENT_BYTES[config.training.precision])
    for bucket in planned_buckets(config, plan, stages):
        if bucket.partial:
            yield "tp", "all-reduce", bucket.elements * width
        if bucket.tied:
            yield "embedding", "all-reduce", bucket.elements * width
        if bucket.replicas > 1:
            for operation, size in _exchanges(config, bucket, num_microbatches):
                yield bucket.group, operation, round(size)


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
        parts = shape.name.split(".")
        units.setdefault(".".join(parts[:2]) if parts[0] == "layers" else parts[0], []).append(shape)
    return [
        bucket
        for unit, members in reversed(units.items())
        for bucket in _cut(config, members, tied_apart=tied_apart, unit=unit)
    ]


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
        key = int(1e6 * d.server_chunk_mb / _wire(config)) // ALIGNMENT
        return p.dp * p.cp * max(1, key) * ALIGNMENT
    return p.ddp_bucket_size


def _wire(config: RunConfig) -> int:
    """Bytes of an element of a gradient on the wire."""
    return (
        2 if config.data_parallel.wire_dtype == "bf16" else max(4, ELEMENT_BYTES[config.training.precision])
    )


def _exchanges(
    config: RunConfig, bucket: PlannedBucket, num_microbatches: int
) -> Iterable[tuple[str, float]]:
    """(operation, bytes) over the replicas of one bucket."""
    p, d = config.parallel, config.data_parallel
    n, count = bucket.elements, bucket.replicas
    element = ELEMENT_BYTES[config.training.precision]
    wire, narrow = _wire(config), d.wire_dtype == "bf16"
    in_parts = narrow or d.reduction_order == "rank"
    lossy = d.grad_compression != "none" and bucket.shapes[0].decay  # norms and biases travel whole
    if config.optimizer.optimizer in ONEBIT_OPTIMIZERS or lossy:
        return _compressed(config, bucket)
    if p.dp_strategy in ("all-reduce", "fused-all-reduce"):
        return (
            [("all-to-all", n * wire), ("all-gather", n * wire)] if in_parts else [("all-reduce", n * wire)]
        )
    if p.dp_strategy in ("distributed-optimizer", "fully-sharded"):
        late = bucket.partial or bucket.tied
        whole = p.dp_strategy == "fully-sharded"
        pushes = num_microbatches if (d.shard_gradients or whole) and not late else 1
        gathers = 2 * num_microbatches if whole else 1
        return [
            ("all-to-all" if in_parts else "reduce-scatter", pushes * n * wire),
            ("all-gather", gathers * n * element),
        ]
    if p.dp_strategy == "sharded-parameter-server":
        return [("all-to-all", n * wire), ("all-gather", n * element)]
    if p.dp_strategy == "parameter-server":
        return [("send", (count - 1) * n * element)]
    if p.dp_strategy == "async-parameter-server":
        return [("send", (count - 1) * n * element)]
    if p.dp_strategy == "gossip":
        peers = 1 if d.gossip_graph == "one-peer" or count == 2 else 2
        return [("send", peers * n * wire)]
    times = 1.0 / d.sync_interval
    if d.average_optimizer_state:
        times *= 3.0
    return [("all-to-all", times * n * wire), ("all-gather", times * n * wire)]


def _compressed(config: RunConfig, bucket: PlannedBucket) -> Iterable[tuple[str, float]]:
    """Without the scales, which are a number a tensor or block."""
    d, n, count = config.data_parallel, bucket.elements, bucket.replicas
    kind = d.grad_compression if d.grad_compression != "none" else "onebit"
    if kind in ("onebit", "uint8"):
        size = n / 8 if kind == "onebit" else n
        return [("all-to-all", size), ("all-gather", size)]
    if kind == "topk":
        each = 6.0 if d.wire_dtype == "bf16" else 8.0
        return [("all-gather", each * d.topk_density * n * count)]
    numbers = sum(_low_rank(config, shape) for shape in bucket.shapes)
    return [("all-to-all", 4.0 * numbers), ("all-gather", 4.0 * numbers)]


def _low_rank(config: RunConfig, shape: ParameterShape) -> int:
    """Numbers that stand for a tensor's gradient in powersgd, or all of them where that is not less."""
    size = local_size(shape, config)
    if len(shape.shape) < 2:
        return size
    rank, columns = config.data_parallel.powersgd_rank, shape.shape[-1]
    rows = shape.shape[-2]
    split = shape.shard_dim
    if split == len(shape.shape) - 1:
        columns //= config.parallel.tp
    elif split == len(shape.shape) - 2:
        rows //= config.parallel.tp
    matrices = size // (rows * columns)
    low = rank * (rows + columns)
    return matrices * low if 2 * low < rows * columns else size


def is_partial(shape: ParameterShape, config: RunConfig) -> bool:
    """Each tp rank has a part of the parameter's gradient although it holds the whole parameter."""
    always = ("router.weight", "q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias")
    if shape.name.endswith(always):
        return config.parallel.tp > 1
    in_sequence_region = "norm." in shape.name or shape.name.endswith(("out.bias", "down.bias"))
    return config.parallel.sequence_parallel and in_sequence_region
