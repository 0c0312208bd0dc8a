"""`predict`: what a step of a config takes on a cluster with a software stack.

The schedule that would train runs through the simulator with each stage's costs and each link's latency and bandwidth;
data parallelism, the optimizer and constants come on top.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.config.batch import microbatch_counts
from megalite.config.run import RunConfig
from megalite.data_parallel.facts import wire_width
from megalite.models.shapes import flops_per_token
from megalite.partition.activations import ELEMENT_BYTES
from megalite.partition.buckets import element_bytes, local_size
from megalite.partition.memory import RankMemory, activation_peaks, rank_memory
from megalite.partition.pipeline import plan_stages, schedule_of
from megalite.partition.stages import StagePlan, shapes_of_rank
from megalite.pipeline.ir.actions import Kind
from megalite.pipeline.ir.simulate import Event, Timeline, shared_makespan
from megalite.planner.clock import Clock, Run
from megalite.planner.communication import gradient_volumes, group_sizes
from megalite.planner.cost.rates import collective_seconds, data_stride, links_of, pipeline_stride, sharing_ranks
from megalite.planner.cost.stage import StageCost, StageKind, simulator_costs, stage_costs, stage_kind
from megalite.planner.cost.workload import workload_of
from megalite.planner.hardware import Cluster, SoftwareStack


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Seconds of one stage's exchanges in a step, on one rank."""

    reduce: float  # gradients: sums, and what stands for them
    gather: float  # parameters
    pieces: int  # collectives that the gradients come in: all but the last can run under the backward


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

    end: float  # from the start of the step until the rank has all its gradients
    gather: float  # parameters that are gathered and not hidden


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
    exchanges: Sequence[Exchange], plans: Sequence[StagePlan], events: Sequence[Event], shift: float, parts: int
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


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One step. Seconds, bytes, shares."""

    step_seconds: float
    tokens_per_second: float
    mfu: float  # model FLOPs of attention over the whole sequence (palm), as a share of the peak of all ranks
    mfu_causal: float  # the same with the half of attention that the causal mask leaves (megatron)
    bubble: float  # idle share of the busiest pipeline rank, messages included; where ranks share cores, of these
    parts: Mapping[str, float]
    """The step of the busiest pipeline rank, part by part; they add up to step_seconds. `given` is less than 0: what ranks
    that wait leave to others on shared cores."""
    exposed: Mapping[str, float]
    """Communication that nothing hides, by kind: tensor, context, expert, pipeline, gradients, parameters."""
    memory: tuple[RankMemory, ...]  # per pipeline rank; empty if it was not asked for
    stages: tuple[StageCost, ...]  # what a microbatch takes on each virtual stage
    timeline: Timeline  # of the step, or of one with fewer microbatches if it was extended


def predict(config: RunConfig, cluster: Cluster, stack: SoftwareStack, *, with_memory: bool = True) -> Prediction:
    """What a step of the largest batch takes.

    Args:
        config: validated for its world size, vocabulary known.
        with_memory: compute the memory of each pipeline rank as well.

    Raises ConfigError: the schedule does not take these sizes, or the accelerator does not have the precision.
    """
    count = microbatch_counts(config)[-1]
    stages = plan_stages(config)
    costs = stage_costs(config, stages, cluster, stack)
    links = links_of(config, cluster, stack)
    clock, timing = Clock(config, len(stages), count), simulator_costs(costs, config, links)
    run = clock.run(timing)
    free = clock.run(dataclasses.replace(timing, links={})) if links else run
    events: list[list[Event]] = [[] for _ in range(config.parallel.pp)]
    for event in run.timeline.events:
        events[event.rank].append(event)
    ends, gathers, optimizers = [], [], []
    exchanges: dict[StageKind, Exchange] = {}
    updates: dict[tuple[StageKind, ...], float] = {}
    for rank in range(config.parallel.pp):
        plans = [plan for plan in stages if plan.rank == rank]
        kinds = tuple(stage_kind(config, plan) for plan in plans)
        for kind, plan in zip(kinds, plans):
            if kind not in exchanges:
                exchanges[kind] = stage_exchange(config, plan, stages, count, cluster, stack)
        if kinds not in updates:
            updates[kinds] = optimizer_seconds(config, plans, cluster)
        cover = sum(float(costs[plan.stage].forward) for plan in plans)
        mine = [exchanges[kind] for kind in kinds]
        found = exposed_exchange(config, mine, plans, events[rank], run.shift, run.scale, cover, count, stack)
        ends.append(found.end)
        gathers.append(found.gather)
        optimizers.append(updates[kinds])
    p = config.parallel
    assert p.dp is not None, "validate() resolves dp"
    world = p.tp * p.cp * p.dp * p.pp
    # The norm's sum over the world lets nobody update before all have their gradients.
    norm = float(collective_seconds("all-reduce", 8.0, world, 1.0, cluster))
    gradients = max(ends) - run.seconds
    after = {"optimizer": max(optimizers), "step": stack.step_seconds + norm}
    exposed = {"pipeline": run.seconds - free.seconds, "gradients": gradients, "parameters": max(gathers)}
    inside, inner_exposed = _busiest(run, stages, costs, count, cluster, stack)
    parts = {**inside, "bubble": free.seconds - sum(inside.values()), **exposed, **after}
    taken = run.seconds
    crowd = float(sharing_ranks(pipeline_stride(workload_of(config)), p.pp, cluster))
    if crowd > 1.0:
        taken = max(
            clock.extended(run.window, lambda program: shared_makespan(program.schedule, timing, crowd)),
            run.scale * sum(run.timeline.busy) / p.pp,
        )
        parts["given"] = taken - run.seconds
    step = taken + gradients + max(gathers) + sum(after.values())
    tokens = count * p.dp * config.training.micro_batch_size * config.training.seq_length
    model, length = config.model, config.training.seq_length
    achievable = cluster.peak(config.training.precision) * world * step
    return Prediction(
        step_seconds=step,
        tokens_per_second=tokens / step,
        mfu=flops_per_token(model, length, "palm") * tokens / achievable,
        mfu_causal=flops_per_token(model, length, "megatron") * tokens / achievable,
        bubble=_idle(run, taken) if crowd > 1.0 else run.bubble,
        parts=parts,
        exposed={**inner_exposed, **exposed},
        memory=_memory(config, stages, count) if with_memory else (),
        stages=tuple(costs),
        timeline=run.timeline,
    )


def _idle(run: Run, taken: float) -> float:
    """Share of `taken` seconds in which cores that ranks share have nothing to do."""
    busy = run.timeline.busy
    return max(0.0, 1.0 - run.scale * sum(busy) / len(busy) / taken)


def _memory(config: RunConfig, stages: tuple[StagePlan, ...], count: int) -> tuple[RankMemory, ...]:
    peaks = activation_peaks(config, stages, schedule_of(config, count))
    return tuple(
        rank_memory(config, [plan for plan in stages if plan.rank == rank], peak) for rank, peak in enumerate(peaks)
    )


def _busiest(
    run: Run, stages: tuple[StagePlan, ...], costs: list[StageCost], count: int, cluster: Cluster, stack: SoftwareStack
) -> tuple[dict[str, float], dict[str, float]]:
    """What the busiest pipeline rank does in the step, by kind, and the communication in it."""
    busy = run.timeline.busy
    rank = max(range(len(busy)), key=lambda at: busy[at])
    found = {"products": 0.0, "memory": 0.0, "tensor": 0.0, "context": 0.0, "expert": 0.0}
    for plan, cost in zip(stages, costs, strict=True):
        if plan.rank == rank:
            parts = cost.parts
            for name, value in (
                ("products", parts.gemm),
                ("memory", parts.memory),
                ("tensor", parts.exposed_tensor(stack)),
                ("context", parts.context),
                ("expert", parts.expert),
            ):
                found[name] += count * float(value)
    # The rest is the host's: operations that it starts later than the device could take them.
    whole = busy[rank] * run.scale
    communication = {name: found[name] for name in ("tensor", "context", "expert")}
    return {**found, "host": whole - sum(found.values())}, communication
