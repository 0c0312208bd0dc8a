"""Memory of one rank: parameters, gradients, optimizer states, activations, temporarily unsharded tensors.

Fragmentation, kernel workspaces and communication buffers come on top and are not estimated."""

import dataclasses
import itertools
import math
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.config.batch import microbatch_counts
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.numbers import format_bytes
from megalite.config.run import RunConfig, cache_by_object, cache_by_reading
from megalite.models.shapes import WORD, ParameterShape, layer_shapes, map_by_kind, needs_copy
from megalite.partition.activations import (
    ELEMENT_BYTES,
    offloaded_activation_bytes,
    recompute_workspace_bytes,
    stage_sizes,
)
from megalite.partition.buckets import (
    PersistentBytes,
    PlannedBucket,
    all_replicas,
    element_bytes,
    local_size,
    matrix_bytes,
    matrix_ranks,
    offloaded,
    persistent_bytes,
    planned_buckets,
    staging_bytes,
)
from megalite.partition.pipeline import layout_of, plan_stages, schedule_of
from megalite.partition.stages import StagePlan, cut_stages, kind_of_stage, shapes_of, shares_embedding
from megalite.pipeline.ir.generators import loop_placement, v_placement
from megalite.pipeline.ir.memory import Sizes, memory_peaks
from megalite.pipeline.ir.schedule import COMPUTE, Kind, Program, Schedule
from megalite.topology.layout import ParallelLayout, ShardSpec


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank, by kind."""

    parameters: int  # elements, not bytes: after tensor, pipeline and expert parallelism
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int  # moments and, below fp32, the fp32 main parameters
    # Restored activations, temporarily unsharded parameters and gradients, fp8 weights, and slots for offloaded states.
    workspace_bytes: int
    activation_bytes: int = 0  # of all microbatches in flight at the peak
    # Offloaded main parameters, optimizer states and activations; not in the total, which counts the device.
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of the parts."""
        held = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return held + self.activation_bytes + self.workspace_bytes


def activation_peaks(config: RunConfig, stages: tuple[StagePlan, ...], schedule: Schedule) -> list[int]:
    """Return the peak activation bytes per pipeline rank, with what W needs but without messages and workspace."""
    sizes = dataclasses.replace(stage_sizes(config, stages), message=0.0, workspace=None)
    return [round(size) for size in _peaks(schedule, sizes)]


@cache_by_object(maxsize=32)
def _peaks(schedule: Schedule, sizes: Sizes) -> list[float]:
    # Without messages only the computations count, so no lowering is needed.
    return [peak.size for peak in memory_peaks(Program(schedule, schedule.actions), sizes)]


def host_peaks(config: RunConfig, stages: tuple[StagePlan, ...], schedule: Schedule) -> list[int]:
    """Return the peak bytes of offloaded activations in host memory, per pipeline rank."""
    none = (0.0,) * len(stages)
    offloaded = tuple(float(offloaded_activation_bytes(config, plan)) for plan in stages)
    if not any(offloaded):
        return [0] * config.parallel.pp
    sizes = Sizes(activation=offloaded, deferred=none, kept_input=none)
    return [round(size) for size in _peaks(schedule, sizes)]


def rank_memory(
    config: RunConfig, stages: Sequence[StagePlan], *, everywhere: tuple[StagePlan, ...] | None = None
) -> RankMemory:
    """Return the memory of the rank with `stages`, without activations, which `planned_memory` adds.

    The distributed optimizer divides its states by dp·cp (for experts by their data-parallel size, with several
    instances by the ranks of one): the usual 6 + 12/dp bytes per parameter in bf16. With a parameter server this is the
    server's memory.

    `everywhere`: the stages of all ranks; default: as the schedule places them."""
    held, whole = _persistent_and_temporary(config, tuple(stages), everywhere or plan_stages(config))
    return RankMemory(
        parameters=held.parameters,
        parameter_bytes=math.ceil(held.parameter),
        gradient_bytes=math.ceil(held.gradient),
        optimizer_bytes=math.ceil(held.optimizer),
        workspace_bytes=whole + max(recompute_workspace_bytes(config, plan) for plan in stages),
        host_bytes=math.ceil(held.host),
    )


@cache_by_reading
def _persistent_and_temporary(
    config: RunConfig, stages: tuple[StagePlan, ...], everywhere: tuple[StagePlan, ...]
) -> tuple[PersistentBytes, int]:
    """Return one rank's persistent memory, and its temporarily unsharded, fp8 and staging bytes."""
    buckets = [bucket for plan in stages for bucket in planned_buckets(config, plan, everywhere)]
    whole = whole_parameter_bytes(config, stages, everywhere) + whole_gradient_bytes(config, stages, everywhere)
    whole += fp8_weight_bytes(config, stages) + staging_bytes(config, buckets)
    return persistent_bytes(config, stages, buckets), whole


def planned_memory(config: RunConfig, schedule: Schedule | None = None) -> list[RankMemory]:
    """Return the memory of each pipeline rank; default: with the schedule of the largest batch."""
    stages = plan_stages(config)
    schedule = schedule or schedule_of(config, microbatch_counts(config)[-1])
    of_rank = [[plan for plan in stages if plan.rank == rank] for rank in range(config.parallel.pp)]

    def kind(own: list[StagePlan]) -> Hashable:
        return tuple(kind_of_stage(config, plan) for plan in own)

    return [
        dataclasses.replace(held, activation_bytes=peak, host_bytes=held.host_bytes + host)
        for held, peak, host in zip(
            map_by_kind(of_rank, kind, lambda own: rank_memory(config, own)),
            activation_peaks(config, stages, schedule),
            host_peaks(config, stages, schedule),
            strict=True,
        )
    ]


USUAL_MEMORY = 0.9  # of the device memory: allocator, kernels and communication need the rest


def is_built_without_limit(config: RunConfig) -> bool:
    """Return whether the schedule is `auto` without a memory limit."""
    return config.parallel.pipeline_schedule == "auto" and config.parallel.pipeline_memory_limit is None


def within_memory(config: RunConfig, limit: float) -> RunConfig:
    """Return a validated config, with a memory limit if its `auto` has none and it needs more than `limit` bytes:
    the bytes left for activations on the fullest rank. Raises ConfigError: nothing is left."""
    if not is_built_without_limit(config) or max(rank.total_bytes for rank in planned_memory(config)) <= limit:
        return config
    p, most = config.parallel, 0
    for placement in (loop_placement(p.pp, p.vpp), *([v_placement(p.pp)] if p.vpp == 2 else [])):
        stages = cut_stages(config, placement)
        for rank in range(p.pp):
            own = [plan for plan in stages if plan.rank == rank]
            most = max(most, rank_memory(config, own, everywhere=stages).total_bytes)
    if most >= limit:
        raise ConfigError(
            f"needs {format_bytes(most)} per rank without activations, over {format_bytes(limit)}: no schedule that auto "
            f"builds fits; use more ranks, or shard more, e.g. --dp-strategy fully-sharded"
        )
    return replace(config, pipeline_memory_limit=f"{math.floor(limit - most) or 1}B")


@dataclass(frozen=True, kw_only=True)
class HeldParameter:
    """One parameter of a rank."""

    stage: int
    spec: ShardSpec  # name, global shape and this rank's slice
    bytes: int  # of the slice in the model's precision; with fully-sharded each replica stores a shard of it


@dataclass(frozen=True, kw_only=True)
class HeldBucket:
    """One bucket of a rank and its persistent bytes, padding included."""

    stage: int
    bucket: PlannedBucket
    place: int  # index of this rank among the replicas
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int  # separate main parameters, states of the optimizer and of the strategy
    host_bytes: int  # the offloaded part of them


def stages_of_rank(config: RunConfig, rank: int) -> list[StagePlan]:
    """Return the virtual stages of a global rank, in order: its chunks 0, 1, ..."""
    place = layout_of(config).coordinate(rank).pp
    return [plan for plan in plan_stages(config) if plan.rank == place]


def held_parameters(config: RunConfig, rank: int) -> list[HeldParameter]:
    """Return every parameter of a global rank, by stage and in forward order."""
    layout, stages = layout_of(config), plan_stages(config)
    element = ELEMENT_BYTES[config.training.precision]
    found = []
    for plan in stages_of_rank(config, rank):
        again = plan.has_head and not plan.has_embedding and shares_embedding(stages)
        for shape in shapes_of(config, plan):
            if not (again and shape.name == WORD):  # otherwise the first stage, on this rank, owns it
                spec = local_spec(layout, rank, shape)
                found.append(HeldParameter(stage=plan.stage, spec=spec, bytes=element * math.prod(spec.shape)))
    return found


def local_spec(layout: ParallelLayout, rank: int, shape: ParameterShape) -> ShardSpec:
    """Return a rank's slice of a parameter: an expert's by ep (and expert tp), others by tp."""
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
    """Return every bucket of a global rank, by stage and in the order of their gradients.

    A parameter server's main parameters and optimizer states are on the first replica only; its pending pushes are
    counted as in `element_bytes`."""
    layout, stages = layout_of(config), plan_stages(config)
    served = config.parallel.strategy.served
    found = []
    planned = {plan.stage: planned_buckets(config, plan, stages) for plan in stages_of_rank(config, rank)}
    gone = set(offloaded(config, [bucket for buckets in planned.values() for bucket in buckets]))
    for stage, buckets in planned.items():
        for bucket in buckets:
            place, _ = _place(layout, bucket.group, rank)
            each = element_bytes(config, bucket.shapes[0], bucket.replicas)
            works_only = served and place > 0
            host = each.offloadable if bucket in gone else 0.0
            found.append(
                HeldBucket(
                    stage=stage,
                    bucket=bucket,
                    place=place,
                    parameter_bytes=round(each.parameter * bucket.elements),
                    gradient_bytes=round(each.gradient * bucket.elements),
                    optimizer_bytes=0 if works_only else round((each.optimizer - host) * bucket.elements),
                    host_bytes=0 if works_only else round(host * bucket.elements),
                )
            )
    return found


def held_matrix_bytes(config: RunConfig, rank: int) -> int:
    """Return the bytes of the matrix states that a global rank works on."""
    place, _ = _place(layout_of(config), matrix_ranks(config), rank)
    return matrix_bytes(config, stages_of_rank(config, rank))[place]


def _place(layout: ParallelLayout, kind: str, rank: int) -> tuple[int, int]:
    """Return (index, size) of a rank in its group of this kind."""
    ranks = layout.group_of(kind, rank)
    assert ranks is not None, kind
    return ranks.index(rank), len(ranks)


Unit = tuple[PlannedBucket, ...]  # the buckets that one module needs


class Pass(NamedTuple):
    """A computation that reads the weights of a stage, in forward or backward order."""

    stage: int
    backward: bool


class RankUnits:
    """fully-sharded: the buckets of each rank's stages, and the units in which they are gathered."""

    def __init__(self, config: RunConfig, plans: Sequence[StagePlan], stages: tuple[StagePlan, ...]) -> None:
        self.buckets = {plan.stage: planned_buckets(config, plan, stages) for plan in plans}
        self.units: dict[int, list[Unit]] = {}
        word = [bucket for own in self.buckets.values() for bucket in own if WORD in bucket.names]
        for plan in plans:
            units: dict[str, list[PlannedBucket]] = {}
            for bucket in reversed(self.buckets[plan.stage]):
                units.setdefault(bucket.unit, []).append(bucket)
            both_ends = plan.has_embedding or shares_embedding(stages)
            if plan.has_head and needs_copy(config.model) and both_ends:
                units["head"] += word[:1]
            found = (tuple(bucket for bucket in unit if bucket.replicas > 1) for unit in units.values())
            self.units[plan.stage] = list(found)

    def path(self, of: Pass) -> list[Unit]:
        """Return the units of a computation, in its order."""
        return self.units[of.stage][:: -1 if of.backward else 1]


def gather_counts(
    config: RunConfig, rank: int, stages: tuple[StagePlan, ...], num_microbatches: int
) -> Mapping[int, Sequence[int]]:
    """Return stage -> gathers per step of each of its buckets, on a pipeline rank. Buckets still whole from the
    previous unit are not gathered again."""
    held = RankUnits(config, [plan for plan in stages if plan.rank == rank], stages)
    overlap = config.parallel.overlap_param_gather
    actions = schedule_of(config, num_microbatches).actions[rank]
    passes = [
        Pass(action.stage, action.kind not in (Kind.F, Kind.R))
        for action in actions
        if action.kind in COMPUTE and action.kind is not Kind.W
    ]
    found: Counter[PlannedBucket] = Counter()
    for (before, now, after), times in Counter(zip([None, *passes], passes, [*passes[1:], None])).items():
        path = held.path(now)
        whole = set() if before is None else {*held.path(before)[-1], *(path[0] if overlap else ())}
        behind = () if after is None else held.path(after)[0]
        for unit, following in zip(path, [*path[1:], behind], strict=True):
            wanted = {*unit, *(following if overlap else ())}
            for bucket in wanted - whole:
                found[bucket] += times
            whole = wanted
    return {stage: [found[bucket] for bucket in buckets] for stage, buckets in held.buckets.items()}


def whole_parameter_bytes(config: RunConfig, plans: Sequence[StagePlan], stages: tuple[StagePlan, ...]) -> int:
    """Return the most bytes of gathered parameters per rank with these stages: of two consecutive units, or of one
    without overlap_param_gather. In a pipeline any pass may follow any other."""
    if not config.parallel.strategy.shards_parameters:
        return 0
    held = RankUnits(config, plans, stages)
    together = [set(unit) for units in held.units.values() for unit in units]
    if config.parallel.overlap_param_gather:
        pairs = [pair for units in held.units.values() for pair in itertools.pairwise(units)]
        if _in_pipeline(config, stages):
            passes = [Pass(stage, backward) for stage in held.units for backward in (False, True)]
            pairs += [(held.path(a)[-1], held.path(b)[0]) for a in passes for b in passes]
        together += [{*first, *second} for first, second in pairs]
    width = ELEMENT_BYTES[config.training.precision]
    return width * max(sum(bucket.elements for bucket in unit) for unit in together)


def fp8_weight_bytes(config: RunConfig, plans: Sequence[StagePlan]) -> int:
    """Return the bytes of the additional fp8 weights: those of all layers but the first and the last."""
    inner = range(1, config.model.num_layers - 1)
    indices = (index for plan in plans for index in range(plan.first_layer, plan.last_layer))
    return sum(fp8_layer_bytes(config, index) for index in indices if index in inner)


def fp8_layer_bytes(config: RunConfig, index: int) -> int:
    """Return the fp8 bytes of an inner layer: weights and transpose; with fp8_param_gather also the bf16 shard."""
    if not config.compute.fp8 or config.parallel.strategy.shards_parameters:
        return 0
    shapes = layer_shapes(config.model, index)
    kept = (shape for shape in shapes if shape.shard_dim is not None and len(shape.shape) > 1 and not shape.expert)
    elements = sum(local_size(shape, config) for shape in kept)
    parts = all_replicas(config)[0] // config.parallel.instances
    return 2 * elements + (2 * elements // parts if config.parallel.fp8_param_gather else 0)


def whole_gradient_bytes(config: RunConfig, plans: Sequence[StagePlan], stages: tuple[StagePlan, ...]) -> int:
    """Return the most bytes of gradients being computed or reduced per rank with these stages, without the shards that
    it keeps. In a pipeline a backward of any stage may follow while gradients of the first are still being reduced."""
    if not (config.parallel.strategy.shards_parameters or config.data_parallel.shard_gradients):
        return 0
    backwards: list[list[PlannedBucket]] = []
    room = 0
    for plan in plans:
        buckets = [bucket for bucket in planned_buckets(config, plan, stages) if bucket.replicas > 1]
        names = [shape.name for shape in reversed(shapes_of(config, plan))]
        if needs_copy(config.model) and plan.has_head and plan.has_embedding:
            names.insert(0, WORD)
        bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
        backwards.append([bucket_of[name] for name in names if name in bucket_of])
        room = max([room, *(bucket.elements * 5 // 4 for bucket in buckets)])
    follow = itertools.product(backwards, repeat=2) if _in_pipeline(config, stages) else ((own,) for own in backwards)
    peak = max(_most_gradients(pair, room, sent_later=config.parallel.overlap_grad_reduce) for pair in follow)
    return peak * max(4, ELEMENT_BYTES[config.training.precision])


def _most_gradients(backwards: Sequence[Sequence[PlannedBucket]], room: int, *, sent_later: bool) -> int:
    """Return the most elements, if each bucket (listed once per gradient) is in flight until others need the room."""
    sending: deque[PlannedBucket] = deque()
    peak = sent = 0
    for backward in backwards:
        missing, open_now = Counter(backward), set[PlannedBucket]()
        opened = 0
        for bucket in backward:
            if bucket in sending:  # from the previous backward: its memory is reused
                while (first := sending.popleft()) is not bucket:
                    sent -= first.elements
                sent -= bucket.elements
            if bucket not in open_now:
                open_now.add(bucket)
                opened += bucket.elements
            # It is allocated before any bucket in flight is freed.
            peak = max(peak, opened + sent)
            missing[bucket] -= 1
            if not missing[bucket]:
                open_now.remove(bucket)
                opened -= bucket.elements
                while sending and sent + bucket.elements > room:
                    sent -= sending.popleft().elements
                if sent_later:
                    sending.append(bucket)
                    sent += bucket.elements
    return peak


def _in_pipeline(config: RunConfig, stages: tuple[StagePlan, ...]) -> bool:
    """Return whether any pass may follow any other; otherwise forwards and backwards alternate."""
    return len(stages) > 1 or config.parallel.schedule_name != "1f1b"
