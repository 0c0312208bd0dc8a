"""What ranks that keep parts of parameters and gradients have whole for a while: how often it is gathered, and its bytes.

A machine of data_parallel/fully_sharded.py and gradient_shards.py, run on sizes alone.
"""

import itertools
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from megalite.config.run import RunConfig
from megalite.models.shapes import stage_shapes
from megalite.planner.activations import ELEMENT_BYTES
from megalite.planner.buckets import PlannedBucket, planned_buckets
from megalite.planner.stages import StagePlan

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
    p, precision = config.parallel, config.training.precision
    parameters = p.dp_strategy == "fully-sharded"
    if not parameters and not config.data_parallel.shard_gradients:
        return 0
    buckets = planned_buckets(config, plan, stages)
    gathered = _largest(config, units_of(config, buckets)) if parameters else 0
    width = ELEMENT_BYTES[precision]
    return gathered * width + _coming_in(config, plan, buckets) * max(4, width)


def _largest(config: RunConfig, units: Sequence[Sequence[PlannedBucket]]) -> int:
    """Elements of two units that follow one another, or of one where none is gathered ahead."""
    together = [set(unit) for unit in units]
    if config.parallel.overlap_param_gather:
        together = [first | second for first, second in itertools.pairwise(together)] or together
    return max(sum(bucket.elements for bucket in unit) for unit in together)


def _coming_in(config: RunConfig, plan: StagePlan, buckets: Sequence[PlannedBucket]) -> int:
    """Elements of gradients, if each bucket is on its way until others need the room."""
    names = [
        shape.name
        for shape in stage_shapes(
            config.model, plan.first_layer, plan.last_layer, plan.has_embedding, plan.has_head
        )
    ]
    names.reverse()
    if config.model.tie_embeddings and plan.has_head and plan.has_embedding:
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
