"""What data-parallel ranks send each other in a step: buckets as the strategies cut them, and their collectives.

Of strategies that change with time it is the mean over steps (exchanges every so often) or the later phase (compressed).
Not counted: the sums of LAMB's norms, 16 bytes a tensor, and the matrices that Muon puts together.
"""

from collections.abc import Iterable, Iterator

from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.parallel import LOCAL_STRATEGIES
from megalite.config.run import RunConfig
from megalite.models.shapes import ParameterShape
from megalite.planner.activations import ELEMENT_BYTES
from megalite.planner.buckets import PlannedBucket, planned_buckets, wire_width
from megalite.planner.sharing import local_size
from megalite.planner.stages import StagePlan
from megalite.planner.states import moment_widths
from megalite.planner.whole import gather_counts, units_of

Volume = tuple[str, str, int]
"""Group, operation, bytes."""


def norm_terms(config: RunConfig) -> int:
    """Numbers that tell the gradient's norm, in the all-reduce that all ranks take part in."""
    strategy = config.parallel.dp_strategy
    if strategy in LOCAL_STRATEGIES:
        assert config.parallel.dp is not None
        return config.parallel.dp
    return 2 if strategy == "fused-all-reduce" or config.optimizer.optimizer in ONEBIT_OPTIMIZERS else 1


def time_basis(config: RunConfig) -> str:
    """What the replicas' exchanges of a step are of, where steps are not alike; else nothing."""
    p, d = config.parallel, config.data_parallel
    if p.dp_strategy in ("local-sgd", "diloco"):
        return f"mean over {d.sync_interval} steps"
    if config.optimizer.optimizer in ONEBIT_OPTIMIZERS:
        return "once frozen"
    if d.grad_compression != "none" and d.compression_warmup_steps:
        return f"after {d.compression_warmup_steps} steps"
    t = config.training
    several = (
        t.recompute_granularity == "full" and t.recompute_method == "uniform" and t.recompute_num_layers > 1
    )
    if p.dp_strategy == "fully-sharded" and several:
        return "about: layers recomputed together are gathered once more"
    return ""


def gradient_volumes(
    config: RunConfig, plan: StagePlan, stages: tuple[StagePlan, ...], num_microbatches: int
) -> Iterator[Volume]:
    """Of one stage in a step, on the data-parallel rank that sends most."""
    width = max(4, ELEMENT_BYTES[config.training.precision])
    buckets = planned_buckets(config, plan, stages)
    whole = config.parallel.dp_strategy == "fully-sharded"
    gathers = gather_counts(config, units_of(config, buckets), num_microbatches) if whole else {}
    for bucket in buckets:
        # Where gradients are sharded, what several ranks hold in parts is summed range by range.
        parts = bucket.replicas if whole or config.data_parallel.shard_gradients else 1
        if bucket.partial:
            yield "tp", "all-reduce", bucket.elements // parts * width
        if bucket.tied:
            yield "embedding", "all-reduce", bucket.elements // parts * width
        if bucket.replicas > 1:
            for operation, size in _exchanges(config, bucket, num_microbatches, gathers.get(bucket, 1)):
                yield bucket.group, operation, round(size)


def _exchanges(
    config: RunConfig, bucket: PlannedBucket, num_microbatches: int, gathers: int
) -> Iterable[tuple[str, float]]:
    """(operation, bytes) over the replicas of one bucket, which is gathered so many times."""
    p, d = config.parallel, config.data_parallel
    n, count = bucket.elements, bucket.replicas
    element = ELEMENT_BYTES[config.training.precision]
    wire, narrow = wire_width(config), d.wire_dtype == "bf16"
    in_parts = narrow or d.reduction_order == "rank"
    lossy = d.grad_compression != "none" and bucket.shapes[0].decay  # norms and biases travel whole
    if config.optimizer.optimizer in ONEBIT_OPTIMIZERS or lossy:
        return _compressed(config, bucket)
    if p.dp_strategy in ("all-reduce", "fused-all-reduce"):
        return (
            [("all-to-all", n * wire), ("all-gather", n * wire)] if in_parts else [("all-reduce", n * wire)]
        )
    if p.dp_strategy in ("distributed-optimizer", "fully-sharded"):
        sharded = d.shard_gradients or p.dp_strategy == "fully-sharded"
        pushes = num_microbatches if sharded else 1
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
    size = wire
    if d.average_optimizer_state:
        states = moment_widths(config, bucket.shapes[0])
        size += len(states) * wire if narrow else sum(states)
    return [("all-to-all", n * size / d.sync_interval), ("all-gather", n * size / d.sync_interval)]


def _compressed(config: RunConfig, bucket: PlannedBucket) -> Iterable[tuple[str, float]]:
    """Without the scales, which are a number a tensor or block."""
    d, n, count = config.data_parallel, bucket.elements, bucket.replicas
    kind = d.grad_compression if d.grad_compression != "none" else "onebit"
    if kind in ("onebit", "uint8"):
        size = n / 8 if kind == "onebit" else n
        return [("all-to-all", size), ("all-gather", size)]
    if kind == "topk":
        return [("all-gather", (4 + wire_width(config)) * d.topk_density * n * count)]
    numbers = sum(_low_rank(config, shape) for shape in bucket.shapes)
    size = numbers * max(4, ELEMENT_BYTES[config.training.precision])  # whatever the wire format
    return [("all-to-all", size), ("all-gather", size)]


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
