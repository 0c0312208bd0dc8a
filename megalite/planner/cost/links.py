"""Pipeline messages for the simulator: each pair of pipeline ranks with its latency and occupancy."""

import itertools

from megalite.config.run import RunConfig
from megalite.pipeline.ir.simulate import Link
from megalite.planner.cost.collectives import collective_seconds, message_seconds, pipeline_stride
from megalite.planner.cost.workload import workload_of
from megalite.planner.hardware.cluster import Cluster
from megalite.planner.hardware.stack import SoftwareStack
from megalite.planner.pipeline import placement_of


def crosses_node(stride: int, first: int, second: int, cluster: Cluster) -> bool:
    """Whether some pipeline has two of its ranks, these, on different nodes; its neighbours are `stride` ranks apart."""
    size = cluster.node.accelerators
    if stride * abs(second - first) >= size:
        return True
    return any((first * stride + at) // size != (second * stride + at) // size for at in range(stride))


def links_of(config: RunConfig, cluster: Cluster, stack: SoftwareStack) -> dict[tuple[int, int], Link]:
    """(source, destination) -> link, of the pipeline ranks that hold neighbouring stages."""
    placement, work = placement_of(config), workload_of(config)
    volume, stride = work.activation_bytes / work.split, int(pipeline_stride(work))
    cut = stack.scatter_messages and work.split < work.tp
    links: dict[tuple[int, int], Link] = {}
    for source, destination in itertools.pairwise(placement):
        if source == destination or (source, destination) in links:
            continue
        crosses = crosses_node(stride, source, destination, cluster)
        latency, busy = message_seconds(volume / (work.tp if cut else 1.0), crosses, cluster)
        if cut:
            latency = latency + collective_seconds("all-gather", volume, work.tp, 1.0, cluster)
        link = Link(float(latency), float(busy))
        links[source, destination] = links[destination, source] = link
    return links
