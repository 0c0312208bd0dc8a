"""Machines and software stacks as data: accelerators, nodes, networks, their efficiencies, and fused operations.

Bandwidths are bytes per second in one direction, latencies seconds, peaks FLOP/s of dense products."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.config.reading import AT_LEAST_ONE, FRACTION, OR_ZERO, PRECISIONS, build, find_file, read_yaml, write_yaml

_CLUSTERS, _STACKS = Path(__file__).parent / "clusters", Path(__file__).parent / "stacks"


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device, used by one rank."""

    name: str
    memory_bytes: float
    memory_bandwidth: float
    peak_flops: Mapping[str, float] = field(metadata={"keys": PRECISIONS})  # by precision; unsupported ones are missing
    multiprocessors: int  # tiles of a product that run in parallel (1: no waves)
    kernel_seconds: float = field(metadata=OR_ZERO)  # overhead of each operation on the device
    asynchronous: bool  # host and device overlap, the slower one decides; on a CPU their times add up
    host_bandwidth: float = 2.5e10  # of a link to host memory, per direction: PCIe 4.0 x16, large copies
    watts: float | None = None  # power drawn in training at full clock, or its maximum
    # Power cap. Power grows with the third power of the clock, as voltage falls with it: products run at
    # (power_limit / watts)^power_exponent of their rate; memory and links keep theirs.
    power_limit: float | None = None
    power_exponent: float = field(default=1.0 / 3.0, metadata=FRACTION)

    @property
    def clock(self) -> float:
        """Fraction of the full clock at which products run."""
        capped = self.watts is not None and self.power_limit is not None
        return min(1.0, self.power_limit / self.watts) ** self.power_exponent if capped else 1.0  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True)
class Node:
    accelerators: int
    link_bandwidth: float  # between one accelerator and the others of its node
    link_latency: float = field(metadata=OR_ZERO)  # per step of a collective within the node
    # On a CPU with more ranks than cores, the rates above apply while all ranks compute; waiting ranks leave their
    # cores to the others. A measured value is below the ratio of ranks to cores, as no core is fully used.
    ranks_per_core: float = field(default=1.0, metadata=AT_LEAST_ONE)
    # Latency of a message within the node, in link_latencies: only the receiver waits for it.
    message_steps: float = field(default=1.0, metadata=OR_ZERO)
    # If tensor-parallel ranks exchange through host memory: bytes per second that each rank writes and reads, and
    # seconds per operation. Default: they exchange over the links.
    shared_memory_bandwidth: float | None = None
    shared_memory_latency: float = field(default=0.0, metadata=OR_ZERO)
    host_memory_bytes: float | None = None  # shared equally by its accelerators for offloading
    host_links: int | None = None  # links to host memory, shared equally; default: one per accelerator


@dataclass(frozen=True, kw_only=True)
class Network:
    nics: int  # adapters per node, shared equally by its accelerators
    nic_bandwidth: float
    latency: float = field(metadata=OR_ZERO)
    pod_nodes: int | None = None  # nodes that reach each other at full rate (a pod, a rail group); default: all
    oversubscription: float = field(default=1.0, metadata=AT_LEAST_ONE)  # rate of a pod's adapters / of its spine links


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of the rates above that training reaches."""

    # Of peak_flops, for a product that fills all multiprocessors with whole tiles.
    gemm: float = field(metadata=FRACTION)
    memory: float = field(metadata=FRACTION)  # of memory_bandwidth, for operations that only read and write
    link: float = field(metadata=FRACTION)  # of link_bandwidth, for collectives of large tensors within a node
    network: float = field(metadata=FRACTION)  # of a rank's share of the adapters, for collectives across nodes
    p2p: float = field(metadata=FRACTION)  # of that share (within a node: of the links), for messages between stages
    # Rate of a group of two relative to a group of the whole node; sizes in between use powers of it.
    small_groups: float = field(default=1.0, metadata=FRACTION)
    # Stragglers: standard deviation over devices of the time for the same work, as a fraction of the mean.
    device_deviation: float = field(default=0.0, metadata={"least": 0.0, "most": 1.0})


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes; the run decides how many. `provenance` has the source of `accelerator`, `node`, `network` and each
    `efficiency.NAME`: vendor, fitted on, measured by, or assumed."""

    name: str
    description: str
    accelerator: Accelerator
    node: Node
    network: Network
    efficiency: Efficiency
    provenance: Mapping[str, str]
    gpu_hour_price: float | None = None  # per accelerator with its share of the node, in any currency

    def peak(self, precision: str) -> float:
        """Return the FLOP/s at a precision. Raises ConfigError if the accelerator does not support it."""
        peaks = self.accelerator.peak_flops
        if precision not in peaks:
            works = "fp16" if "fp16" in peaks else min(peaks, key=list(PRECISIONS).index)
            raise ConfigError(
                f"cluster {self.name} has no peak for {precision}, only {', '.join(peaks)}; use --{works}"
            )
        return peaks[precision]

    @property
    def nic_share(self) -> float:
        """Bytes per second from one accelerator to other nodes if all accelerators of its node send."""
        return self.network.nics * self.network.nic_bandwidth / self.node.accelerators

    @property
    def pod(self) -> float:
        """Accelerators per pod; infinite without pods."""
        return self.node.accelerators * (self.network.pod_nodes or math.inf)

    @property
    def host_share(self) -> float:
        """Bytes per second between one accelerator and host memory, per direction, if all of its node copy."""
        links = self.node.host_links or self.node.accelerators
        return self.accelerator.host_bandwidth * min(1.0, links / self.node.accelerators)


@dataclass(frozen=True, kw_only=True)
class SoftwareStack:
    name: str
    description: str
    fused_attention: bool  # flash attention: scores stay on chip; the half above the diagonal is skipped
    fused_softmax: bool  # scale, mask and softmax in one pass (only without fused attention)
    fused_elementwise: bool  # one pass for bias and activation, one for dropout and residual sum
    # Fraction of tensor-parallel collectives that overlaps with adjacent matrix products, limited by their time.
    overlap_tensor_parallel: float = field(default=0.0, metadata=OR_ZERO)
    overlap_gradients: bool  # gradients are summed during the last backward, if the config enables it
    half_gradients: bool  # gradients are summed in the activations' precision instead of the config's
    attention_efficiency: float = field(metadata=FRACTION)  # relative to the GEMM efficiency, for fused attention
    # Time of elementwise operations relative to their bytes at the cluster's memory rate: above 1 if arithmetic limits
    # them, or if one counted pass is several.
    elementwise_slowdown: float
    operation_seconds: float = field(metadata=OR_ZERO)  # the host's time to start one operation
    # The host's time to start a tensor-parallel collective over two ranks; over t ranks t/2 times that, as it begins
    # when the last rank has started it.
    collective_seconds: float = field(metadata=OR_ZERO)
    microbatch_seconds: float = field(metadata=OR_ZERO)  # added to each stage's forward, and to its backward
    step_seconds: float = field(metadata=OR_ZERO)  # added to each step: data, norm, scheduler
    provenance: Mapping[str, str]  # name of a figure -> its source
    # A norm and a rotation of positions are one pass each; else each of their steps is one, in fp32.
    fused_norm: bool = True
    # Speed of 8-bit products of layers relative to 16-bit ones, without casts, which count by their bytes; 0: not used.
    float8_rate: float = field(default=0.0, metadata=OR_ZERO)
    float8_gathers: bool = False  # sequence parallelism gathers in 8 bits
    overlap_tensor_gradients: bool = False  # the sum of an input gradient overlaps with the weight gradient
    overlap_gathers: bool = False  # the backward's gather of sequence parallelism overlaps with the input gradient
    fused_loss: bool = True  # else logits are copied to fp32, and each step of the loss is a pass
    attention_backward: float = field(default=1.0, metadata=FRACTION)  # backward, relative to attention_efficiency
    # Recompute of a layer or an MLP ends with the last tensor that the backward reads: before the last product.
    recompute_stops_early: bool = False
    # Memory traffic of the optimizer relative to a single fused kernel.
    optimizer_slowdown: float = 1.0
    # Slowdown of computation by overlapping communication, as a fraction of that communication's time: both use the same
    # multiprocessors and memory.
    overlap_cost: float = field(default=0.0, metadata=OR_ZERO)
    # 80 % of measured steps that were not used for fitting are within this fraction of the prediction, above or below.
    spread: float = field(default=0.3, metadata=OR_ZERO)
    # Context parallelism adds up results and gradients of blocks of keys in the activations' precision, in one pass each, and
    # sends such sums; else in fp32, in several.
    half_ring: bool = False
    softmax_multiple: int = 1  # the fused softmax requires a multiple of this as batch times heads per rank
    product_rate: float = 1.0  # relative to the cluster's; above 1 if that was fitted on slower libraries


def cluster_names() -> list[str]:
    return sorted(path.stem for path in _CLUSTERS.glob("*.yaml"))


def load_cluster(name_or_path: str) -> Cluster:
    """Load a cluster by name or from a file. Raises ConfigError for a missing file, illegal field or missing
    provenance."""
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
    """Load a stack by name or from a file; raises as `load_cluster`."""
    path = find_file(name_or_path, _STACKS, kind="stack")
    stack = build(SoftwareStack, read_yaml(path, kind="stack"), f"stack file {path}")
    needed = {f.name: getattr(stack, f.name) != f.default for f in fields(SoftwareStack) if f.type is float}
    _check_provenance(f"stack file {path}", stack.provenance, needed)
    return stack


def _check_provenance(where: str, found: Mapping[str, str], needed: Mapping[str, bool]) -> None:
    """`needed`: figure -> whether it is required; figures at their default are not."""
    for name in [name for name, required in needed.items() if required and name not in found]:
        raise ConfigError(f"{where}: provenance: {name} is missing; set it to vendor, measured, fitted or assumed")
    for name in found.keys() - needed.keys():
        raise ConfigError(f"{where}: provenance: unknown name {name} (known: {', '.join(needed)})")


def assumed_figures(provenance: Mapping[str, str]) -> list[str]:
    """List assumed figures, whole or in part: `accelerator.host_bandwidth` of `vendor (...); host_bandwidth assumed`."""
    found = []
    for name, source in provenance.items():
        parts = (re.match(r"(\w+ )?assumed\b", part) for part in source.split("; "))
        found += [f"{name}.{part[1].strip()}" if part[1] else name for part in parts if part]
    return found


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    write_yaml(cluster, path, header="Bytes, seconds, FLOP/s; bandwidths per direction. docs/planner.md")


def save_stack(stack: SoftwareStack, path: str | Path) -> None:
    write_yaml(stack, path, header="Seconds of the host; what is fused and what overlaps. docs/planner.md")


def stack_file(cluster: Path) -> Path:
    """Return the path of the stack that is fitted with a cluster: `mine.yaml` -> `mine-stack.yaml`."""
    return cluster.with_name(f"{cluster.stem}-stack.yaml")


def require_new_file(path: Path, flag: str) -> None:
    """Raise ConfigError, before hours of runs, if a fit could not be written to `path`."""
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{flag}: {path} must end in .yaml, e.g. {path.name or 'mine'}.yaml")
    for each in (path, stack_file(path)):
        if each.exists():
            raise ConfigError(f"{flag}: {each} exists already; use the name of a new file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag}: folder {path.parent} does not exist; use an existing folder")


def save_machine(cluster: Cluster, stack: SoftwareStack, path: Path) -> Path:
    """Write the cluster to `path` and the stack to `stack_file(path)`, each named after its file; return the latter."""
    stack_path = stack_file(path)
    save_cluster(replace(cluster, name=path.stem), path)
    save_stack(replace(stack, name=stack_path.stem), stack_path)
    return stack_path


def cluster_of_device(name: str) -> str | None:
    """Return the included cluster for a device name such as "NVIDIA H100 80GB HBM3", or None."""
    found = [each for each in cluster_names() if each.removeprefix("dgx-").upper() in name.upper()]
    return max(found, key=len, default=None)  # "GB200" contains "B200"
