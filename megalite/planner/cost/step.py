"""`predict` the time of a training step of a config on a cluster with a software stack.

The simulator runs the schedule of the training with each stage's costs and each link's latency and bandwidth; data
parallelism, the optimizer and constants are added."""

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megalite.config.batch import microbatch_counts
from megalite.config.optimizer import matrix_sides
from megalite.config.run import IdentityKey, RunConfig, cache_by_object, cache_by_reading
from megalite.data_parallel.facts import wire_width
from megalite.models.shapes import Convention, ParameterShape, flops_per_token
from megalite.partition.activations import ELEMENT_BYTES
from megalite.partition.buckets import bytes_of_class, held_elements, matrices_of_ranks, matrix_bytes
from megalite.partition.memory import RankMemory, planned_memory
from megalite.partition.pipeline import Clock, Run, plan_stages
from megalite.partition.stages import StagePlan, kind_of_stage
from megalite.pipeline.ir.schedule import Kind
from megalite.pipeline.ir.simulate import Event, Timeline, shared_makespan
from megalite.planner.communication import gradient_volumes, group_sizes, matrix_volumes
from megalite.planner.cost import rates
from megalite.planner.cost.stage import StageCost, simulator_costs, stage_costs
from megalite.planner.hardware import Cluster, SoftwareStack


class Exchange(NamedTuple):
    """Seconds per step of a stage's exchanges, on one rank."""

    reduce: float  # gradients, also compressed ones
    gather: float  # parameters
    last: float  # sums of sharded gradients over instances and copies, which start when all others have finished
    pieces: int  # gradient collectives: all but the last can overlap with the backward


class Rank(NamedTuple):
    """Seconds of a pipeline rank's work outside the pipeline."""

    ready: float  # time from the start of the step until all gradients are complete
    late: float  # exposed gathers of parameters
    optimizer: float
    hidden: float  # exchanges that overlap with computation


@dataclass(frozen=True)
class _DataParallel:
    """Exchanges between replicas and the optimizer, after the pipeline has been simulated."""

    config: RunConfig
    stages: tuple[StagePlan, ...]
    run: Run
    microbatches: int
    cluster: Cluster
    stack: SoftwareStack

    def ranks(self) -> list[Rank]:
        """Return one entry per pipeline rank; ranks with the same kinds of stages are priced once."""
        config, run = self.config, self.run
        found: list[Rank] = []
        exchanges: dict[Hashable, Exchange] = {}
        updates: dict[tuple[Hashable, ...], float] = {}
        for rank, course in enumerate(_courses(run.timeline)):
            plans = [plan for plan in self.stages if plan.rank == rank]
            kinds = tuple(kind_of_stage(config, plan) for plan in plans)
            for kind, plan in zip(kinds, plans):
                if kind not in exchanges:
                    exchanges[kind] = self._exchange(plan)
            if kinds not in updates:
                updates[kinds] = _optimizer_seconds(
                    config, tuple(plans), IdentityKey(self.cluster), IdentityKey(self.stack)
                )
            own = [exchanges[kind] for kind in kinds]
            ready, late = self._exposed(own, plans, course)
            total = sum(each.reduce + each.gather + each.last for each in own)
            hidden = total - (ready - course.end - run.shift) - late
            found.append(Rank(ready, late, updates[kinds], max(0.0, hidden)))
        return found

    def _exchange(self, plan: StagePlan) -> Exchange:
        work = rates.workload_of(self.config)
        strides = float(rates.data_stride(work)), float(rates.pipeline_stride(work))
        machine = IdentityKey(self.cluster), IdentityKey(self.stack)
        return _exchange(self.config, plan, self.stages, self.microbatches, strides, *machine)

    def _exposed(
        self, exchanges: Sequence[Exchange], plans: Sequence[StagePlan], course: "_Course"
    ) -> tuple[float, float]:
        """Return `ready` and `late` of a rank.

        With overlap, a stage's gradients are complete with its last B or W and are sent in pieces while it runs, one
        stage after another. Ranks that finish early also have the rest of the cool-down. If each microbatch's gradients
        are sent, this holds for those of the last; earlier ones overlap with all computation. Parameters can be
        gathered early, those of each stage until its first forward ends."""
        p, stack, run = self.config.parallel, self.stack, self.run
        end = course.end + run.shift
        reduce, gather, last = (sum(each[at] for each in exchanges) for at in range(3))
        fully = p.strategy.shards_parameters
        ahead = stack.overlap_gradients and p.overlap_param_gather
        late = 0.0 if fully else _late_gathers(exchanges, plans, course) if ahead else gather
        if not (stack.overlap_gradients and p.overlap_grad_reduce):
            return end + reduce + (gather if fully else 0.0) + last, late
        if not _shards_gradients(self.config):
            return max(end, _last_arrival(exchanges, plans, course, run.shift, 1)), late
        beyond = max(0.0, reduce + (gather if fully else 0.0) - run.scale * course.busy)
        return max(end + beyond, _last_arrival(exchanges, plans, course, run.shift, self.microbatches)) + last, late


def _shards_gradients(config: RunConfig) -> bool:
    return config.parallel.strategy.shards_parameters or config.data_parallel.shard_gradients


@cache_by_reading
def _exchange(
    config: RunConfig,
    plan: StagePlan,
    stages: tuple[StagePlan, ...],
    microbatches: int,
    strides: tuple[float, float],
    cluster: IdentityKey[Cluster],
    stack: IdentityKey[SoftwareStack],
) -> Exchange:
    """Sum the time of `gradient_volumes`, run one after another."""
    narrow = ELEMENT_BYTES[config.training.precision] / wire_width(config) if stack.value.half_gradients else 1.0
    sizes, machine, (stride, hop) = group_sizes(config), cluster.value, strides
    ends, share = map(float, rates.pipeline_ends(hop, sizes["pp"], machine))
    group_strides = {"tp": 1.0, "expert-tp": 1.0, "embedding": ends}
    group_strides |= {f"inter-{kind}": stride * sizes[f"intra-{kind}"] for kind in ("dp-cp", "expert-dp")}
    reduce = gather = last = 0.0
    pieces = 0
    totals: dict[tuple[str, str], Counter[int]] = {}
    for group, operation, volume in gradient_volumes(config, plan, stages, microbatches):
        totals.setdefault((group, operation), Counter())[volume] += 1
    for (group, operation), counts in totals.items():
        volumes, times = np.array(list(counts)), np.array(list(counts.values()))
        part = share if group == "embedding" else 1.0
        where = sizes[group], group_strides.get(group, stride), machine
        each = rates.collective_seconds(operation, volumes, *where, taking_part=part)
        across, seconds = group.startswith("inter-"), float(np.sum(times * each))
        if operation == "all-gather" and not across:
            gather += seconds
        elif _shards_gradients(config) and (across or group in ("tp", "embedding")):
            last += seconds * narrow
        else:
            reduce += seconds * narrow
            pieces += 0 if across else int(times.sum())  # each follows one within the instance
    return Exchange(reduce, gather, last, max(1, pieces))


@cache_by_reading
def _optimizer_seconds(
    config: RunConfig, plans: tuple[StagePlan, ...], machine: IdentityKey[Cluster], stack: IdentityKey[SoftwareStack]
) -> float:
    """Sum the time of reading and writing states, reading gradients for norm and update and zeroing them, writing
    parameters, and copying offloaded states; plus whole matrices' exchange and work on the busiest rank."""
    cluster, device = machine.value, machine.value.accelerator
    sizes, width = group_sizes(config), max(4, ELEMENT_BYTES[config.training.precision])
    squares = max(matrix_bytes(config, plans))
    total, host = 2.0 * squares, float(squares) if config.optimizer.optimizer_cpu_offload else 0.0
    for (expert, matrix), elements in held_elements(config, plans).items():
        replicas = sizes["intra-expert-dp" if expert else "intra-dp-cp"]
        each = bytes_of_class(config, matrix, replicas)
        updated = 1.0 / replicas if config.parallel.strategy.shards_states else 1.0
        bytes_each = 2.0 * each.optimizer + each.gradient + (2.0 * width + width / 2) * updated
        total += bytes_each * elements
        host += config.optimizer.host_fraction * each.offloadable * elements
    seconds = total / (device.memory_bandwidth * cluster.efficiency.memory) * stack.value.optimizer_slowdown
    seconds += matrix_seconds(config, plans, cluster)
    return float(rates.with_copies(seconds, host, config, cluster))


def matrix_seconds(config: RunConfig, plans: Sequence[StagePlan], cluster: Cluster) -> float:
    """Return the seconds per step for whole matrices on a pipeline rank with these stages: sending them to the ranks that
    update them and back, and the updates, each on the busiest rank."""
    exchanged, work = matrix_volumes(config, plans), matrices_of_ranks(config, plans)
    seconds, count, device = 0.0, len(exchanged), cluster.accelerator
    for volume in map(max, zip(*exchanged)) if count > 1 else ():
        # An all-to-all's volume includes the part that stays on the rank; these volumes do not.
        each = volume * count / (count - 1.0)
        seconds += float(rates.collective_seconds("all-to-all", each, count, 1.0, cluster))
    main = "fp64" if config.training.precision == "fp64" else "fp32"
    rate = device.peak_flops.get(main, cluster.peak(config.training.precision))
    flops = max(sum(matrix_flops(config, shape) for shape in own) for own in work)
    return seconds + flops / (rate * device.clock * cluster.efficiency.gemm)


def matrix_flops(config: RunConfig, shape: ParameterShape) -> float:
    """Return the FLOPs per step of the optimizer's work on one matrix [r, c] of a tensor: Muon's Newton-Schulz
    iterations, or SOAP's rotations into eigenbases and back, Gram matrices, and now and then a product and a QR
    (8/3·n³) per basis."""
    model, optimizer, (rows, columns) = config.model, config.optimizer, shape.shape[-2:]
    sides = matrix_sides(optimizer, rows, columns).values()
    if sides:
        rotations = 8.0 * rows * columns * sum(sides)
        return rotations + sum((2.0 + 8.0 / 3.0) * n**3 for n in sides) / optimizer.soap_frequency
    parts = [rows]
    for end, split in model.fused_rows.items() if optimizer.muon_split_qkv else ():
        if shape.name.endswith(end):
            parts = [part * (rows // sum(split)) for part in split]
    least = [(min(part, columns), max(part, columns)) for part in parts]
    return sum(optimizer.muon_steps * (4.0 * r**2 * c + 2.0 * r**3) for r, c in least)


class _Course(NamedTuple):
    """Times of a pipeline rank's actions."""

    end: float
    busy: float
    forwards: dict[int, float]  # stage -> end of its first forward
    backwards: dict[int, Event]  # stage -> its last B or W


@cache_by_object(maxsize=8)
def _courses(timeline: Timeline) -> list[_Course]:
    """Return one entry per pipeline rank."""
    rows: list[list[Event]] = [[] for _ in timeline.busy]
    for event in timeline.events:
        rows[event.rank].append(event)
    return [
        _Course(
            max((event.end for event in row), default=0.0),
            sum(event.end - event.start for event in row),
            {event.action.stage: event.end for event in reversed(row) if event.action.kind is Kind.F},
            {event.action.stage: event for event in row if event.action.kind in (Kind.B, Kind.W)},
        )
        for row in rows
    ]


def _late_gathers(exchanges: Sequence[Exchange], plans: Sequence[StagePlan], course: _Course) -> float:
    """Return by how many seconds parameters arrive after first forwards end; those needed first are gathered first."""
    order = sorted((course.forwards[plan.stage], exchange.gather) for plan, exchange in zip(plans, exchanges))
    gathered = itertools.accumulate(gather for _, gather in order)
    return max(0.0, *(done - end for done, (end, _) in zip(gathered, order)))


def _last_arrival(
    exchanges: Sequence[Exchange], plans: Sequence[StagePlan], course: _Course, shift: float, parts: int
) -> float:
    """Return when the gradients sent during each stage's last backward arrive; these are one of `parts` equal parts."""
    now, last = 0.0, course.backwards
    for plan, exchange in sorted(zip(plans, exchanges), key=lambda pair: last[pair[0].stage].start):
        event, first, reduce = last[plan.stage], 1.0 / exchange.pieces, exchange.reduce / parts
        now = max(now, event.start + shift + (event.end - event.start) * first) + reduce
        now = max(now, event.end + shift + reduce * first)
    return now


class Prediction:
    """Predicted time of a step of the largest batch. Values that are costly to compute are computed on first use."""

    def __init__(self, config: RunConfig, cluster: Cluster, stack: SoftwareStack) -> None:
        pp, count, plans = config.parallel.pp, microbatch_counts(config)[-1], plan_stages(config)
        self._config, self._stack, self._count = config, stack, count
        costs = stage_costs(config, plans, cluster, stack)
        self.stages = tuple(costs)  # cost of a microbatch on each virtual stage
        self._clock = Clock(config, len(plans), count)
        timing = self._timing = simulator_costs(costs, config, rates.links_of(config, cluster))
        run = self._run = self._clock.run(timing)
        self.timeline = run.timeline  # of the step, or of a shorter one if it was extrapolated
        ranks = _DataParallel(config, plans, run, count, cluster, stack).ranks()
        # The norm's all-reduce over the world makes all ranks wait for all gradients before the update.
        world = group_sizes(config)["world"]
        norm = float(rates.collective_seconds("all-reduce", 8.0, world, 1.0, cluster))
        self._after = {
            "gradients": max(rank.ready for rank in ranks) - run.seconds,
            "parameters": max(rank.late for rank in ranks),
            "overlap": stack.overlap_cost * max(rank.hidden for rank in ranks),
            "stragglers": rates.slowest_share(world, cluster) * run.scale * max(run.timeline.busy),
            "optimizer": max(rank.optimizer for rank in ranks),
            "step": stack.step_seconds + norm,
        }
        # Idle fraction of the busiest pipeline rank, with messages; if ranks share cores, idle fraction of the cores.
        self.bubble = run.bubble
        crowd = float(rates.sharing_ranks(rates.pipeline_stride(rates.workload_of(config)), pp, cluster))
        if crowd > 1.0:
            busy = run.scale * sum(run.timeline.busy) / pp
            taken = self._clock.extended(run, lambda program: shared_makespan(program.schedule, timing, crowd))
            self._after["given"] = max(taken, busy) - run.seconds
            self.bubble = max(0.0, 1.0 - busy / max(taken, busy))
        self.step_seconds = float(run.seconds + sum(self._after.values()))
        training, dp = config.training, config.parallel.dp
        assert dp is not None, "validate() resolves dp"
        self.tokens_per_second = count * dp * training.micro_batch_size * training.seq_length / self.step_seconds
        self._peak = cluster.peak(training.precision) * world

    # Model FLOPs relative to the peak of all ranks, with attention over the whole sequence (palm) or the half that the
    # causal mask leaves (megatron).
    @cached_property
    def mfu(self) -> float:
        return self._flops("palm") * self.tokens_per_second / self._peak

    @cached_property
    def mfu_causal(self) -> float:
        return self._flops("megatron") * self.tokens_per_second / self._peak

    def _flops(self, convention: Convention) -> int:
        return flops_per_token(self._config.model, self._config.training.seq_length, convention)

    @cached_property
    def parts(self) -> Mapping[str, float]:
        """The parts of the step of the busiest pipeline rank; their sum is step_seconds. `given` is negative: the time
        that waiting ranks leave to others on shared cores."""
        run, timing = self._run, self._timing
        free = self._clock.run(replace(timing, links={})) if timing.links else run
        inside = _busiest(run, plan_stages(self._config), self.stages, self._count, self._stack)
        messages = {"bubble": free.seconds - sum(inside.values()), "pipeline": run.seconds - free.seconds}
        return {**inside, **messages, **self._after}

    @property
    def exposed(self) -> Mapping[str, float]:
        """Seconds of communication that no computation hides, by kind."""
        kinds = ("tensor", "context", "expert", "pipeline", "gradients", "parameters")
        return {name: self.parts[name] for name in kinds}

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """Memory per pipeline rank."""
        return tuple(planned_memory(self._config))


def predict(config: RunConfig, cluster: Cluster, stack: SoftwareStack) -> Prediction:
    """Predict a step. `config` is validated for its world size and has a vocabulary. Raises ConfigError if the schedule
    does not support these sizes, or the accelerator not the precision."""
    return Prediction(config, cluster, stack)


def _busiest(
    run: Run, stages: Sequence[StagePlan], costs: Sequence[StageCost], count: int, stack: SoftwareStack
) -> dict[str, float]:
    """Return the seconds per step of the busiest pipeline rank, by kind."""
    busy = run.timeline.busy
    rank = max(range(len(busy)), key=lambda at: busy[at])
    found = {"products": 0.0, "memory": 0.0, "tensor": 0.0, "context": 0.0, "expert": 0.0}
    for plan, cost in zip(stages, costs, strict=True):
        if plan.rank == rank:
            parts = cost.parts
            seconds = (parts.gemm, parts.memory, parts.exposed_tensor(stack), parts.context, parts.expert)
            for name, value in zip(found, seconds):
                found[name] += count * float(value)
    # The remainder is time in which the device waits for the host to start operations.
    return {**found, "host": busy[rank] * run.scale - sum(found.values())}
