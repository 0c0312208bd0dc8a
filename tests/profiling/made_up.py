"""Measurements that a known cluster would produce, by the planner's formulas."""

import dataclasses

import numpy as np

from megalite.partition.activations import ELEMENT_BYTES
from megalite.planner.cost.rates import SHARED_PASSES, collective_seconds, gemm_seconds, message_seconds
from megalite.planner.hardware import Cluster
from megalite.profiling.collectives import OPERATIONS, CollectiveTime, Machine
from megalite.profiling.operations import PRODUCTS, AttentionShape, AttentionTime, GemmTime, MemoryTime, chosen_shapes
from megalite.profiling.passes import Overheads
from megalite.profiling.run import Measurements, fit_cluster
from megalite.profiling.timing import Timing

CPU = Machine(
    device_type="cpu",
    device_name="Some CPU",
    memory_bytes=8 << 30,
    multiprocessors=1,
    threads=1,
    cores=4,
    nodes=2,
    ranks_per_node=4,
    accelerators_per_node=4,
    torch_version="2.13.0",
)
START = 2e-6  # of every operation


def took(seconds: float) -> Timing:
    """Return a timing without spread."""
    return Timing(seconds=float(seconds), spread=0.0, samples=9)


def gemms(cluster: Cluster, dtype: str) -> list[GemmTime]:
    """Return products of all sizes."""
    rate = cluster.accelerator.memory_bandwidth * cluster.efficiency.memory
    times = []
    for shape in chosen_shapes(count=12, most_flops=1e11, most_bytes=1e9, itemsize=4):
        for product in PRODUCTS:
            m, n, k = shape.product(product)
            seconds = gemm_seconds(m, n, k, element=ELEMENT_BYTES[dtype], peak=cluster.peak(dtype), cluster=cluster)
            added = 8 * m * n / rate if product == "weight-gradient" else 0.0
            seconds += added + cluster.accelerator.kernel_seconds
            times.append(GemmTime(product=product, m=m, n=n, k=k, dtype=dtype, timing=took(seconds)))
    return times


def collectives(cluster: Cluster, machine: Machine) -> list[CollectiveTime]:
    """Return collectives of groups in a node (2 and all ranks) and across nodes, and messages."""
    local, nodes, node = machine.ranks_per_node, machine.nodes, cluster.node
    found: list[tuple[str, str, int, int, float]] = []
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        for place, ranks, stride in (("inside", 2, 1), ("inside", local, 1), ("across", nodes, local)):
            for operation in OPERATIONS if ranks > 1 else ():
                seconds = float(collective_seconds(operation, size, ranks, stride, cluster))
                found.append((operation, place, ranks, size, seconds))
        for operation, passes in SHARED_PASSES.items() if node.shared_memory_bandwidth else ():
            seconds = node.shared_memory_latency + passes(local) * size / node.shared_memory_bandwidth
            found.append((operation, "memory", local, size, seconds))
        for place in ("inside", "across") if nodes > 1 else ("inside",):
            latency, busy = message_seconds(size, np.array(place == "across"), cluster)
            found.append(("p2p", place, 2, size, float(latency + busy)))
    return [
        CollectiveTime(operation=operation, place=place, ranks=ranks, message_bytes=size, timing=took(seconds))
        for operation, place, ranks, size, seconds in found
    ]


def measurements(cluster: Cluster, machine: Machine, dtypes: tuple[str, ...] = ("fp32",)) -> Measurements:
    """Return all measurements."""
    rate = cluster.accelerator.memory_bandwidth * cluster.efficiency.memory
    memory = [
        MemoryTime(
            operation=name, elements=elements, bytes_moved=each * elements, timing=took(START + each * elements / rate)
        )
        for elements in (1 << 20, 1 << 24)
        for name, each in (("copy", 8), ("add", 12), ("adam", 28))
    ]
    shape = AttentionShape(b=1, heads=8, s=1024, d=64)
    flops = cluster.peak(dtypes[0]) * cluster.efficiency.gemm / 2  # half the rate of products
    attention = [
        AttentionTime(
            backward=backward,
            shape=shape,
            dtype=dtypes[0],
            timing=took(cluster.accelerator.kernel_seconds + shape.flops / 2 * (2.5 if backward else 1.0) / flops),
        )
        for backward in (False, True)
    ]
    return Measurements(
        machine=machine,
        dtypes=dtypes,
        gemms=[time for name in dtypes for time in gemms(cluster, name)],
        attention=attention,
        memory=memory,
        overheads=Overheads(operation=took(START), layer=6e-4, stage=4e-5, step=took(5e-5)),
        collectives=collectives(cluster, machine) if machine.ranks > 1 else [],
    )


def fitted_to(measured: Measurements, base: Cluster, *, nominal: bool = False) -> Cluster:
    return fit_cluster(measured, base, nominal=nominal, name="mine", source="measured")[0]


def cpu_cluster(base: Cluster) -> Cluster:
    """Return a CPU cluster in which all figures differ."""
    return dataclasses.replace(
        base,
        accelerator=dataclasses.replace(
            base.accelerator, peak_flops={"fp32": 9e10, "bf16": 3e10}, memory_bandwidth=2e10, kernel_seconds=3e-6
        ),
        node=dataclasses.replace(base.node, accelerators=4, link_bandwidth=3e9, link_latency=7e-5, message_steps=0.4),
        network=dataclasses.replace(base.network, nics=1, nic_bandwidth=1.2e9, latency=2e-4),
        efficiency=dataclasses.replace(base.efficiency, gemm=0.8, memory=0.5, link=0.6, network=0.7, p2p=0.9),
    )
