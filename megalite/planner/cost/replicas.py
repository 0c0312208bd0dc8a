"""What data parallelism and the optimizer add to a step, rank by rank: what the simulator of the pipeline does not know."""

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config.run import RunConfig
from megalite.pipeline.ir.actions import Kind
from megalite.pipeline.ir.simulate import Event
from megalite.planner.activations import ELEMENT_BYTES
from megalite.planner.buckets import wire_width
from megalite.planner.communication import group_sizes
from megalite.planner.cost.collectives import collective_seconds, data_stride, pipeline_stride
from megalite.planner.cost.workload import workload_of
from megalite.planner.data_parallel import gradient_volumes
from megalite.planner.hardware.cluster import Cluster
from megalite.planner.hardware.stack import SoftwareStack
from megalite.planner.sharing import local_size
from megalite.planner.stages import StagePlan, shapes_of_rank
from megalite.planner.states import element_bytes


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Seconds of one stage's exchanges in a step, on one rank."""

    reduce: float
    """Gradients: sums, and what stands for them."""
    gather: float
    """Parameters."""
    pieces: int
    """Collectives that the gradients come in: all but the last can run under the backward."""


def stage_exchange(
    config: RunConfig,
    plan: StagePlan,
    stages: tuple[StagePlan, ...],
    num_microbatches: int,
    cluster: Cluster,
    stack: SoftwareStack,
) -> Exchange:
    """The exchanges that `planner.data_parallel.gradient_volumes` lists, one after the other."""
    element = ELEMENT_BYTES[config.training.precision]
    narrow = element / wire_width(config) if stack.half_gradients else 1.0
    sizes, work = group_sizes(config), workload_of(config)
    stride = float(data_stride(work))
    hop = float(pipeline_stride(work))
    # The ends of a pipeline that lies inside a node are in one node, however far apart.
    ends = hop if hop * sizes["pp"] <= cluster.node.accelerators else hop * (sizes["pp"] - 1)
    strides = {"tp": 1.0, "expert-tp": 1.0, "embedding": ends}
    fully = config.parallel.dp_strategy == "fully-sharded"
    reduce = gather = 0.0
    pieces = 0
    totals: dict[tuple[str, str, int], int] = {}
    for key in gradient_volumes(config, plan, stages, num_microbatches):
        totals[key] = totals.get(key, 0) + 1
    for (group, operation, volume), count in totals.items():
        each = float(collective_seconds(operation, volume, sizes[group], strides.get(group, stride), cluster))
        if operation == "all-gather" and (fully or group in ("dp-cp", "expert-dp")):
            gather += count * each
        else:
            reduce += count * each * narrow
            pieces += count
    return Exchange(reduce=reduce, gather=gather, pieces=max(1, pieces))


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Seconds that one pipeline rank's step is longer by than its computation, and where it ends."""

    end: float
    """From the start of the step until the rank has all its gradients."""
    gather: float
    """Parameters that are gathered and not hidden."""


def exposed_exchange(
    config: RunConfig,
    exchanges: Sequence[Exchange],
    plans: Sequence[StagePlan],
    events: Sequence[Event],
    shift: float,
    scale: float,
    first_forward: float,
    num_microbatches: int,
    stack: SoftwareStack,
) -> Exposed:
    """When a rank has its gradients: with overlap each stage's exchange starts under its last backward.

    A stage's gradients are complete with its last B or W; piece by piece they are sent while it runs, one stage after
    another. Ranks that finish before the last one have the rest of the cool-down too. Where each microbatch's gradients
    are sent, the last one's are so; those before it have all the computation there is to hide under.

    Args:
        events: of the rank, in the last part of a step.
        shift: what the step is longer than that part.
        scale: microbatches of the step over those of that part.
        first_forward: seconds under which parameters can be gathered ahead.
    """
    p = config.parallel
    end = max((event.end for event in events), default=0.0) + shift
    reduce, gather = sum(each.reduce for each in exchanges), sum(each.gather for each in exchanges)
    overlapped = stack.overlap_gradients and p.overlap_grad_reduce
    hidden_gather = first_forward if stack.overlap_gradients and p.overlap_param_gather else 0.0
    fully = p.dp_strategy == "fully-sharded"
    late = 0.0 if fully else max(0.0, gather - hidden_gather)
    if not overlapped:
        return Exposed(end=end + reduce + (gather if fully else 0.0), gather=late)
    if not (fully or config.data_parallel.shard_gradients):
        return Exposed(end=max(end, _last_arrival(exchanges, plans, events, shift, 1)), gather=late)
    cover = scale * sum(event.end - event.start for event in events)
    beyond = max(0.0, reduce + (gather if fully else 0.0) - cover)
    arrival = _last_arrival(exchanges, plans, events, shift, num_microbatches)
    return Exposed(end=max(end + beyond, arrival), gather=late)


def _last_arrival(
    exchanges: Sequence[Exchange],
    plans: Sequence[StagePlan],
    events: Sequence[Event],
    shift: float,
    parts: int,
) -> float:
    """When the gradients are there that are sent under each stage's last backward: one of so many parts of all."""
    last = {}
    for event in events:
        if event.action.kind in (Kind.B, Kind.W):
            last[event.action.stage] = event
    now = 0.0
    for plan, exchange in sorted(zip(plans, exchanges), key=lambda pair: last[pair[0].stage].start):
        event, first, reduce = last[plan.stage], 1.0 / exchange.pieces, exchange.reduce / parts
        now = max(now, event.start + shift + (event.end - event.start) * first) + reduce
        now = max(now, event.end + shift + reduce * first)
    return now


def optimizer_seconds(config: RunConfig, plans: Sequence[StagePlan], cluster: Cluster) -> float:
    """States read and written, gradients read for norm and update and set to zero, parameters written."""
    p = config.parallel
    assert p.dp is not None, "validate() resolves dp"
    dense, expert = p.dp * p.cp, p.tp * p.cp * p.dp // (p.expert_tp * p.ep)
    width = max(4, ELEMENT_BYTES[config.training.precision])
    sharded = p.dp_strategy in ("distributed-optimizer", "sharded-parameter-server", "fully-sharded")
    total = 0.0
    for shape in shapes_of_rank(config, list(plans)):
        replicas = expert if shape.expert else dense
        each = element_bytes(config, shape, replicas)
        updated = 1.0 / replicas if sharded else 1.0
        bytes_each = 2.0 * each.optimizer + each.gradient + (2.0 * width + width / 2) * updated
        total += bytes_each * local_size(shape, config)
    return total / (cluster.accelerator.memory_bandwidth * cluster.efficiency.memory)
