"""What the parts of a plan cost: stages, the messages between them, the reduction of their gradients, their memory."""

from dataclasses import dataclass
from typing import NamedTuple

from megalite.planner.chain.cluster import ChainCluster
from megalite.planner.chain.placement import Counts
from megalite.planner.chain.plan import ChainPlan, Stage
from megalite.planner.chain.profile import Array, ChainProfile

_GIGA = 1e9


class Share(NamedTuple):
    """Of a message between two stages, on one machine, the part that each resource carries (1 is all of it)."""

    leaving: float
    entering: float
    inside: float
    """Of one device's link: replicas send side by side."""


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
    return num_bytes / _GIGA * max(network, inside)


def all_reduce_seconds(devices: Counts, num_bytes: float, cluster: ChainCluster) -> float:
    """A ring over the replicas: 2 (n - 1) / n of the bytes at the speed of the slowest link on it."""
    replicas = sum(devices)
    spans = sum(count > 0 for count in devices) > 1
    speed = min(cluster.network_gb_per_s, cluster.ring_gb_per_s) if spans else cluster.ring_gb_per_s
    return 2.0 * (replicas - 1) / replicas * num_bytes / (speed * _GIGA)


@dataclass(frozen=True)
class PlanCosts:
    """Of one plan: seconds for one microbatch, per stage or per hop (between stage s and s + 1)."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    reduce: tuple[float, ...]
    """All-reduce of the stage's gradients, once a step."""
    hops: tuple[float, ...]
    """A message to the next stage, or back: they are as large and run on the same links."""
    parts: tuple[list[Share], ...]
    """Per hop, what a message needs of each machine."""
    messages: tuple[float, ...]
    """Per hop, bytes."""


def plan_costs(plan: ChainPlan, profile: ChainProfile, cluster: ChainCluster) -> PlanCosts:
    """The costs that the judge and the latency formula share."""
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
        hops=tuple(
            hop_seconds(part, size, cluster) + latency for part, size in zip(parts, messages, strict=True)
        ),
        parts=parts,
        messages=messages,
    )


def memory_bytes(plan: ChainPlan, profile: ChainProfile) -> tuple[float, ...]:
    """Per stage, what one of its devices holds: state of the parameters, and activations of what is in flight."""
    return tuple(
        profile.state_factor * _between(profile.parameters, stage)
        + plan.in_flight(number)
        * -(-plan.microbatch_size // stage.replicas)
        * _between(profile.activations, stage)
        for number, stage in enumerate(plan.stages)
    )


def _between(sums: Array, stage: Stage) -> float:
    return float(sums[stage.last] - sums[stage.first])
