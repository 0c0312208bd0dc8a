"""Machines and software stacks as data: accelerators, nodes, network, what of their peaks is reached, what is fused.

Bandwidths are bytes a second in one direction, latencies seconds, peaks FLOP/s of dense products.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.config.records import AT_LEAST_ONE, FRACTION, OR_ZERO, PRECISIONS, build, find_file, read_yaml, write_yaml

_CLUSTERS = Path(__file__).parent / "clusters"
SOURCES = ("accelerator", "node", "network")
"""Sections of vendor's figures: one line of provenance each; each efficiency has a line of its own."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device, as one rank has it."""

    name: str
    memory_bytes: float
    memory_bandwidth: float
    peak_flops: Mapping[str, float] = field(metadata={"keys": PRECISIONS})
    """Precision -> FLOP/s of the fastest units that it runs on; what is not listed is not supported."""
    multiprocessors: int  # tiles of a matrix product that run at once (1: products are not cut into waves)
    kernel_seconds: float = field(metadata=OR_ZERO)  # what every operation takes on the device on top of its work
    asynchronous: bool
    """The host starts operations ahead of the device, so that the slower of the two decides; on a CPU their times add
    up."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """The machine around some accelerators."""

    accelerators: int
    link_bandwidth: float  # of one accelerator to the others of its node
    link_latency: float = field(metadata=OR_ZERO)  # of one step of a collective inside the node
    ranks_per_core: float = field(default=1.0, metadata=AT_LEAST_ONE)
    """On a CPU with more ranks than cores: the rates above are what a rank has while all others compute; while some wait,
    the others have their cores. Measured, it is a little less than their numbers say: not all of a core is put to use."""
    message_steps: float = field(default=1.0, metadata=OR_ZERO)
    """Latency of a message inside the node, in `link_latency`s: nobody but the receiver waits for it."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Between nodes."""

    nics: int  # adapters of a node, which its accelerators share equally
    nic_bandwidth: float
    latency: float = field(metadata=OR_ZERO)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the figures above that training reaches."""

    gemm: float = field(metadata=FRACTION)
    """Of peak_flops, by a product that fills all multiprocessors with whole tiles."""
    memory: float = field(metadata=FRACTION)  # of memory_bandwidth, by operations that only read and write
    link: float = field(metadata=FRACTION)  # of link_bandwidth, by collectives of large tensors inside a node
    network: float = field(metadata=FRACTION)
    """Of a rank's share of the adapters, by collectives of large tensors across nodes."""
    p2p: float = field(metadata=FRACTION)
    """Of a rank's share of the adapters (in a node: of its links), by messages between pipeline stages."""
    small_groups: float = field(default=1.0, metadata=FRACTION)
    """Of what a group over all of a node reaches, by a group of two; by groups in between in powers of it."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes all alike; how many is the run's affair."""

    name: str
    description: str
    accelerator: Accelerator
    node: Node
    network: Network
    efficiency: Efficiency
    provenance: Mapping[str, str]
    """`accelerator`, `node`, `network` and `efficiency.NAME` -> where the figures are from: vendor, fitted on, measured
    by, or assumed."""

    def peak(self, precision: str) -> float:
        """FLOP/s at that precision. Raises ConfigError: the accelerator has none."""
        peaks = self.accelerator.peak_flops
        if precision not in peaks:
            raise ConfigError(
                f"cluster {self.name} has no peak for {precision}: {self.accelerator.name} has {', '.join(peaks)}; use "
                f"--{min(peaks, key=list(PRECISIONS).index) if 'fp16' not in peaks else 'fp16'}"
            )
        return peaks[precision]

    @property
    def nic_share(self) -> float:
        """Bytes a second of one accelerator to other nodes if all of its node send at once."""
        return self.network.nics * self.network.nic_bandwidth / self.node.accelerators


def cluster_names() -> list[str]:
    """Names of the files that come with megalite, sorted."""
    return sorted(path.stem for path in _CLUSTERS.glob("*.yaml"))


def load_cluster(name_or_path: str) -> Cluster:
    """A cluster by its name or from a file. Raises ConfigError: there is none (the nearest names are given), or a field
    is unknown, missing, of another type or out of range, or has no provenance."""
    path = find_file(name_or_path, _CLUSTERS, kind="cluster")
    cluster = build(Cluster, read_yaml(path, kind="cluster"), f"cluster file {path}")
    known = [*SOURCES, *(f"efficiency.{each.name}" for each in fields(Efficiency))]
    left_out = {
        f"efficiency.{each.name}"
        for each in fields(Efficiency)
        if getattr(cluster.efficiency, each.name) == each.default
    }
    for name in known:
        if name not in cluster.provenance and name not in left_out:
            raise ConfigError(
                f"cluster file {path}: provenance: {name} is missing; say where the figures are from, such as vendor, "
                f"measured with ..., fitted on ..., or assumed"
            )
    for name in cluster.provenance:
        if name not in known:
            raise ConfigError(f"cluster file {path}: provenance: unknown name {name} (there are {', '.join(known)})")
    return cluster


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a file that `load_cluster` reads back equal. Raises ConfigError: it cannot be written."""
    write_yaml(cluster, path, header="Bytes, seconds, FLOP/s; bandwidths in one direction. docs/planner.md")


def cluster_of_device(name: str) -> str | None:
    """The cluster that comes with megalite for a device that calls itself so ("NVIDIA H100 80GB HBM3"); None if none does."""
    words = name.upper()
    return next((each for each in cluster_names() if each.removeprefix("dgx-").upper() in words), None)


_STACKS = Path(__file__).parent / "stacks"


@dataclass(frozen=True, kw_only=True)
class SoftwareStack:
    """One way to run the same model."""

    name: str
    description: str
    fused_attention: bool
    """Scores never reach memory, and the half above the diagonal is not computed (flash attention)."""
    fused_softmax: bool  # scale, mask and softmax are one pass over the scores (only without fused attention)
    fused_elementwise: bool  # bias and activation, and dropout and residual sum, are one pass each
    overlap_tensor_parallel: bool  # collectives of tensor parallelism run beside the products next to them
    overlap_gradients: bool  # gradients are summed while the last backward runs, where the config asks for it
    half_gradients: bool
    """Gradients are added up and summed over replicas in the precision of activations; else as the config says."""
    scatter_messages: bool
    """A message between stages is cut over tensor-parallel ranks, and put together on the other side."""
    attention_efficiency: float = field(metadata=FRACTION)
    """Of the GEMM efficiency, what fused attention reaches in its products."""
    elementwise_slowdown: float
    """How many times longer the operations on activations between the products take than their bytes at the rate that the
    cluster's memory gives: more than 1 where arithmetic bounds them, or one pass counted is several."""
    operation_seconds: float = field(metadata=OR_ZERO)
    """The host's time to start one operation; a stage takes no less than all of its operations."""
    collective_seconds: float = field(metadata=OR_ZERO)
    """The same of one collective of tensor parallelism over two ranks. Over t it takes t/2 times that: it begins when the
    last of them has started it."""
    microbatch_seconds: float = field(metadata=OR_ZERO)
    """On top of each stage's forward, and of its backward, whatever they hold."""
    step_seconds: float = field(metadata=OR_ZERO)  # on top of each step: data, norm, scheduler
    provenance: Mapping[str, str]  # name of a figure -> where it is from
    overlap_tensor_gradients: bool = False
    """In the backward, the gradient of a linear layer's input is summed (or scattered) beside the product for the weight's
    gradient."""
    overlap_gathers: bool = False
    """With sequence parallelism, the backward gathers the input once more beside the product for the input's gradient."""
    fused_loss: bool = True
    """The loss reads the logits as they are; else it copies them in fp32 and each step of it is a pass over the copy."""
    softmax_multiple: int = 1
    """The fused softmax takes batches times heads (of a rank) in multiples of this; others go step by step."""
    product_rate: float = 1.0
    """Of the rate of products that the cluster file says, what this stack's libraries reach; more than 1 if that was
    fitted on slower ones."""


_FIGURES = (
    *("attention_efficiency", "elementwise_slowdown", "operation_seconds", "collective_seconds"),
    *("microbatch_seconds", "step_seconds", "product_rate"),
)


def stack_names() -> list[str]:
    """Names of the files that come with megalite, sorted."""
    return sorted(path.stem for path in _STACKS.glob("*.yaml"))


def load_stack(name_or_path: str) -> SoftwareStack:
    """A stack by its name or from a file. Raises ConfigError: there is none (the nearest names are given), or a field
    is unknown, missing, of another type or out of range, or a figure has no provenance."""
    path = find_file(name_or_path, _STACKS, kind="stack")
    stack = build(SoftwareStack, read_yaml(path, kind="stack"), f"stack file {path}")
    for name in _FIGURES:
        if name not in stack.provenance and not (name == "product_rate" and stack.product_rate == 1.0):
            raise ConfigError(
                f"stack file {path}: provenance: {name} is missing; say where the figure is from, such as measured with "
                f"..., fitted on ..., or assumed"
            )
    for name in stack.provenance:
        if name not in _FIGURES:
            raise ConfigError(f"stack file {path}: provenance: unknown name {name} (there are {', '.join(_FIGURES)})")
    return stack


def save_stack(stack: SoftwareStack, path: str | Path) -> None:
    """Write a file that `load_stack` reads back equal. Raises ConfigError: it cannot be written."""
    write_yaml(stack, path, header="Seconds of the host; what is fused and what overlaps. docs/planner.md")
