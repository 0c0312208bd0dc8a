"""A plan for a chain: its stages, where they are, and what its parts cost."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    warm_up: str = "pa"  # of 1F1B: "pa", or "pb" for about twice as many microbatches in flight

    def in_flight(self, stage: int) -> int:
        """Microbatches that a stage holds activations of, at most."""
        left = len(self.stages) - stage
        return min(self.microbatches, left if self.warm_up == "pa" else 2 * left - 1)


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
    reduce: tuple[float, ...]  # all-reduce of the stage's gradients, once a step
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
