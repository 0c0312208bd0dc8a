"""`predict`: what a step of a config takes on a cluster with a software stack.

The schedule that would train runs through the simulator with each stage's costs and each link's latency and bandwidth;
data parallelism, the optimizer and constants come on top.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from megalite.config.batch import microbatch_counts
from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.models.shapes import flops_per_token
from megalite.pipeline.ir.generators.interleaved import smallest_group
from megalite.pipeline.ir.schedule import Program
from megalite.pipeline.ir.sharing import shared_makespan
from megalite.pipeline.ir.simulate import Event, Link, Timeline, simulate
from megalite.planner.cost.collectives import collective_seconds, pipeline_stride, sharing_ranks
from megalite.planner.cost.links import links_of
from megalite.planner.cost.replicas import Exchange, exposed_exchange, optimizer_seconds, stage_exchange
from megalite.planner.cost.stage import StageCost, StageKind, simulator_costs, stage_costs, stage_kind
from megalite.planner.cost.workload import workload_of
from megalite.planner.hardware.cluster import Cluster
from megalite.planner.hardware.stack import SoftwareStack
from megalite.planner.memory import RankMemory, activation_peaks, rank_memory
from megalite.planner.pipeline import lowered, plan_stages, schedule_of
from megalite.planner.stages import StagePlan

SIMULATED_ACTIONS = 6_000
"""Steps with more forwards and backwards are simulated with fewer microbatches and extended."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One step. Seconds, bytes, shares."""

    step_seconds: float
    tokens_per_second: float
    mfu: float
    """Model FLOPs of attention over the whole sequence (palm), as a share of the peak of all ranks."""
    mfu_causal: float
    """The same with the half of attention that the causal mask leaves (megatron)."""
    bubble: float
    """Idle share of the busiest pipeline rank, messages included; where ranks share cores, of these."""
    parts: Mapping[str, float]
    """The step of the busiest pipeline rank, part by part; they add up to step_seconds. `given` is less than 0: what ranks
    that wait leave to others on shared cores."""
    exposed: Mapping[str, float]
    """Communication that nothing hides, by kind: tensor, context, expert, pipeline, gradients, parameters."""
    memory: tuple[RankMemory, ...]
    """Per pipeline rank; empty if it was not asked for."""
    stages: tuple[StageCost, ...]
    """What a microbatch takes on each virtual stage."""
    timeline: Timeline
    """Of the step, or of one with fewer microbatches if it was extended."""


Links = Mapping[tuple[int, int], Link]
"""(source, destination) pipeline rank -> link; one that is missing is free."""


@dataclass(frozen=True)
class Run:
    """A simulated step, and what it was extended by."""

    timeline: Timeline
    scale: float
    """Microbatches of the step over those simulated."""
    shift: float
    """Seconds that the step is longer by."""

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.timeline.makespan + self.shift


def predict(
    config: RunConfig, cluster: Cluster, stack: SoftwareStack, *, with_memory: bool = True
) -> Prediction:
    """What a step of the largest batch takes.

    Args:
        config: validated for its world size, vocabulary known.
        with_memory: compute the memory of each pipeline rank as well.

    Raises:
        ConfigError: the schedule does not take these sizes, or the accelerator does not have the precision.
    """
    count = microbatch_counts(config)[-1]
    stages = plan_stages(config)
    costs = stage_costs(config, stages, cluster, stack)
    links = links_of(config, cluster, stack)
    programs = _programs(config, len(stages), count)
    run = _timed(programs, costs, count, links)
    free = _timed(programs, costs, count, {}) if links else run
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
    exposed = {
        "pipeline": run.seconds - free.seconds,
        "gradients": gradients,
        "parameters": max(gathers),
    }
    inside, inner_exposed = _busiest(run, stages, costs, count, cluster, stack)
    parts = {**inside, "bubble": free.seconds - sum(inside.values()), **exposed, **after}
    taken = run.seconds
    crowd = float(sharing_ranks(pipeline_stride(workload_of(config)), p.pp, cluster))
    if crowd > 1.0:
        taken = _shared(programs, costs, count, links, crowd)
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
        bubble=_idle(run, taken) if crowd > 1.0 else 1.0 - sum(inside.values()) / run.seconds,
        parts=parts,
        exposed={**inner_exposed, **exposed},
        memory=_memory(config, stages, count) if with_memory else (),
        stages=tuple(costs),
        timeline=run.timeline,
    )


def _shared(
    programs: list[Program], costs: list[StageCost], num_microbatches: int, links: Links, crowd: float
) -> float:
    """Seconds of the whole step where ranks that wait leave their cores to others."""
    ahead = bool(programs[0].schedule.recomputed)
    timing = dataclasses.replace(simulator_costs(costs, ahead=ahead), links=links)
    taken, *shorter = (shared_makespan(program.schedule, timing, crowd) for program in programs)
    if not shorter:
        return taken
    count, before = (program.schedule.num_microbatches for program in programs)
    return taken + (taken - shorter[0]) / (count - before) * (num_microbatches - count)


def _idle(run: Run, taken: float) -> float:
    """Share of `taken` seconds in which cores that ranks share have nothing to do."""
    busy = run.timeline.busy
    return 1.0 - run.scale * sum(busy) / len(busy) / taken


def _memory(config: RunConfig, stages: tuple[StagePlan, ...], count: int) -> tuple[RankMemory, ...]:
    peaks = activation_peaks(config, stages, schedule_of(config, count))
    return tuple(
        rank_memory(config, [plan for plan in stages if plan.rank == rank], peak)
        for rank, peak in enumerate(peaks)
    )


def pipeline_run(config: RunConfig, costs: list[StageCost], num_microbatches: int, links: Links) -> Run:
    """The config's schedule on the clock.

    A step of very many microbatches is extended from two shorter ones, a period apart: past the ramp-up a schedule
    repeats itself. Schedules that are built or read are simulated whole.
    """
    return _timed(_programs(config, len(costs), num_microbatches), costs, num_microbatches, links)


def _programs(config: RunConfig, num_stages: int, num_microbatches: int) -> list[Program]:
    """What is to be simulated: the step, or the two shorter ones, the longer of them first."""
    p, counts = config.parallel, [num_microbatches]
    if p.schedule_name not in ("auto", "file"):
        period = _period(config, num_microbatches)
        count = _fewer(num_microbatches, 2 * num_stages, period)
        if count < num_microbatches:
            counts = [count, count - period]
        if p.schedule_name == "interleaved":
            config = replace(config, microbatch_group_size_per_virtual_pipeline_stage=period)
    return [lowered(config, schedule_of(config, each)) for each in counts]


def _timed(programs: list[Program], costs: list[StageCost], num_microbatches: int, links: Links) -> Run:
    ahead = bool(programs[0].schedule.recomputed)
    timing = dataclasses.replace(simulator_costs(costs, ahead=ahead), links=links)
    timeline, *shorter = (simulate(program, timing) for program in programs)
    if not shorter:
        return Run(timeline, 1.0, 0.0)
    count, before = (program.schedule.num_microbatches for program in programs)
    each = (timeline.makespan - shorter[0].makespan) / (count - before)
    return Run(timeline, num_microbatches / count, each * (num_microbatches - count))


def _period(config: RunConfig, num_microbatches: int) -> int:
    p = config.parallel
    if p.schedule_name != "interleaved":
        return p.pp
    given = p.microbatch_group_size_per_virtual_pipeline_stage
    return given or smallest_group(p.pp, num_microbatches)


def _fewer(num_microbatches: int, actions_each: int, period: int) -> int:
    """The number to simulate: less by whole periods, at least three of them."""
    excess = num_microbatches - max(3 * period, SIMULATED_ACTIONS // actions_each)
    return num_microbatches - max(0, excess) // period * period


def _busiest(
    run: Run,
    stages: tuple[StagePlan, ...],
    costs: list[StageCost],
    count: int,
    cluster: Cluster,
    stack: SoftwareStack,
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
