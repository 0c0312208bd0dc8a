"""Seconds of collectives and messages: a latency a step and a bandwidth, inside a node or across.

A ring over n ranks moves `wire_factor` of each byte, in n-1 steps (an all-reduce twice that). A group that spans nodes
enters and leaves each of them through the adapters of its own members there: with k of them, k shares at once.
"""

import numpy as np

from megalite.planner.cost.workload import Number, Workload
from megalite.planner.hardware.cluster import Cluster


def members_in_node(size: Number, stride: Number, cluster: Cluster) -> Number:
    """Ranks of a group that share a node, if its neighbours are `stride` global ranks apart."""
    return np.clip(np.floor(cluster.node.accelerators / stride), 1.0, size)


def link_rate(members: Number, cluster: Cluster) -> Number:
    """Bytes a second of a ring over so many ranks of one node.

    Few accelerators have fewer rings between them than all of a node: a group of two reaches `small_groups` of the rate
    of a whole node, and each doubling makes up an equal factor of it.
    """
    rate = cluster.node.link_bandwidth * cluster.efficiency.link
    doublings = max(np.log2(cluster.node.accelerators / 2.0), 1.0)
    left = np.clip(np.log2(cluster.node.accelerators / np.maximum(members, 2.0)), 0.0, None) / doublings
    return rate * cluster.efficiency.small_groups**left


def collective_seconds(
    operation: str, volume: Number, size: Number, stride: Number, cluster: Cluster
) -> Number:
    """One collective of `volume` bytes (as planner.communication counts them); 0 in a group of one.

    Args:
        operation: all-reduce, all-gather, reduce-scatter, all-to-all or send.
        size: ranks of the group.
        stride: global ranks between its neighbours: 1 for tp, tp·cp for dp in the usual order.
    """
    inside = members_in_node(size, stride, cluster)
    across = inside < size
    twice = 2.0 if operation == "all-reduce" else 1.0
    part = 1.0 if operation == "send" else (size - 1.0) / size
    link = link_rate(inside, cluster)
    share = cluster.nic_share * cluster.efficiency.network
    if operation == "all-to-all":
        # What goes to ranks of other nodes is each rank's own: its adapter takes that part of it.
        outside = (size - inside) / size
        moved = np.where(across, volume * np.maximum(outside / share, part / link), volume * part / link)
    else:
        moved = twice * part * volume / np.where(across, np.minimum(link, inside * share), link)
    nodes = np.ceil(size / inside)
    # Between nodes rings give way to trees: their depth counts.
    hops = np.where(across, np.ceil(np.log2(np.maximum(nodes, 1.0))), 0.0)
    steps = 1.0 if operation == "send" else inside - 1.0
    latency = twice * (steps * cluster.node.link_latency * (1 - across * (operation == "send")))
    latency = latency + twice * hops * cluster.network.latency
    return np.where(size > 1, moved + latency, 0.0)


def message_seconds(volume: Number, crosses: Number, cluster: Cluster) -> tuple[Number, Number]:
    """(latency, seconds that the link is busy) of one message between pipeline stages.

    Args:
        volume: bytes that one rank sends.
        crosses: whether it leaves the node.
    """
    p2p = cluster.efficiency.p2p
    bandwidth = np.where(crosses, cluster.nic_share, cluster.node.link_bandwidth) * p2p
    inside = cluster.node.message_steps * cluster.node.link_latency
    return np.where(crosses, cluster.network.latency, inside), volume / bandwidth


def pipeline_stride(work: Workload) -> Number:
    """Global ranks between the neighbours of a pipeline."""
    return work.tp * work.cp * np.where(work.order_dp_first, work.dp, 1.0)


def sharing_ranks(stride: Number, pp: int, cluster: Cluster) -> Number:
    """Ranks a core of those that share cores with other stages of their pipeline; 1 where a pipeline leaves the node: its
    ranks there may all wait at once."""
    whole = stride * pp <= cluster.node.accelerators
    return np.where(whole, cluster.node.ranks_per_core, 1.0)


def data_stride(work: Workload) -> Number:
    """Global ranks between the replicas of a parameter; context-parallel ranks count as replicas."""
    return work.tp * np.where(work.order_dp_first, 1.0, np.where(work.cp > 1, 1.0, work.pp))
