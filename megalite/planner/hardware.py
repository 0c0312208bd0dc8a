"""Machines and software stacks as data: accelerators, nodes, network, what of their peaks is reached, what is fused.

Bandwidths are bytes per second in one direction, latencies seconds, peaks FLOP/s of dense products.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.config.reading import AT_LEAST_ONE, FRACTION, OR_ZERO, PRECISIONS, build, find_file, read_yaml, write_yaml

_CLUSTERS, _STACKS = Path(__file__).parent / "clusters", Path(__file__).parent / "stacks"


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device, as one rank has it."""

    name: str
    memory_bytes: float
    memory_bandwidth: float
    peak_flops: Mapping[str, float] = field(metadata={"keys": PRECISIONS})  # by precision; missing: not supported
    multiprocessors: int  # tiles of a matrix product that run at once (1: products are not cut into waves)
    kernel_seconds: float = field(metadata=OR_ZERO)  # what every operation takes on the device on top of its work
    asynchronous: bool  # the host runs ahead: the slower of host and device decides. On a CPU their times add up
    host_bandwidth: float = 2.5e10  # of one link to host memory, each way: of PCIe 4.0 with 16 lanes, in large copies
    watts: float | None = None  # that it draws in training at full clock, or may draw at most
    # Watts that it is held to. Power goes with the third power of the clock (voltage falls with it), so that products run at
    # (power_limit / watts)^power_exponent of their rate; memory and links keep theirs.
    power_limit: float | None = None
    power_exponent: float = field(default=1.0 / 3.0, metadata=FRACTION)

    @property
    def clock(self) -> float:
        """Share of the full clock at which products run."""
        capped = self.watts is not None and self.power_limit is not None
        return min(1.0, self.power_limit / self.watts) ** self.power_exponent if capped else 1.0  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True)
class Node:
    accelerators: int
    link_bandwidth: float  # of one accelerator to the others of its node
    link_latency: float = field(metadata=OR_ZERO)  # of one step of a collective inside the node
    # On a CPU with more ranks than cores: the rates above are what a rank has while all others compute; while some wait,
    # the others have their cores. Measured, it is a little less than their numbers say: not all of a core is put to use.
    ranks_per_core: float = field(default=1.0, metadata=AT_LEAST_ONE)
    # Latency of a message inside the node, in link_latencies: only the receiver waits for it.
    message_steps: float = field(default=1.0, metadata=OR_ZERO)
    # Where tensor-parallel ranks exchange through their host's memory: bytes per second that each writes and reads there, and
    # the seconds of an operation. Default: they exchange over the links.
    shared_memory_bandwidth: float | None = None
    shared_memory_latency: float = field(default=0.0, metadata=OR_ZERO)
    host_memory_bytes: float | None = None  # that its accelerators share equally for what is offloaded
    host_links: int | None = None  # links to host memory, which its accelerators share equally; default: one for each


@dataclass(frozen=True, kw_only=True)
class Network:
    nics: int  # adapters of a node, which its accelerators share equally
    nic_bandwidth: float
    latency: float = field(metadata=OR_ZERO)
    pod_nodes: int | None = (
        None  # that reach each other at the full rate of their adapters: a pod, a rail group; default: all
    )
    oversubscription: float = field(default=1.0, metadata=AT_LEAST_ONE)  # of a pod's adapters over its links to others


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the figures above that training reaches."""

    # Of peak_flops, by a product that fills all multiprocessors with whole tiles.
    gemm: float = field(metadata=FRACTION)
    memory: float = field(metadata=FRACTION)  # of memory_bandwidth, by operations that only read and write
    link: float = field(metadata=FRACTION)  # of link_bandwidth, by collectives of large tensors inside a node
    network: float = field(metadata=FRACTION)  # of a rank's share of the adapters, by collectives across nodes
    p2p: float = field(metadata=FRACTION)  # of that share (in a node: of its links), by messages between stages
    # Of what a group over all of a node reaches, by a group of two; by groups in between in powers of it.
    small_groups: float = field(default=1.0, metadata=FRACTION)
    # Of stragglers: the standard deviation over devices of the time that the same work takes, as a share of its mean.
    device_deviation: float = field(default=0.0, metadata={"least": 0.0, "most": 1.0})


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes; how many is the run's affair. `provenance` says of `accelerator`, `node`, `network` and each
    `efficiency.NAME` where the figures are from: vendor, fitted on, measured by, or assumed."""

    name: str
    description: str
    accelerator: Accelerator
    node: Node
    network: Network
    efficiency: Efficiency
    provenance: Mapping[str, str]
    gpu_hour_price: float | None = None  # of one accelerator with its share of the node, in any money

    def peak(self, precision: str) -> float:
        """FLOP/s at that precision. Raises ConfigError if the accelerator has none."""
        peaks = self.accelerator.peak_flops
        if precision not in peaks:
            works = "fp16" if "fp16" in peaks else min(peaks, key=list(PRECISIONS).index)
            raise ConfigError(f"cluster {self.name} has no peak for {precision}, but {', '.join(peaks)}; use --{works}")
        return peaks[precision]

    @property
    def nic_share(self) -> float:
        """Bytes per second of one accelerator to other nodes if all of its node send at once."""
        return self.network.nics * self.network.nic_bandwidth / self.node.accelerators

    @property
    def pod(self) -> float:
        """Accelerators of a pod; endless without pods."""
        return self.node.accelerators * (self.network.pod_nodes or math.inf)

    @property
    def host_share(self) -> float:
        """Bytes per second between one accelerator and host memory, each way, if all of its node copy at once."""
        links = self.node.host_links or self.node.accelerators
        return self.accelerator.host_bandwidth * min(1.0, links / self.node.accelerators)


@dataclass(frozen=True, kw_only=True)
class SoftwareStack:
    name: str
    description: str
    fused_attention: bool  # scores never reach memory; the half above the diagonal is not computed (flash attention)
    fused_softmax: bool  # scale, mask and softmax are one pass over the scores (only without fused attention)
    fused_elementwise: bool  # bias and activation, and dropout and residual sum, are one pass each
    # Share of tensor parallelism's collectives that runs beside the products next to them, as far as these last.
    overlap_tensor_parallel: float = field(default=0.0, metadata=OR_ZERO)
    overlap_gradients: bool  # gradients are summed while the last backward runs, where the config asks for it
    half_gradients: bool  # gradients are summed in the precision of activations; else as the config says
    attention_efficiency: float = field(metadata=FRACTION)  # of the GEMM efficiency, in fused attention's products
    # Time of the operations on activations between products over their bytes at the cluster's memory rate: more than 1
    # where arithmetic bounds them, or where one pass counted is several.
    elementwise_slowdown: float
    operation_seconds: float = field(metadata=OR_ZERO)  # the host's time to start one operation
    # The same of a collective of tensor parallelism over two ranks. Over t it takes t/2 times that: it begins when the
    # last of them has started it.
    collective_seconds: float = field(metadata=OR_ZERO)
    microbatch_seconds: float = field(metadata=OR_ZERO)  # on top of each stage's forward, and of its backward
    step_seconds: float = field(metadata=OR_ZERO)  # on top of each step: data, norm, scheduler
    provenance: Mapping[str, str]  # name of a figure -> where it is from
    # A norm is one pass, and so is a rotation of positions; else each step of them is one, in fp32: Python without a compiler.
    fused_norm: bool = True
    # How many times as fast layers' products are in 8 bits, casts left out, which are counted by their bytes; 0: in 16.
    float8_rate: float = field(default=0.0, metadata=OR_ZERO)
    float8_gathers: bool = False  # sequence parallelism gathers in 8 bits
    overlap_tensor_gradients: bool = False  # the sum of an input's gradient runs beside the weight gradient's product
    overlap_gathers: bool = False  # sequence parallelism's second gather runs beside the input gradient's product
    fused_loss: bool = True  # else the logits are copied in fp32, and each step of the loss is a pass over the copy
    attention_backward: float = field(default=1.0, metadata=FRACTION)  # of that rate, in fused attention's backward
    # Recompute of a layer or an MLP ends when the last tensor that the backward reads is there: before the last product.
    recompute_stops_early: bool = False
    # Passes over states, gradients and parameters that the optimizer makes, over those of one kernel for all of it.
    optimizer_slowdown: float = 1.0
    # Of the time of communication that runs beside computation, what the computation takes longer: both use the same
    # multiprocessors and memory.
    overlap_cost: float = field(default=0.0, metadata=OR_ZERO)
    # Of steps that were measured and not fitted on, 80 % lie within this share of the prediction, above or below.
    spread: float = field(default=0.3, metadata=OR_ZERO)
    softmax_multiple: int = 1  # the fused softmax takes batches times heads (of a rank) in multiples of this
    product_rate: float = 1.0  # of the cluster's rate of products; above 1 if that was fitted on slower libraries


def cluster_names() -> list[str]:
    return sorted(path.stem for path in _CLUSTERS.glob("*.yaml"))


def load_cluster(name_or_path: str) -> Cluster:
    """A cluster by its name or from a file. Raises ConfigError if there is none, or naming a field that is not legal or
    has no provenance."""
    path = find_file(name_or_path, _CLUSTERS, kind="cluster")
    cluster = build(Cluster, read_yaml(path, kind="cluster"), f"cluster file {path}")
    if cluster.accelerator.power_limit is not None and cluster.accelerator.watts is None:
        raise ConfigError(
            f"cluster file {path}: accelerator: power_limit has no effect without watts; add e.g. watts: 700.0"
        )
    if cluster.network.oversubscription > 1.0 and cluster.network.pod_nodes is None:
        raise ConfigError(
            f"cluster file {path}: network: oversubscription has no effect without pod_nodes; add e.g. pod_nodes: 32"
        )
    shares = {f"efficiency.{f.name}": getattr(cluster.efficiency, f.name) != f.default for f in fields(Efficiency)}
    needed = {"accelerator": True, "node": True, "network": True, **shares}
    needed["gpu_hour_price"] = cluster.gpu_hour_price is not None
    _check_provenance(f"cluster file {path}", cluster.provenance, needed)
    return cluster


def load_stack(name_or_path: str) -> SoftwareStack:
    """A stack by its name or from a file; raises as `load_cluster`."""
    path = find_file(name_or_path, _STACKS, kind="stack")
    stack = build(SoftwareStack, read_yaml(path, kind="stack"), f"stack file {path}")
    needed = {f.name: getattr(stack, f.name) != f.default for f in fields(SoftwareStack) if f.type is float}
    _check_provenance(f"stack file {path}", stack.provenance, needed)
    return stack


def _check_provenance(where: str, given: Mapping[str, str], needed: Mapping[str, bool]) -> None:
    """`needed`: figure -> it must be there; those that are at their default need not."""
    for name in [name for name, must in needed.items() if must and name not in given]:
        raise ConfigError(f"{where}: provenance: {name} is missing; say vendor, measured, fitted or assumed")
    for name in given.keys() - needed.keys():
        raise ConfigError(f"{where}: provenance: unknown name {name} (there are {', '.join(needed)})")


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    write_yaml(cluster, path, header="Bytes, seconds, FLOP/s; bandwidths in one direction. docs/planner.md")


def save_stack(stack: SoftwareStack, path: str | Path) -> None:
    write_yaml(stack, path, header="Seconds of the host; what is fused and what overlaps. docs/planner.md")


def stack_file(cluster: Path) -> Path:
    """Where the stack goes that is fitted together with a cluster: `mine.yaml` -> `mine-stack.yaml`."""
    return cluster.with_name(f"{cluster.stem}-stack.yaml")


def refuse_taken(path: Path, flag: str) -> None:
    """Raise ConfigError if a fit could not be written to `path`: known before hours of runs, not after them."""
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{flag}: {path} must end in .yaml, e.g. {path.name or 'mine'}.yaml")
    for each in (path, stack_file(path)):
        if each.exists():
            raise ConfigError(f"{flag}: {each} is there already; give the name of a new file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag}: there is no folder {path.parent}; give a file in one that exists")


def save_machine(cluster: Cluster, stack: SoftwareStack, path: Path) -> Path:
    """Write a fit under the files' own names: the cluster to `path`, the stack to `stack_file(path)`, which is returned."""
    beside = stack_file(path)
    save_cluster(replace(cluster, name=path.stem), path)
    save_stack(replace(stack, name=beside.stem), beside)
    return beside


def cluster_of_device(name: str) -> str | None:
    """The cluster that comes with megalite for a device of that name ("NVIDIA H100 80GB HBM3"); None if there is none."""
    found = [each for each in cluster_names() if each.removeprefix("dgx-").upper() in name.upper()]
    return max(found, key=len, default=None)  # B200 is in GB200 too
