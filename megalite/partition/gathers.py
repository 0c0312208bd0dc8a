"""Memory and gather counts of sharded parameters and gradients."""

import itertools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megalite.config.run import RunConfig
from megalite.models.shapes import layer_shapes, needs_copy
from megalite.partition.activations import ELEMENT_BYTES
from megalite.partition.buckets import PlannedBucket, all_replicas, local_size, planned_buckets
from megalite.partition.pipeline import schedule_of
from megalite.partition.stages import StagePlan, shapes_of, shares_embedding
from megalite.pipeline.ir.schedule import COMPUTE, Kind

WORD = "embedding.word.weight"

Unit = tuple[PlannedBucket, ...]  # the buckets that one module needs


class Pass(NamedTuple):
    """A computation that reads the weights of a stage, in forward or backward order."""

    stage: int
    backward: bool


class RankUnits:
    """fully-sharded: the buckets of a rank's stages, and the units in which they are gathered."""

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
    """Return the most bytes of gathered parameters on a rank with these stages: of two consecutive units, or of one
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
    """Return the most bytes of gradients being computed or reduced on a rank with these stages, beside the shards that
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
