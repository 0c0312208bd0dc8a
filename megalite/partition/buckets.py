"""The buckets that strategies make of a stage's parameters, and the bytes per element."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from megalite.config.optimizer import HOST_PIECE, HOST_SLOTS, OPTIMIZERS, SQUARES, deal, matrix_sides, state_formats
from megalite.config.run import RunConfig, cache_by_object, cache_by_reading
from megalite.data_parallel.facts import (
    BucketKind,
    bucket_size,
    choose_offloaded,
    cut_into_buckets,
    padded,
    state_elements,
    strategy_states,
    wire_width,
)
from megalite.models.shapes import (
    WORD,
    ParameterShape,
    bucket_traits,
    check_lr_multipliers,
    is_hidden_matrix,
    needs_copy,
)
from megalite.partition.activations import ELEMENT_BYTES
from megalite.partition.stages import StagePlan, shapes_of, shapes_of_rank, shares_embedding


def local_shape(shape: ParameterShape, config: RunConfig) -> tuple[int, ...]:
    """Return the shape of a parameter on one rank."""
    p, sizes = config.parallel, list(shape.shape)
    if shape.expert:
        sizes[0] //= p.ep
    if shape.shard_dim is not None:
        sizes[shape.shard_dim] //= p.expert_tp if shape.expert else p.tp
    return tuple(sizes)


def local_size(shape: ParameterShape, config: RunConfig) -> int:
    """Return the elements of a parameter on one rank."""
    return math.prod(local_shape(shape, config))


class ElementBytes(NamedTuple):
    """Bytes of one element on the data-parallel rank that stores most."""

    parameter: float
    gradient: float
    optimizer: float  # separate main parameters, states of the optimizer and of the strategy
    offloadable: float  # the part of `optimizer` that can be in host memory


def all_replicas(config: RunConfig) -> tuple[int, int]:
    """Return the ranks with the same part of a dense parameter, and of an expert's, over all instances."""
    p = config.parallel
    assert p.dp is not None, "validate() resolves dp"
    return p.dp * p.cp, p.tp * p.cp * p.dp // (p.expert_tp * p.ep)


def element_bytes(config: RunConfig, shape: ParameterShape, replicas: int) -> ElementBytes:
    """Return the bytes per element of a tensor, if `replicas` ranks of one instance store the same part."""
    return bytes_of_class(config, is_hidden_matrix(shape.name, shape.shape, decay=shape.decay), replicas)


@cache_by_object()
def bytes_of_class(config: RunConfig, matrix: bool, replicas: int) -> ElementBytes:
    """Return `element_bytes` of a hidden matrix, or of any other tensor."""
    element = ELEMENT_BYTES[config.training.precision]
    main = max(4, element)
    strategy = config.parallel.strategy
    whole = strategy.shards_parameters
    parts = replicas if strategy.shards_states else 1
    gradient_parts = replicas if whole or config.data_parallel.shard_gradients else 1
    apart = {"fp32": main, "split": 2}[config.optimizer.main_params] if element < main else 0
    offloadable = (apart + sum(_moment_widths(config, matrix))) / parts
    return ElementBytes(
        parameter=element / (replicas if whole else 1),
        gradient=main / gradient_parts,
        optimizer=offloadable + strategy_bytes(config, replicas),
        offloadable=offloadable,
    )


def moment_widths(config: RunConfig, shape: ParameterShape) -> tuple[int, ...]:
    """Return the unsharded bytes per element of each optimizer state."""
    return _moment_widths(config, is_hidden_matrix(shape.name, shape.shape, decay=shape.decay))


def _moment_widths(config: RunConfig, matrix: bool) -> tuple[int, ...]:
    main = max(4, ELEMENT_BYTES[config.training.precision])
    hidden = matrix and OPTIMIZERS.facts(config.optimizer.optimizer).separate_matrices
    formats = state_formats(config.optimizer, hidden_matrix=hidden)
    return tuple(2 if kind == "bf16" else main for kind in formats.values())


def strategy_bytes(config: RunConfig, replicas: int) -> float:
    """Return the bytes per element of the strategy's states: compression errors, anchors, an outer momentum."""
    if replicas == 1:
        return 0.0
    main = max(4, ELEMENT_BYTES[config.training.precision])
    if config.parallel.strategy.weights == "stale":
        # The server's parameters are separate from its own worker's, and it holds one push of each worker.
        copied = main if ELEMENT_BYTES[config.training.precision] == main else 0
        return copied + replicas * wire_width(config)
    return main * state_elements(strategy_states(config), replicas)


@dataclass(frozen=True, eq=False)
class PlannedBucket:
    """A bucket of one stage."""

    group: str  # group of its replicas: dp-cp or expert-dp; within an instance intra-dp-cp or intra-expert-dp
    replicas: int  # size of the group
    partial: bool  # each tp rank has a partial sum of the gradient
    tied: bool
    elements: int
    shapes: tuple[ParameterShape, ...]
    unit: str = ""  # with sharded parameters: the module that it belongs to
    fp8: bool = False  # gathered in fp8

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its parameters."""
        return tuple(shape.name for shape in self.shapes)


@cache_by_reading
def planned_buckets(config: RunConfig, plan: StagePlan, stages: tuple[StagePlan, ...]) -> tuple[PlannedBucket, ...]:
    """Return the buckets that `data_parallel.buckets.make_buckets` makes of a stage for the run's strategy."""
    check_lr_multipliers(config.model, config.optimizer)
    shapes = list(shapes_of(config, plan))
    has_copy = needs_copy(config.model) and len(stages) > 1
    if has_copy and plan.has_head and shares_embedding(stages):
        # The first stage owns it.
        shapes = [shape for shape in shapes if shape.name != WORD]
    # A module lists its own parameters first: in the head the output matrix comes before norms and layers.
    first = next((at for at, shape in enumerate(shapes) if _unit(config, plan, shape.name) == "head"), len(shapes))
    shapes[first:] = sorted(shapes[first:], key=lambda shape: shape.name != "head.weight")
    if not config.parallel.strategy.shards_parameters:
        return tuple(_cut(config, shapes, has_copy=has_copy))
    units: dict[str, list[ParameterShape]] = {}
    for shape in shapes:
        units.setdefault(_unit(config, plan, shape.name), []).append(shape)
    return tuple(
        bucket
        for unit, members in reversed(units.items())
        for bucket in _cut(config, members, has_copy=has_copy, unit=unit)
    )


def _unit(config: RunConfig, plan: StagePlan, name: str) -> str:
    """Return the module that a parameter is gathered with; MTP layers and an embedding copy belong to the head."""
    first, second, *_ = name.split(".")
    if first == "layers" and int(second) < config.model.num_layers:
        return f"layers.{second}"
    return first if first == "embedding" and plan.has_embedding else "head"


def _cut(config: RunConfig, shapes: list[ParameterShape], *, has_copy: bool, unit: str = "") -> list[PlannedBucket]:
    p = config.parallel
    dense, expert = all_replicas(config)
    by_number = p.fp8_param_gather or config.optimizer.lr_multipliers
    known: dict[tuple[object, ...], tuple[BucketKind, int]] = {}

    def facts(shape: ParameterShape) -> tuple[BucketKind, int]:
        # Layers differ only in their number, which only two settings use.
        name = shape.name if by_number or not shape.name.startswith("layers.") else shape.name.split(".", 2)[2]
        key = (name, shape.shape, shape.shard_dim, shape.decay, shape.expert)
        if key not in known:
            known[key] = _bucket_kind(config, shape, has_copy), local_size(shape, config)
        return known[key]

    found = []
    for kind, members in cut_into_buckets(
        shapes,
        kind=lambda shape: facts(shape)[0],
        size=lambda shape: facts(shape)[1],
        bucket_size=bucket_size(config, dense),
    ):
        everywhere = expert if kind.expert else dense
        found.append(
            PlannedBucket(
                group=("intra-" if p.instances > 1 else "") + ("expert-dp" if kind.expert else "dp-cp"),
                replicas=everywhere // p.instances,
                partial=kind.partial_over_tp,
                tied=kind.tied,
                elements=padded(sum(facts(shape)[1] for shape in members), everywhere),
                shapes=tuple(members),
                unit=unit,
                fp8=kind.fp8,
            )
        )
    return found


def _bucket_kind(config: RunConfig, shape: ParameterShape, has_copy: bool) -> BucketKind:
    name, split = shape.name, shape.shard_dim
    return BucketKind(
        decay=shape.decay,
        split_over_tp=split is not None,
        partial_over_tp=is_partial(shape, config),
        tied=has_copy and name == WORD,
        expert=shape.expert,
        **bucket_traits(
            *(name, shape.shape), decay=shape.decay, shard_dim=split, expert=shape.expert, config=config
        )._asdict(),
    )


@cache_by_object()
def held_elements(config: RunConfig, stages: tuple[StagePlan, ...]) -> Mapping[tuple[bool, bool], int]:
    """Return (is an expert's, is a hidden matrix) -> elements on a pipeline rank with these stages."""
    found: Counter[tuple[bool, bool]] = Counter()
    for shape in shapes_of_rank(config, list(stages)):
        matrix = is_hidden_matrix(shape.name, shape.shape, decay=shape.decay)
        found[shape.expert, matrix] += local_size(shape, config)
    return found


def offloaded(config: RunConfig, buckets: Sequence[PlannedBucket]) -> list[PlannedBucket]:
    """Return the buckets of a rank with main parameters and states in host memory, in order."""
    sharded = config.parallel.strategy.shards_states
    sizes = [bucket.elements // (bucket.replicas if sharded else 1) for bucket in buckets]
    return list(compress(buckets, choose_offloaded(sizes, config.optimizer.host_fraction)))


class PersistentBytes(NamedTuple):
    """Persistent memory of one rank."""

    parameters: int  # elements, not bytes
    parameter: float
    gradient: float
    optimizer: float  # on the device
    host: float


def persistent_bytes(
    config: RunConfig, stages: Sequence[StagePlan], buckets: Sequence[PlannedBucket]
) -> PersistentBytes:
    """Return weights, gradients and optimizer states of a rank with these stages and buckets."""
    dense, expert = (count // config.parallel.instances for count in all_replicas(config))
    parameters, parameter, gradient, optimizer, host = 0, 0.0, 0.0, 0.0, 0.0
    squares = max(matrix_bytes(config, stages))
    for (of_expert, matrix), count in held_elements(config, tuple(stages)).items():
        each = bytes_of_class(config, matrix, expert if of_expert else dense)
        parameters += count
        parameter += each.parameter * count
        gradient += each.gradient * count
        optimizer += each.optimizer * count
    for bucket in offloaded(config, buckets):
        each = element_bytes(config, bucket.shapes[0], bucket.replicas)
        host += each.offloadable * sum(local_size(shape, config) for shape in bucket.shapes)
    on_host = squares if config.optimizer.optimizer_cpu_offload else 0
    return PersistentBytes(parameters, parameter, gradient, optimizer - host + squares - on_host, host + on_host)


def matrix_bytes(config: RunConfig, stages: Sequence[StagePlan]) -> list[int]:
    """Return the bytes of matrix states on each rank of the group `matrix_ranks`."""
    return [sum(square_bytes(config, *shape.shape[-2:]) for shape in own) for own in matrices_of_ranks(config, stages)]


def matrices_of_ranks(config: RunConfig, stages: Sequence[StagePlan]) -> list[list[ParameterShape]]:
    """Return the tensors of the matrices that each rank of the group `matrix_ranks` works on."""
    p, apart = config.parallel, OPTIMIZERS.facts(config.optimizer.optimizer).separate_matrices
    found: list[list[ParameterShape]] = [[]] * (
        p.tp if matrix_ranks(config) == "tp" else p.tp * all_replicas(config)[0]
    )
    tensors = {
        (shape.name, number): shape
        for shape in shapes_of_rank(config, list(stages))
        if apart and is_hidden_matrix(shape.name, shape.shape, decay=shape.decay)
        for number in range(math.prod(shape.shape[:-2]))
    }
    matrices = {key: (shape.shape[-2], shape.shape[-1]) for key, shape in tensors.items()}
    for key, rank in deal(config.optimizer, matrices, len(found)).items():
        found[rank] = [*found[rank], tensors[key]]
    return found


def matrix_ranks(config: RunConfig) -> str:
    """Return the group that shares the work on whole matrices; replicas with different weights each do all of it."""
    return "tp-dp-cp" if config.parallel.strategy.weights == "equal" else "tp"


def square_bytes(config: RunConfig, rows: int, columns: int) -> int:
    """Return the bytes of the states of one matrix."""
    main = max(4, ELEMENT_BYTES[config.training.precision])
    return main * len(SQUARES) * sum(n**2 for n in matrix_sides(config.optimizer, rows, columns).values())


def staging_bytes(config: RunConfig, buckets: Sequence[PlannedBucket]) -> int:
    """Return the device bytes of the slots for pieces of offloaded states."""
    largest = 0.0
    for bucket in offloaded(config, buckets):
        each = element_bytes(config, bucket.shapes[0], bucket.replicas).offloadable
        parts = bucket.replicas if config.parallel.strategy.shards_states else 1
        largest = max(largest, min(HOST_PIECE, bucket.elements // parts) * each * parts)
    return round(HOST_SLOTS * largest)


def is_partial(shape: ParameterShape, config: RunConfig) -> bool:
    """Return whether each tp rank has a partial sum of the gradient of a parameter that it stores whole."""
    heads = ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias", "attention.norm.weight")
    if shape.shard_dim is not None or shape.expert:
        return False
    if shape.name.endswith(("router.weight", "router.linear_bias", *heads)):
        return config.parallel.tp > 1
    in_region = ("out.bias", "down.bias", "q_down.weight", "kv_down.weight", "projection.weight")
    in_sequence_region = any(part in shape.name for part in ("norm.", ".indexer.")) or shape.name.endswith(in_region)
    return config.parallel.sequence_parallel and in_sequence_region
