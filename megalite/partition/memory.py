"""Bytes of one rank: parameters, gradients, optimizer state, activations, and what is unsharded for a while.

What fragments, kernels' workspaces and communication buffers take comes on top and is not estimated.
"""

import dataclasses
import itertools
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.config.run import RunConfig
from megalite.models.shapes import ParameterShape, needs_copy
from megalite.partition.activations import ELEMENT_BYTES, recompute_workspace_bytes, stage_sizes
from megalite.partition.buckets import PlannedBucket, element_bytes, local_size, planned_buckets
from megalite.partition.pipeline import layout_of, plan_stages
from megalite.partition.stages import StagePlan, shapes_of, shapes_of_rank, shares_embedding
from megalite.pipeline.ir.memory import memory_peaks
from megalite.pipeline.ir.schedule import Program, Schedule
from megalite.topology.layout import ParallelLayout, ShardSpec

WORD = "embedding.word.weight"


def units_of(config: RunConfig, buckets: Sequence[PlannedBucket]) -> list[list[PlannedBucket]]:
    """fully-sharded: what each module needs, in the order of the forward; of a tied embedding both ends need it."""
    units: dict[str, list[PlannedBucket]] = {}
    for bucket in reversed(buckets):
        units.setdefault(bucket.unit, []).append(bucket)
    if config.model.tie_embeddings:
        units["head"] += [bucket for bucket in buckets if WORD in bucket.names]
    return [[bucket for bucket in unit if bucket.replicas > 1] for unit in units.values()]


def gather_counts(
    config: RunConfig, units: Sequence[Sequence[PlannedBucket]], num_microbatches: int
) -> Mapping[PlannedBucket, int]:
    """How often each bucket is gathered in a step: what is whole still from the unit before is not gathered again."""
    found: Counter[PlannedBucket] = Counter()
    whole: set[PlannedBucket] = set()
    last = len(units) - 1
    way = [*range(last + 1), *range(last, -1, -1)]
    ahead = [*range(1, last + 1), None, *range(last - 1, -1, -1), None]
    for microbatch in range(min(2, num_microbatches)):  # the others are as the second
        for now, following in zip(way, ahead, strict=True):
            wanted = set(units[now])
            if following is not None and config.parallel.overlap_param_gather:
                wanted.update(units[following])
            for bucket in wanted - whole:
                found[bucket] += 1 if microbatch == 0 else num_microbatches - 1
            whole = wanted
    return found


def whole_bytes(config: RunConfig, plan: StagePlan, stages: tuple[StagePlan, ...]) -> int:
    """At the most, beside the parts that a rank keeps: gathered parameters, and gradients that come in or are sent."""
    parameters = config.parallel.strategy.shards_parameters
    if not parameters and not config.data_parallel.shard_gradients:
        return 0
    buckets = planned_buckets(config, plan, stages)
    gathered = _largest(config, units_of(config, buckets)) if parameters else 0
    width = ELEMENT_BYTES[config.training.precision]
    return gathered * width + _coming_in(config, plan, buckets) * max(4, width)


def _largest(config: RunConfig, units: Sequence[Sequence[PlannedBucket]]) -> int:
    """Elements of two units that follow one another, or of one where none is gathered ahead."""
    together = [set(unit) for unit in units]
    if config.parallel.overlap_param_gather:
        together = [first | second for first, second in itertools.pairwise(together)] or together
    return max(sum(bucket.elements for bucket in unit) for unit in together)


def _coming_in(config: RunConfig, plan: StagePlan, buckets: Sequence[PlannedBucket]) -> int:
    """Elements of gradients, if each bucket is on its way until others need the room."""
    names = [shape.name for shape in reversed(shapes_of(config, plan))]
    if needs_copy(config.model) and plan.has_head and plan.has_embedding:
        names.insert(0, WORD)
    bucket_of = {name: bucket for bucket in buckets if bucket.replicas > 1 for name in bucket.names}
    names = [name for name in names if name in bucket_of]
    missing = Counter(bucket_of[name] for name in names)
    room = max((bucket.elements * 5 // 4 for bucket in buckets if bucket.replicas > 1), default=0)
    open_now: set[PlannedBucket] = set()
    sending: deque[PlannedBucket] = deque()
    peak = 0
    for name in names:
        bucket = bucket_of[name]
        open_now.add(bucket)
        # It gets its memory before any that is on its way gives up its own.
        peak = max(peak, sum(other.elements for other in (*open_now, *sending)))
        missing[bucket] -= 1
        if not missing[bucket]:
            open_now.remove(bucket)
            while sending and sum(other.elements for other in sending) + bucket.elements > room:
                sending.popleft()
            if config.parallel.overlap_grad_reduce:
                sending.append(bucket)
    return peak


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank, by what holds them."""

    parameters: int
    """Elements, not bytes: what this rank holds after tensor, pipeline and expert parallelism."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """Moments and, below fp32, the fp32 main parameters."""
    activation_bytes: int
    """Of all microbatches in flight at the peak."""
    workspace_bytes: int
    """What recomputation brings back at once in the backward, and what is whole for a while of sharded parameters and
    gradients."""

    @property
    def total_bytes(self) -> int:
        """The sum of the parts."""
        held = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return held + self.activation_bytes + self.workspace_bytes


def activation_peaks(config: RunConfig, stages: tuple[StagePlan, ...], schedule: Schedule) -> list[int]:
    """Per pipeline rank, the most bytes that activations (and what a W waits for) take; messages and workspace not counted."""
    sizes = dataclasses.replace(stage_sizes(config, stages), message=0.0, workspace=None)
    # Without messages the computations alone decide, and they need no lowering.
    peaks = memory_peaks(Program(schedule, schedule.actions), sizes)
    return [round(peak.size) for peak in peaks]


def rank_memory(config: RunConfig, stages: Sequence[StagePlan], activation_bytes: int) -> RankMemory:
    """Memory of a rank that holds `stages`.

    With the distributed optimizer its state is divided by dp·cp (for experts by their own data-parallel size), which
    gives the usual 6 + 12/dp bytes a parameter in bf16. With a parameter server it is the server's. `activation_bytes`:
    at the peak of the schedule (`activation_peaks`).
    """
    p = config.parallel
    assert p.dp is not None, "validate() resolves dp"
    dense, expert = p.dp * p.cp, p.tp * p.cp * p.dp // (p.expert_tp * p.ep)
    everywhere = plan_stages(config)
    parameters, parameter, gradient, optimizer = 0, 0.0, 0.0, 0.0
    for shape in shapes_of_rank(config, list(stages)):
        count = local_size(shape, config)
        each = element_bytes(config, shape, expert if shape.expert else dense)
        parameters += count
        parameter += each.parameter * count
        gradient += each.gradient * count
        optimizer += each.optimizer * count
    return RankMemory(
        parameters=parameters,
        parameter_bytes=math.ceil(parameter),
        gradient_bytes=math.ceil(gradient),
        optimizer_bytes=math.ceil(optimizer),
        activation_bytes=activation_bytes,
        workspace_bytes=max(
            recompute_workspace_bytes(config, plan) + whole_bytes(config, plan, everywhere) for plan in stages
        ),
    )


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
    """Every parameter of a global rank, by stage and in the order of the forward."""
    layout, stages = layout_of(config), plan_stages(config)
    element = ELEMENT_BYTES[config.training.precision]
    found = []
    for plan in stages_of_rank(config, rank):
        again = plan.has_head and not plan.has_embedding and shares_embedding(stages)
        for shape in shapes_of(config, plan):
            if not (again and shape.name == WORD):  # else it is the first stage's, on this same rank
                spec = local_spec(layout, rank, shape)
                found.append(HeldParameter(stage=plan.stage, spec=spec, bytes=element * math.prod(spec.shape)))
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
    """
    layout, stages = layout_of(config), plan_stages(config)
    served = config.parallel.strategy.served
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
