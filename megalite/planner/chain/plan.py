"""Chain plans: stages with their placement and costs, and the simulation of a step, by which all plans are compared."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from megalite.pipeline.ir.generators import gpipe, one_f_one_b
from megalite.pipeline.ir.schedule import Action, Kind, Schedule
from megalite.pipeline.ir.simulate import Event, Timeline
from megalite.planner.chain.inputs import Array, ChainCluster, ChainProfile

Counts = tuple[int, ...]  # devices per machine


def fresh_first(free: Counts, wanted: int, *, whole: int) -> Counts:
    """Take unused machines (with `whole` devices) first: replicas stay together and reduce over fast links."""
    return _fill(free, wanted, sorted(range(len(free)), key=lambda m: (free[m] != whole, -free[m], m)))


def append_first(free: Counts, wanted: int, *, whole: int) -> Counts:
    """Take used machines first, the fullest first: later stages can have whole machines."""
    return _fill(free, wanted, sorted(range(len(free)), key=lambda m: (free[m] == whole, free[m], m)))


def scatter_first(free: Counts, wanted: int, *, whole: int) -> Counts:
    """Spread over the machines as evenly as possible: for stages with few weights and large activations."""
    taken = [0] * len(free)
    for _ in range(wanted):
        machine = min((m for m in range(len(free)) if taken[m] < free[m]), key=lambda m: (taken[m], -free[m], m))
        taken[machine] += 1
    return tuple(taken)


POLICIES: tuple[Callable[..., Counts], ...] = (fresh_first, append_first, scatter_first)


def placements(free: Counts, wanted: int, *, whole: int) -> tuple[Counts, ...]:
    """Return the distinct results of the three policies."""
    return tuple(dict.fromkeys(policy(free, wanted, whole=whole) for policy in POLICIES))


def taken_from(free: Counts, taken: Counts) -> Counts:
    """Return the devices that remain free."""
    return tuple(before - now for before, now in zip(free, taken, strict=True))


def _fill(free: Counts, wanted: int, order: Iterable[int]) -> Counts:
    taken = [0] * len(free)
    for machine in order:
        taken[machine] = min(wanted, free[machine])
        wanted -= taken[machine]
    return tuple(taken)


class Stage(NamedTuple):
    """Layers from `first` to before `last` on devices of each machine; each replica runs a slice of each microbatch."""

    first: int
    last: int
    devices: Counts  # replicas per machine

    @property
    def replicas(self) -> int:
        return sum(self.devices)


Stages = tuple[Stage, ...]


@dataclass(frozen=True)
class ChainPlan:
    stages: Stages
    microbatches: int
    microbatch_size: int  # samples over all replicas of a stage
    warm_up: str = "pa"  # of 1F1B; "pb": about twice as many microbatches in flight; "all": as GPipe, for comparison

    def in_flight(self, stage: int) -> int:
        """Return the largest number of microbatches of which a stage stores activations."""
        left = len(self.stages) - stage
        return min(self.microbatches, {"pa": left, "pb": 2 * left - 1}.get(self.warm_up, self.microbatches))

    @property
    def schedule(self) -> Schedule:
        if self.warm_up == "all":
            return gpipe(len(self.stages), self.microbatches)
        return one_f_one_b(len(self.stages), self.microbatches, self.warm_up)


def device_ids(stages: Sequence[Stage], gpus_per_machine: int) -> list[tuple[int, ...]]:
    """Return the device numbers per stage; those of machine m begin at m x gpus_per_machine."""
    used = [0] * len(stages[0].devices)
    found = []
    for stage in stages:
        own: list[int] = []
        for machine, count in enumerate(stage.devices):
            begin = machine * gpus_per_machine + used[machine]
            own.extend(range(begin, begin + count))
            used[machine] += count
        found.append(tuple(own))
    return found


GIGA = 1e9


class Share(NamedTuple):
    """Fractions of a message between two stages that the resources of one machine carry."""

    leaving: float
    entering: float
    inside: float  # on one device's link; replicas send in parallel


def shares(source: Counts, destination: Counts) -> list[Share]:
    """Return the fractions per machine. Slices stay on their machine if possible; the others cross the network."""
    senders, receivers = sum(source), sum(destination)
    found = []
    for sends, receives in zip(source, destination, strict=True):
        outgoing, incoming = sends / senders, receives / receivers
        stays = min(outgoing, incoming)
        found.append(Share(outgoing - stays, incoming - stays, stays / min(sends, receives) if stays else 0.0))
    return found


def hop_seconds(parts: list[Share], num_bytes: float, cluster: ChainCluster) -> float:
    """Return the time of a message alone on the cluster, without latency: that of its slowest part."""
    network = max(max(part.leaving, part.entering) for part in parts) / cluster.message_gb_per_s
    inside = max(part.inside for part in parts) / cluster.link_gb_per_s
    return num_bytes / GIGA * max(network, inside)


def all_reduce_seconds(devices: Counts, num_bytes: float, cluster: ChainCluster) -> float:
    """Return the time of a ring over the replicas: 2 (n - 1) / n of the bytes at the speed of its slowest link."""
    replicas = sum(devices)
    spans = sum(count > 0 for count in devices) > 1
    speed = min(cluster.network_gb_per_s, cluster.ring_gb_per_s) if spans else cluster.ring_gb_per_s
    return 2.0 * (replicas - 1) / replicas * num_bytes / (speed * GIGA)


@dataclass(frozen=True)
class PlanCosts:
    """Seconds of a plan per microbatch, by stage or by hop (between stages s and s + 1)."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    reduce: tuple[float, ...]  # all-reduce of gradients, per step
    hops: tuple[float, ...]  # a message in either direction: both have the same size and links
    parts: tuple[list[Share], ...]  # per hop: use of each machine by a message
    messages: tuple[float, ...]  # per hop: bytes


def plan_costs(plan: ChainPlan, profile: ChainProfile, cluster: ChainCluster) -> PlanCosts:
    forward, backward, reduce = [], [], []
    for stage in plan.stages:
        samples = profile.slice_samples(plan.microbatch_size, stage.replicas)
        forward.append(samples * _between(profile.forward, stage))
        backward.append(samples * _between(profile.backward, stage))
        reduce.append(all_reduce_seconds(stage.devices, _between(profile.parameters, stage), cluster))
    pairs = list(itertools.pairwise(plan.stages))
    parts = tuple(shares(source.devices, target.devices) for source, target in pairs)
    messages = tuple(float(profile.outputs[source.last]) * plan.microbatch_size for source, _ in pairs)
    latency = cluster.latency_us * 1e-6
    return PlanCosts(
        forward=tuple(forward),
        backward=tuple(backward),
        reduce=tuple(reduce),
        hops=tuple(hop_seconds(part, size, cluster) + latency for part, size in zip(parts, messages, strict=True)),
        parts=parts,
        messages=messages,
    )


def memory_bytes(plan: ChainPlan, profile: ChainProfile) -> tuple[float, ...]:
    """Return the bytes per device of each stage: state of the parameters, and activations of microbatches in flight."""
    return tuple(
        profile.state_factor * _between(profile.parameters, stage)
        + plan.in_flight(number) * -(-plan.microbatch_size // stage.replicas) * _between(profile.activations, stage)
        for number, stage in enumerate(plan.stages)
    )


def _between(sums: Array, stage: Stage) -> float:
    return float(sums[stage.last] - sums[stage.first])


def latency(costs: PlanCosts, microbatches: int, in_flight: list[int]) -> float:
    """Return the seconds from the first forward to the last reduced gradient: a maximum over chains of dependent work.

    With stage q as the pivot, the first microbatch reaches it, it runs all forwards and backwards without a pause, and
    the last microbatch returns; each stage on its way reduces its gradients after its last backward:

        L_q = sum_{s<q} (F_s + c_s) + M (F_q + B_q) + max_{s<=q} (sum_{s<=a<q} (B_a + c_a) + AR_s)

    This is DAPPLE's warm-up + steady + ending. The paper selects q by a heuristic that misses slow early stages; this
    takes the maximum. A message between stages is a pivot too, once per direction. A stage that stores K microbatches
    starts the next one only after the first has reached the end of the pipeline and returned.

    It is a lower bound: `run`, where links are shared, is never faster.

    Source: Fan et al., "DAPPLE" (arXiv 2007.01045), section 4.1. `in_flight`: K of each stage."""
    count = len(costs.forward)
    hops = (*costs.hops, 0.0)
    # Time of a microbatch from the start of its forward on stage s to the end of its backward there.
    round_trip = [0.0] * (count + 1)
    for s in reversed(range(count)):
        round_trip[s] = costs.forward[s] + costs.backward[s] + 2 * hops[s] + round_trip[s + 1]
    longest = entry = ending = 0.0
    for s in range(count):
        forward, backward, hop = costs.forward[s], costs.backward[s], hops[s]
        if s:
            ending += costs.backward[s - 1] + hops[s - 1]
        ending = max(ending, costs.reduce[s])
        rounds, rest = divmod(microbatches - 1, in_flight[s])
        steady = max(
            microbatches * (forward + backward),
            (rounds + 1) * round_trip[s] + rest * backward,
            round_trip[s] + (microbatches - 1) * hop,
        )
        longest = max(longest, entry + steady + ending)
        entry += forward + hop
    return longest


class Run(NamedTuple):
    seconds: float  # until the last backward and all-reduce of all stages
    starts: tuple[tuple[float, ...], ...]  # per stage, the start of each of its actions
    backwards_done: tuple[float, ...]  # per stage, the end of its last backward
    reduced: tuple[float, ...]  # per stage, the end of its all-reduce


def run(plan: ChainPlan, costs: PlanCosts, cluster: ChainCluster) -> Run:
    """Simulate synchronous 1F1B, then the all-reduces.

    A stage runs the list of `one_f_one_b` in order, all replicas at the same time, each on its slice of the microbatch.
    A message is sent when its computation ends. It occupies its connection for its whole time (messages of one hop and
    direction queue), and each machine's network for the time of its part, separately out and in: hops that share a
    machine's network take turns, first come, first served. A stage's all-reduce starts after its last backward; those
    that share a network run one after another, without delaying messages, which are small by then. If no hop shares a
    network the result equals `megalite.pipeline.ir.simulate`, which has no shared links.

    Computation and communication overlap; a reduction does not overlap with backwards of the same stage."""
    lists = plan.schedule.actions
    starts = _Simulation(plan, costs, cluster, lists).starts
    done = tuple(row[-1] + duration for row, duration in zip(starts, costs.backward, strict=True))
    reduced = _reductions(plan, costs, done)
    return Run(max(*done, *reduced), tuple(map(tuple, starts)), done, reduced)


class _Simulation:
    """Processes ends of computations and arrivals of messages in order of time; the result is `starts`."""

    def __init__(
        self, plan: ChainPlan, costs: PlanCosts, cluster: ChainCluster, lists: tuple[tuple[Action, ...], ...]
    ) -> None:
        count, microbatches = len(plan.stages), plan.microbatches
        self._costs = costs
        self._lists = [[(action.kind is Kind.B, action.microbatch) for action in row] for row in lists]
        self.starts: list[list[float]] = [[] for _ in range(count)]
        self._busy = [False] * count
        # [backward][stage][microbatch]: whether the stage's input, or its output's gradient, has arrived. The first stage
        # has all inputs from the start; the last needs only its own forward, which comes before the backward in its list.
        ends = (0, count - 1)
        self._arrived = [[[stage == end] * microbatches for stage in range(count)] for end in ends]
        self._needs = [_resources(costs, cluster, back) for back in (False, True)]
        self._free = [0.0] * (2 * cluster.machines + 2 * count)
        self._events: list[tuple[float, int, bool, bool, int, int]] = []
        self._numbers = itertools.count()
        for stage in range(len(self._lists)):
            self._begin(stage, 0.0)
        while self._events:
            now, _, arrives, back, stage, microbatch = heappop(self._events)
            if arrives:
                self._arrived[back][stage][microbatch] = True
            else:
                self._busy[stage] = False
                target = stage - 1 if back else stage + 1
                if 0 <= target < len(self._lists):
                    self._send(now, back, stage, target, microbatch)
            self._begin(stage, now)

    def _begin(self, stage: int, now: float) -> None:
        """Start the stage's next computation if the stage is free and the input has arrived."""
        starts, row = self.starts[stage], self._lists[stage]
        if self._busy[stage] or len(starts) == len(row):
            return
        back, microbatch = row[len(starts)]
        if self._arrived[back][stage][microbatch]:
            self._busy[stage] = True
            starts.append(now)
            duration = (self._costs.backward if back else self._costs.forward)[stage]
            self._post(now + duration, False, back, stage, microbatch)

    def _send(self, now: float, back: bool, stage: int, target: int, microbatch: int) -> None:
        hop = min(stage, target)
        needs = self._needs[back][hop]
        begin = max(now, *(self._free[resource] for resource, _ in needs))
        for resource, seconds in needs:
            self._free[resource] = begin + seconds
        self._post(begin + self._costs.hops[hop], True, back, target, microbatch)

    def _post(self, time: float, arrives: bool, back: bool, stage: int, microbatch: int) -> None:
        heappush(self._events, (time, next(self._numbers), arrives, back, stage, microbatch))


def _resources(costs: PlanCosts, cluster: ChainCluster, back: bool) -> list[list[tuple[int, float]]]:
    """Return (resource, seconds) that a message in a direction occupies, per hop: networks out and in, its connection."""
    machines = cluster.machines
    found = []
    for hop, (parts, size) in enumerate(zip(costs.parts, costs.messages, strict=True)):
        seconds = size / (cluster.message_gb_per_s * GIGA)
        needs = [(2 * machines + 2 * hop + back, costs.hops[hop])]
        for machine, part in enumerate(parts):
            outgoing, incoming = (part.entering, part.leaving) if back else (part.leaving, part.entering)
            if outgoing > 0:
                needs.append((2 * machine, outgoing * seconds))
            if incoming > 0:
                needs.append((2 * machine + 1, incoming * seconds))
        found.append(needs)
    return found


def _reductions(plan: ChainPlan, costs: PlanCosts, ready: tuple[float, ...]) -> tuple[float, ...]:
    """Return the end of each stage's all-reduce; networks serve them first come, first served."""
    free = [0.0] * len(plan.stages[0].devices)
    ends = list(ready)
    for number in sorted(range(len(ready)), key=lambda s: (ready[s], -s)):
        stage = plan.stages[number]
        if stage.replicas == 1:
            continue
        machines = [machine for machine, count in enumerate(stage.devices) if count]
        machines = machines if len(machines) > 1 else []  # within a machine no network is used
        ends[number] = max([ready[number], *(free[machine] for machine in machines)]) + costs.reduce[number]
        for machine in machines:
            free[machine] = ends[number]
    return tuple(ends)


def timeline(plan: ChainPlan, costs: PlanCosts, found: Run) -> Timeline:
    """Return the computations in milliseconds, for drawing: one rank per stage; the end is that of the last
    all-reduce."""
    schedule = plan.schedule
    durations = {Kind.F: costs.forward, Kind.B: costs.backward}
    events = tuple(
        Event(rank, action, 1e3 * start, 1e3 * (start + durations[action.kind][rank]))
        for rank, (row, starts) in enumerate(zip(schedule.actions, found.starts, strict=True))
        for action, start in zip(row, starts, strict=True)
    )
    return Timeline(
        schedule=schedule,
        events=events,
        makespan=1e3 * found.seconds,
        busy=tuple(
            1e3 * plan.microbatches * (forward + backward)
            for forward, backward in zip(costs.forward, costs.backward, strict=True)
        ),
    )


_MOST_MICROBATCHES = 512  # more hardly shorten the bubble, and the simulation's time is proportional


class Judged(NamedTuple):
    plan: ChainPlan
    seconds: float  # simulated seconds of a step
    memory: tuple[float, ...]  # bytes per device of each stage


@dataclass(frozen=True)
class Problem:
    profile: ChainProfile
    cluster: ChainCluster
    global_batch: int  # samples per step
    memory: float  # bytes per device

    def microbatch_counts(self) -> list[int]:
        """Return divisors of the batch, ascending, up to 512, with microbatches large enough to fill one device."""
        least = min(self.profile.smallest_batch, self.global_batch)
        most = min(self.global_batch // least, _MOST_MICROBATCHES)
        return [count for count in range(1, most + 1) if self.global_batch % count == 0]

    def plan(self, stages: Stages, microbatches: int, warm_up: str = "pa") -> ChainPlan:
        return ChainPlan(stages, microbatches, self.global_batch // microbatches, warm_up)


class Judge:
    """Simulates plans, each once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.known: dict[ChainPlan, float] = {}  # plan -> simulated seconds
        self._bounds: dict[ChainPlan, float] = {}
        self.work = 0  # microbatches times stages simulated so far, a measure of the cost

    def seconds(self, plan: ChainPlan) -> float:
        if plan not in self.known:
            self.work += plan.microbatches * len(plan.stages)
            costs = plan_costs(plan, self.problem.profile, self.problem.cluster)
            self.known[plan] = run(plan, costs, self.problem.cluster).seconds
        return self.known[plan]

    def bound(self, plan: ChainPlan) -> float:
        """Return the latency formula, a lower bound of `seconds`."""
        if plan not in self._bounds:
            costs = plan_costs(plan, self.problem.profile, self.problem.cluster)
            in_flight = [plan.in_flight(stage) for stage in range(len(plan.stages))]
            self._bounds[plan] = latency(costs, plan.microbatches, in_flight)
        return self._bounds[plan]

    def memory(self, plan: ChainPlan) -> tuple[float, ...]:
        return memory_bytes(plan, self.problem.profile)

    def fits(self, plan: ChainPlan) -> bool:
        """Test whether all stages fit into a device's memory."""
        return max(self.memory(plan)) <= self.problem.memory

    def lower_bound(self, stages: Stages) -> float:
        """Return a lower bound for the step with these stages and any microbatches; infinite if no plan fits."""
        bounds = (self.bound(plan) for plan in self._variants(stages) if self.fits(plan))
        return min(bounds, default=float("inf"))

    def best(self, stages: Stages, *, below: float = float("inf"), within_memory: bool = True) -> Judged | None:
        """Return the fastest step with these stages; None if no plan fits into memory and is faster than `below`."""
        variants = [plan for plan in self._variants(stages) if not within_memory or self.fits(plan)]
        found: Judged | None = None
        for plan in sorted(variants, key=lambda plan: (self.bound(plan), plan.warm_up)):
            if self.bound(plan) >= below:
                break
            seconds = self.seconds(plan)
            if seconds < below:
                found, below = Judged(plan, seconds, self.memory(plan)), seconds
        return found

    def _variants(self, stages: Stages) -> list[ChainPlan]:
        # A pipeline of one stage has no warm-up.
        warm_ups = ("pa", "pb") if len(stages) > 1 else ("pa",)
        counts = self.problem.microbatch_counts()
        return [self.problem.plan(stages, count, warm_up) for count in counts for warm_up in warm_ups]
