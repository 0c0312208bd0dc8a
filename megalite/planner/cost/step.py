"""`predict`: what a step of a config takes on a cluster with a software stack.

The schedule that would train runs through the simulator with each stage's costs and each link's latency and bandwidth;
data parallelism, the optimizer and constants come on top.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megalite.config.batch import microbatch_counts
from megalite.config.run import RunConfig
from megalite.data_parallel.facts import wire_width
from megalite.models.shapes import flops_per_token
from megalite.partition.activations import ELEMENT_BYTES
from megalite.partition.buckets import element_bytes, local_size, matrix_bytes
from megalite.partition.memory import RankMemory, planned_memory
from megalite.partition.pipeline import plan_stages
from megalite.partition.stages import StagePlan, shapes_of_rank
from megalite.pipeline.ir.actions import Kind
from megalite.pipeline.ir.simulate import Event, Timeline, shared_makespan
from megalite.planner.clock import Clock, Run
from megalite.planner.communication import gradient_volumes, group_sizes
from megalite.planner.cost import rates
from megalite.planner.cost.stage import StageCost, StageKind, simulator_costs, stage_costs, stage_kind
from megalite.planner.hardware import Cluster, SoftwareStack


class Exchange(NamedTuple):
    """Seconds of one stage's exchanges in a step, on one rank."""

    reduce: float  # gradients: sums, and what stands for them
    gather: float  # parameters
    pieces: int  # collectives that the gradients come in: all but the last can run under the backward


class Rank(NamedTuple):
    """Seconds of what a pipeline rank does beside its pipeline."""

    ready: float  # from the start of the step, when it has all its gradients
    late: float  # gathering parameters that nothing hides
    optimizer: float
    beside: float  # exchanges that computation hides


@dataclass(frozen=True)
class _Beside:
    """Exchanges between replicas, and the optimizer, of a step after its pipeline has been run."""

    config: RunConfig
    stages: tuple[StagePlan, ...]
    costs: Sequence[StageCost]
    run: Run
    microbatches: int
    cluster: Cluster
    stack: SoftwareStack

    def ranks(self) -> list[Rank]:
        """Of each pipeline rank; ranks with the same kinds of stages are priced once."""
        config, run = self.config, self.run
        found: list[Rank] = []
        exchanges: dict[StageKind, Exchange] = {}
        updates: dict[tuple[StageKind, ...], float] = {}
        of_rank: list[list[Event]] = [[] for _ in range(config.parallel.pp)]
        for event in run.timeline.events:
            of_rank[event.rank].append(event)
        for rank, events in enumerate(of_rank):
            plans = [plan for plan in self.stages if plan.rank == rank]
            kinds = tuple(stage_kind(config, plan) for plan in plans)
            for kind, plan in zip(kinds, plans):
                if kind not in exchanges:
                    exchanges[kind] = self._exchange(plan)
            if kinds not in updates:
                updates[kinds] = self._optimizer_seconds(plans)
            mine = [exchanges[kind] for kind in kinds]
            ready, late = self._exposed(mine, plans, events)
            done = max((event.end for event in events), default=0.0) + run.shift
            beside = sum(each.reduce + each.gather for each in mine) - (ready - done) - late
            found.append(Rank(ready, late, updates[kinds], max(0.0, beside)))
        return found

    def _exchange(self, plan: StagePlan) -> Exchange:
        """Those that `gradient_volumes` lists, one after the other."""
        config, cluster = self.config, self.cluster
        narrow = ELEMENT_BYTES[config.training.precision] / wire_width(config) if self.stack.half_gradients else 1.0
        sizes, work = group_sizes(config), rates.workload_of(config)
        stride, hop = float(rates.data_stride(work)), float(rates.pipeline_stride(work))
        # The ends of a pipeline that lies inside a node are in one node, however far apart.
        ends = hop if hop * sizes["pp"] <= cluster.node.accelerators else hop * (sizes["pp"] - 1)
        strides = {"tp": 1.0, "expert-tp": 1.0, "embedding": ends}
        strides |= {f"inter-{kind}": stride * sizes[f"intra-{kind}"] for kind in ("dp-cp", "expert-dp")}
        reduce = gather = 0.0
        pieces = 0
        totals = Counter(gradient_volumes(config, plan, self.stages, self.microbatches))
        for (group, operation, volume), count in totals.items():
            each = float(rates.collective_seconds(operation, volume, sizes[group], strides.get(group, stride), cluster))
            across = group.startswith("inter-")
            if operation == "all-gather" and not across:
                gather += count * each
            else:
                reduce += count * each * narrow
                pieces += 0 if across else count  # each follows one inside the instance
        return Exchange(reduce, gather, max(1, pieces))

    def _exposed(
        self, exchanges: Sequence[Exchange], plans: Sequence[StagePlan], events: Sequence[Event]
    ) -> tuple[float, float]:
        """`ready` and `late` of one rank.

        With overlap each stage's exchange starts under its last backward: a stage's gradients are complete with its last B
        or W; piece by piece they are sent while it runs, one stage after another. Ranks that finish before the last one
        have the rest of the cool-down too. Where each microbatch's gradients are sent, the last one's are so; those before
        it have all the computation there is to hide under. Parameters can be gathered ahead, those of each stage until its
        first forward has run."""
        p, stack, run = self.config.parallel, self.stack, self.run
        end = max((event.end for event in events), default=0.0) + run.shift
        reduce, gather = sum(each.reduce for each in exchanges), sum(each.gather for each in exchanges)
        fully = p.strategy.shards_parameters
        ahead = stack.overlap_gradients and p.overlap_param_gather
        late = 0.0 if fully else _late_gathers(exchanges, plans, events) if ahead else gather
        if not (stack.overlap_gradients and p.overlap_grad_reduce):
            return end + reduce + (gather if fully else 0.0), late
        if not (fully or self.config.data_parallel.shard_gradients):
            return max(end, _last_arrival(exchanges, plans, events, run.shift, 1)), late
        cover = run.scale * sum(event.end - event.start for event in events)
        beyond = max(0.0, reduce + (gather if fully else 0.0) - cover)
        return max(end + beyond, _last_arrival(exchanges, plans, events, run.shift, self.microbatches)), late

    def _optimizer_seconds(self, plans: Sequence[StagePlan]) -> float:
        """States read and written, gradients read for norm and update and set to zero, parameters written; what is in
        host memory comes and goes."""
        config, device = self.config, self.cluster.accelerator
        sizes, width = group_sizes(config), max(4, ELEMENT_BYTES[config.training.precision])
        squares = max(matrix_bytes(config, plans))
        total, host = 2.0 * squares, float(squares) if config.optimizer.optimizer_cpu_offload else 0.0
        for shape in shapes_of_rank(config, list(plans)):
            replicas = sizes["intra-expert-dp" if shape.expert else "intra-dp-cp"]
            each = element_bytes(config, shape, replicas)
            updated = 1.0 / replicas if config.parallel.strategy.shards_states else 1.0
            bytes_each = 2.0 * each.optimizer + each.gradient + (2.0 * width + width / 2) * updated
            total += bytes_each * local_size(shape, config)
            host += config.optimizer.host_fraction * each.offloadable * local_size(shape, config)
        seconds = total / (device.memory_bandwidth * self.cluster.efficiency.memory) * self.stack.optimizer_slowdown
        return float(rates.with_copies(seconds, host, config, self.cluster))


def _late_gathers(exchanges: Sequence[Exchange], plans: Sequence[StagePlan], events: Sequence[Event]) -> float:
    """Seconds by which parameters come later than first forwards end; those that are needed first are gathered first."""
    ends = {event.action.stage: event.end for event in reversed(events) if event.action.kind is Kind.F}
    order = sorted((ends[plan.stage], exchange.gather) for plan, exchange in zip(plans, exchanges))
    gathered = itertools.accumulate(gather for _, gather in order)
    return max(0.0, *(done - end for done, (end, _) in zip(gathered, order)))


def _last_arrival(
    exchanges: Sequence[Exchange], plans: Sequence[StagePlan], events: Sequence[Event], shift: float, parts: int
) -> float:
    """When the gradients are there that are sent under each stage's last backward: one of so many parts of all."""
    last = {event.action.stage: event for event in events if event.action.kind in (Kind.B, Kind.W)}
    now = 0.0
    for plan, exchange in sorted(zip(plans, exchanges), key=lambda pair: last[pair[0].stage].start):
        event, first, reduce = last[plan.stage], 1.0 / exchange.pieces, exchange.reduce / parts
        now = max(now, event.start + shift + (event.end - event.start) * first) + reduce
        now = max(now, event.end + shift + reduce * first)
    return now


@dataclass(frozen=True, kw_only=True)
class Prediction:
    step_seconds: float
    tokens_per_second: float
    mfu: float  # model FLOPs of attention over the whole sequence (palm), as a share of the peak of all ranks
    mfu_causal: float  # the same with the half of attention that the causal mask leaves (megatron)
    bubble: float  # idle share of the busiest pipeline rank, messages included; where ranks share cores, of these
    # The step of the busiest pipeline rank, part by part; they add up to step_seconds. `given` is less than 0: what ranks
    # that wait leave to others on shared cores.
    parts: Mapping[str, float]
    # Communication that nothing hides, by kind: tensor, context, expert, pipeline, gradients, parameters.
    exposed: Mapping[str, float]
    memory: tuple[RankMemory, ...]  # per pipeline rank; empty if it was not asked for
    stages: tuple[StageCost, ...]  # what a microbatch takes on each virtual stage
    timeline: Timeline  # of the step, or of one with fewer microbatches if it was extended


def predict(config: RunConfig, cluster: Cluster, stack: SoftwareStack, *, with_memory: bool = True) -> Prediction:
    """What a step of the largest batch takes; `config` is validated for its world size, its vocabulary known. Raises
    ConfigError if the schedule does not take these sizes, or the accelerator does not have the precision."""
    p, training, count = config.parallel, config.training, microbatch_counts(config)[-1]
    stages = plan_stages(config)
    costs = stage_costs(config, stages, cluster, stack)
    links = rates.links_of(config, cluster)
    clock, timing = Clock(config, len(stages), count), simulator_costs(costs, config, links)
    run = clock.run(timing)
    free = clock.run(replace(timing, links={})) if links else run
    ranks = _Beside(config, stages, costs, run, count, cluster, stack).ranks()
    world = group_sizes(config)["world"]
    # The norm's sum over the world lets no one update before all have their gradients.
    norm = float(rates.collective_seconds("all-reduce", 8.0, world, 1.0, cluster))
    gradients = max(rank.ready for rank in ranks) - run.seconds
    gathers = max(rank.late for rank in ranks)
    after = {
        "overlap": stack.overlap_cost * max(rank.beside for rank in ranks),
        "optimizer": max(rank.optimizer for rank in ranks),
        "step": stack.step_seconds + norm,
    }
    exposed = {"pipeline": run.seconds - free.seconds, "gradients": gradients, "parameters": gathers}
    inside = _busiest(run, stages, costs, count, stack)
    parts = {**inside, "bubble": free.seconds - sum(inside.values()), **exposed, **after}
    taken, bubble = run.seconds, run.bubble
    crowd = float(rates.sharing_ranks(rates.pipeline_stride(rates.workload_of(config)), p.pp, cluster))
    if crowd > 1.0:
        busy = run.timeline.busy
        taken = max(
            clock.extended(run, lambda program: shared_makespan(program.schedule, timing, crowd)),
            run.scale * sum(busy) / p.pp,
        )
        parts["given"] = taken - run.seconds
        bubble = max(0.0, 1.0 - run.scale * sum(busy) / len(busy) / taken)  # of the cores that ranks share
    step = taken + gradients + gathers + sum(after.values())
    assert p.dp is not None, "validate() resolves dp"
    tokens = count * p.dp * training.micro_batch_size * training.seq_length
    achievable = cluster.peak(training.precision) * world * step
    return Prediction(
        step_seconds=step,
        tokens_per_second=tokens / step,
        mfu=flops_per_token(config.model, training.seq_length, "palm") * tokens / achievable,
        mfu_causal=flops_per_token(config.model, training.seq_length, "megatron") * tokens / achievable,
        bubble=bubble,
        parts=parts,
        exposed={**{name: inside[name] for name in ("tensor", "context", "expert")}, **exposed},
        memory=tuple(planned_memory(config)) if with_memory else (),
        stages=tuple(costs),
        timeline=run.timeline,
    )


def _busiest(
    run: Run, stages: Sequence[StagePlan], costs: Sequence[StageCost], count: int, stack: SoftwareStack
) -> dict[str, float]:
    """What the busiest pipeline rank does in the step, by kind."""
    busy = run.timeline.busy
    rank = max(range(len(busy)), key=lambda at: busy[at])
    found = {"products": 0.0, "memory": 0.0, "tensor": 0.0, "context": 0.0, "expert": 0.0}
    for plan, cost in zip(stages, costs, strict=True):
        if plan.rank == rank:
            parts = cost.parts
            seconds = (parts.gemm, parts.memory, parts.exposed_tensor(stack), parts.context, parts.expert)
            for name, value in zip(found, seconds):
                found[name] += count * float(value)
    # The rest is the host's: operations that it starts later than the device could take them.
    return {**found, "host": busy[rank] * run.scale - sum(found.values())}
