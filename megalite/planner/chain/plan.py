"""A plan for a chain: its stages, where they are and what its parts cost; and the one judge of all plans, a step on a clock."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.generators.one_chunk import gpipe, one_f_one_b
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.simulate import Event, Timeline
from megalite.planner.chain.inputs import Array, ChainCluster, ChainProfile

Counts = tuple[int, ...]  # devices per machine


def fresh_first(free: Counts, wanted: int, *, whole: int) -> Counts:
    """Untouched machines (of `whole` devices) before those in use: replicas stay together, to reduce over fast links."""
    return _fill(free, wanted, sorted(range(len(free)), key=lambda m: (free[m] != whole, -free[m], m)))


def append_first(free: Counts, wanted: int, *, whole: int) -> Counts:
    """Machines in use before untouched ones, the fullest first: leaves whole machines for later stages."""
    return _fill(free, wanted, sorted(range(len(free)), key=lambda m: (free[m] == whole, free[m], m)))


def scatter_first(free: Counts, wanted: int, *, whole: int) -> Counts:
    """As even over the machines as what is free allows: for stages with few weights and large activations."""
    taken = [0] * len(free)
    for _ in range(wanted):
        machine = min((m for m in range(len(free)) if taken[m] < free[m]), key=lambda m: (taken[m], -free[m], m))
        taken[machine] += 1
    return tuple(taken)


POLICIES: tuple[Callable[..., Counts], ...] = (fresh_first, append_first, scatter_first)


def placements(free: Counts, wanted: int, *, whole: int) -> tuple[Counts, ...]:
    """What the three ways give, each once."""
    return tuple(dict.fromkeys(policy(free, wanted, whole=whole) for policy in POLICIES))


def taken_from(free: Counts, taken: Counts) -> Counts:
    """What is free afterwards."""
    return tuple(before - now for before, now in zip(free, taken, strict=True))


def _fill(free: Counts, wanted: int, order: Iterable[int]) -> Counts:
    taken = [0] * len(free)
    for machine in order:
        taken[machine] = min(wanted, free[machine])
        wanted -= taken[machine]
    return tuple(taken)


class Stage(NamedTuple):
    """Layers `first` up to but without `last`, on some devices of each machine; each microbatch is cut into slices."""

    first: int
    last: int
    devices: Counts  # per machine, how many of its devices hold a replica

    @property
    def replicas(self) -> int:
        return sum(self.devices)

    @property
    def spans_machines(self) -> bool:
        """Its replicas reduce gradients over the network."""
        return sum(count > 0 for count in self.devices) > 1


Stages = tuple[Stage, ...]


@dataclass(frozen=True)
class ChainPlan:
    stages: Stages
    microbatches: int
    microbatch_size: int  # samples, over all replicas of a stage
    warm_up: str = (
        "pa"  # of 1F1B: "pa", or "pb" for about twice as many microbatches in flight; "all": GPipe's, for comparison
    )

    def in_flight(self, stage: int) -> int:
        """Microbatches that a stage holds activations of, at most."""
        left = len(self.stages) - stage
        return min(self.microbatches, {"pa": left, "pb": 2 * left - 1}.get(self.warm_up, self.microbatches))

    @property
    def schedule(self) -> Schedule:
        if self.warm_up == "all":
            return gpipe(len(self.stages), self.microbatches)
        return one_f_one_b(len(self.stages), self.microbatches, self.warm_up)


def device_ids(stages: Sequence[Stage], gpus_per_machine: int) -> list[tuple[int, ...]]:
    """Per stage, the numbers of its devices: those of machine m begin at m x gpus_per_machine."""
    used = [0] * len(stages[0].devices)
    found = []
    for stage in stages:
        mine: list[int] = []
        for machine, count in enumerate(stage.devices):
            begin = machine * gpus_per_machine + used[machine]
            mine.extend(range(begin, begin + count))
            used[machine] += count
        found.append(tuple(mine))
    return found


GIGA = 1e9


class Share(NamedTuple):
    """Of a message between two stages, on one machine, the part that each resource carries (1 is all of it)."""

    leaving: float
    entering: float
    inside: float  # of one device's link: replicas send side by side


def shares(source: Counts, destination: Counts) -> list[Share]:
    """Per machine. Slices stay on their machine as far as they can; the rest crosses the network."""
    senders, receivers = sum(source), sum(destination)
    found = []
    for sends, receives in zip(source, destination, strict=True):
        out, into = sends / senders, receives / receivers
        stays = min(out, into)
        found.append(Share(out - stays, into - stays, stays / min(sends, receives) if stays else 0.0))
    return found


def hop_seconds(parts: list[Share], num_bytes: float, cluster: ChainCluster) -> float:
    """A message alone on the cluster, without latency: the slowest of its parts."""
    network = max(max(part.leaving, part.entering) for part in parts) / cluster.message_gb_per_s
    inside = max(part.inside for part in parts) / cluster.link_gb_per_s
    return num_bytes / GIGA * max(network, inside)


def all_reduce_seconds(devices: Counts, num_bytes: float, cluster: ChainCluster) -> float:
    """A ring over the replicas: 2 (n - 1) / n of the bytes at the speed of the slowest link on it."""
    replicas = sum(devices)
    spans = sum(count > 0 for count in devices) > 1
    speed = min(cluster.network_gb_per_s, cluster.ring_gb_per_s) if spans else cluster.ring_gb_per_s
    return 2.0 * (replicas - 1) / replicas * num_bytes / (speed * GIGA)


@dataclass(frozen=True)
class PlanCosts:
    """Of one plan: seconds for one microbatch, per stage or per hop (between stage s and s + 1)."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    reduce: tuple[float, ...]  # all-reduce of the stage's gradients, once per step
    hops: tuple[float, ...]  # a message to the next stage, or back: they are as large and run on the same links
    parts: tuple[list[Share], ...]  # per hop, what a message needs of each machine
    messages: tuple[float, ...]  # per hop, bytes


def plan_costs(plan: ChainPlan, profile: ChainProfile, cluster: ChainCluster) -> PlanCosts:
    forward, backward, reduce = [], [], []
    for stage in plan.stages:
        samples = profile.slice_samples(plan.microbatch_size, stage.replicas)
        forward.append(samples * _between(profile.forward, stage))
        backward.append(samples * _between(profile.backward, stage))
        reduce.append(all_reduce_seconds(stage.devices, _between(profile.parameters, stage), cluster))
    pairs = list(zip(plan.stages, plan.stages[1:], strict=False))
    parts = tuple(shares(here.devices, there.devices) for here, there in pairs)
    messages = tuple(float(profile.outputs[here.last]) * plan.microbatch_size for here, _ in pairs)
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
    """Per stage, what one of its devices holds: state of the parameters, and activations of what is in flight."""
    return tuple(
        profile.state_factor * _between(profile.parameters, stage)
        + plan.in_flight(number) * -(-plan.microbatch_size // stage.replicas) * _between(profile.activations, stage)
        for number, stage in enumerate(plan.stages)
    )


def _between(sums: Array, stage: Stage) -> float:
    return float(sums[stage.last] - sums[stage.first])


def latency(costs: PlanCosts, microbatches: int, in_flight: list[int]) -> float:
    """Seconds from the first forward to the last reduced gradient, as a maximum over chains of work that must follow.

    With stage q as the pivot: the first microbatch gets to it, it does all forwards and backwards without a pause,
    and the last microbatch returns, each stage on the way reducing its gradients when its last backward is done:

        L_q = sum_{s<q} (F_s + c_s) + M (F_q + B_q) + max_{s<=q} (sum_{s<=a<q} (B_a + c_a) + AR_s)

    That is DAPPLE's warm-up + steady + ending; the paper picks q by a rule of thumb, which misses slow early stages, and
    this takes the largest. A message between stages is a pivot too, once for each direction. And a stage that holds K
    microbatches starts the next only when the first of them has been to the end of the pipeline and back.

    No plan is faster than this where links carry what they must (`simulate` is never below it).

    Source: Fan et al., "DAPPLE" (arXiv 2007.01045), section 4.1. `in_flight`: K of each stage."""
    count = len(costs.forward)
    hops = (*costs.hops, 0.0)
    # Of a microbatch, from the start of its forward on stage s to the end of its backward there.
    there_and_back = [0.0] * (count + 1)
    for s in reversed(range(count)):
        there_and_back[s] = costs.forward[s] + costs.backward[s] + 2 * hops[s] + there_and_back[s + 1]
    longest = entry = ending = 0.0
    for s in range(count):
        forward, backward, hop = costs.forward[s], costs.backward[s], hops[s]
        if s:
            ending += costs.backward[s - 1] + hops[s - 1]
        ending = max(ending, costs.reduce[s])
        turns, rest = divmod(microbatches - 1, in_flight[s])
        steady = max(
            microbatches * (forward + backward),
            (turns + 1) * there_and_back[s] + rest * backward,
            there_and_back[s] + (microbatches - 1) * hop,
        )
        longest = max(longest, entry + steady + ending)
        entry += forward + hop
    return longest


class Run(NamedTuple):
    seconds: float  # until every stage has done its last backward and reduced its gradients
    starts: tuple[tuple[float, ...], ...]  # per stage, when each action of its list starts
    backwards_done: tuple[float, ...]  # per stage, the end of its last backward
    reduced: tuple[float, ...]  # per stage, the end of its all-reduce


def run(plan: ChainPlan, costs: PlanCosts, cluster: ChainCluster) -> Run:
    """Synchronous 1F1B, then the all-reduces.

    A stage does the list of `one_f_one_b` in order, all of its replicas at once, each on its slice of the microbatch.
    A message leaves when its computation is done. It needs its own connection for all of its time (messages of one
    hop and direction queue), and of each machine the network for as long as its part takes, out and in apart: hops
    that share a machine's network wait for one another, in the order in which they ask. A stage's all-reduce starts
    after its last backward; those that cross a common network go one after another, and let messages pass, which are
    small by then. Where no hop shares a network it equals `megalite.pipeline.ir.simulate`.

    Computation and communication overlap; a reduction does not overlap its own stage's backwards."""
    lists = plan.schedule.actions
    clock = _Clock(plan, costs, cluster, lists)
    done = tuple(starts[-1] + duration for starts, duration in zip(clock.starts, costs.backward, strict=True))
    reduced = _reductions(plan, costs, done)
    return Run(max(*done, *reduced), tuple(map(tuple, clock.starts)), done, reduced)


class _Clock:
    """Computations that end and messages that arrive, in order of time, to the end of all lists: gives `starts`."""

    def __init__(
        self, plan: ChainPlan, costs: PlanCosts, cluster: ChainCluster, lists: tuple[tuple[Action, ...], ...]
    ) -> None:
        count, microbatches = len(plan.stages), plan.microbatches
        self._costs = costs
        self._lists = [[(action.kind is Kind.B, action.microbatch) for action in row] for row in lists]
        self.starts: list[list[float]] = [[] for _ in range(count)]
        self._busy = [False] * count
        # [backward][stage][microbatch]: the stage's input, or the gradient of its output, is there. The first stage has
        # its inputs from the start, and the last needs only its own forward, which its list has before the backward.
        ends = (0, count - 1)
        self._there = [[[stage == end] * microbatches for stage in range(count)] for end in ends]
        self._needs = [_resources(costs, cluster, back) for back in (False, True)]
        self._free = [0.0] * (2 * cluster.machines + 2 * count)
        self._events: list[tuple[float, int, bool, bool, int, int]] = []
        self._numbers = itertools.count()
        for stage in range(len(self._lists)):
            self._begin(stage, 0.0)
        while self._events:
            now, _, arrives, back, stage, microbatch = heappop(self._events)
            if arrives:
                self._there[back][stage][microbatch] = True
            else:
                self._busy[stage] = False
                target = stage - 1 if back else stage + 1
                if 0 <= target < len(self._lists):
                    self._send(now, back, stage, target, microbatch)
            self._begin(stage, now)

    def _begin(self, stage: int, now: float) -> None:
        """The stage's next computation, if the stage is free and has what it needs."""
        starts, row = self.starts[stage], self._lists[stage]
        if self._busy[stage] or len(starts) == len(row):
            return
        back, microbatch = row[len(starts)]
        if self._there[back][stage][microbatch]:
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
    """Per hop, what a message in that direction occupies, and for how long: networks out and in, its connection."""
    machines = cluster.machines
    found = []
    for hop, (parts, size) in enumerate(zip(costs.parts, costs.messages, strict=True)):
        seconds = size / (cluster.message_gb_per_s * GIGA)
        needs = [(2 * machines + 2 * hop + back, costs.hops[hop])]
        for machine, part in enumerate(parts):
            out, into = (part.entering, part.leaving) if back else (part.leaving, part.entering)
            if out > 0:
                needs.append((2 * machine, out * seconds))
            if into > 0:
                needs.append((2 * machine + 1, into * seconds))
        found.append(needs)
    return found


def _reductions(plan: ChainPlan, costs: PlanCosts, ready: tuple[float, ...]) -> tuple[float, ...]:
    """When each stage's gradients are reduced; first come, first served on every network."""
    free = [0.0] * len(plan.stages[0].devices)
    ends = list(ready)
    for number in sorted(range(len(ready)), key=lambda s: (ready[s], -s)):
        stage = plan.stages[number]
        if stage.replicas == 1:
            continue
        on = [machine for machine, count in enumerate(stage.devices) if count] if stage.spans_machines else []
        ends[number] = max([ready[number], *(free[machine] for machine in on)]) + costs.reduce[number]
        for machine in on:
            free[machine] = ends[number]
    return tuple(ends)


def timeline(plan: ChainPlan, costs: PlanCosts, found: Run) -> Timeline:
    """The computations for drawing, in milliseconds: a rank is a stage, and the clock continues to the end of the last
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


_MOST_MICROBATCHES = 512  # more would shorten the bubble no further, and simulating takes time in proportion


class Judged(NamedTuple):
    plan: ChainPlan
    seconds: float  # of a step, simulated
    memory: tuple[float, ...]  # per stage, bytes on one of its devices


@dataclass(frozen=True)
class Problem:
    profile: ChainProfile
    cluster: ChainCluster
    global_batch: int  # samples per step
    memory: float  # bytes that a device may hold

    def microbatch_counts(self) -> list[int]:
        """How many microbatches a step can have, ascending: divisors of the batch up to 512, and each microbatch large
        enough to fill one device."""
        least = min(self.profile.smallest_batch, self.global_batch)
        most = min(self.global_batch // least, _MOST_MICROBATCHES)
        return [count for count in range(1, most + 1) if self.global_batch % count == 0]

    def plan(self, stages: Stages, microbatches: int, warm_up: str = "pa") -> ChainPlan:
        return ChainPlan(stages, microbatches, self.global_batch // microbatches, warm_up)


class Judge:
    """Simulates plans; the same stages are simulated once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.known: dict[ChainPlan, float] = {}  # seconds of the plans that were simulated
        self._bounds: dict[ChainPlan, float] = {}
        self.work = 0  # microbatches times stages that were simulated so far: what simulating costs

    def seconds(self, plan: ChainPlan) -> float:
        if plan not in self.known:
            self.work += plan.microbatches * len(plan.stages)
            costs = plan_costs(plan, self.problem.profile, self.problem.cluster)
            self.known[plan] = run(plan, costs, self.problem.cluster).seconds
        return self.known[plan]

    def bound(self, plan: ChainPlan) -> float:
        """The latency formula: never above `seconds`."""
        if plan not in self._bounds:
            costs = plan_costs(plan, self.problem.profile, self.problem.cluster)
            in_flight = [plan.in_flight(stage) for stage in range(len(plan.stages))]
            self._bounds[plan] = latency(costs, plan.microbatches, in_flight)
        return self._bounds[plan]

    def memory(self, plan: ChainPlan) -> tuple[float, ...]:
        return memory_bytes(plan, self.problem.profile)

    def fits(self, plan: ChainPlan) -> bool:
        """No device holds more than it may."""
        return max(self.memory(plan)) <= self.problem.memory

    def promise(self, stages: Stages) -> float:
        """No step of these stages, whatever its microbatches, is shorter; infinite if none fits."""
        bounds = (self.bound(plan) for plan in self._variants(stages) if self.fits(plan))
        return min(bounds, default=float("inf"))

    def best(self, stages: Stages, *, below: float = float("inf"), within_memory: bool = True) -> Judged | None:
        """The fastest step of these stages; None if none fits the memory or is faster than `below`."""
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
        # A pipeline of one stage has no warm-up to speak of.
        warm_ups = ("pa", "pb") if len(stages) > 1 else ("pa",)
        counts = self.problem.microbatch_counts()
        return [self.problem.plan(stages, count, warm_up) for count in counts for warm_up in warm_ups]
