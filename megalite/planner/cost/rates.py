# ruff: noqa: RUF009  (`_of` is a `field`)
"""`Workload` has the sizes that the cost formulas read; functions give the time of products, collectives and messages.

All functions broadcast: a field is a number or an array over layouts, so the search prices a million layouts with the
formulas for one. Symbols: b micro batch, s sequence, h hidden size, a heads, g key/value heads, d head size, f MLP
width, V vocabulary, E experts, t tensor-parallel size."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from megalite.config.batch import microbatch_counts
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OPTIMIZERS
from megalite.config.parallel import message_bytes
from megalite.config.run import RunConfig, cache_by_object
from megalite.config.training import LOSSES
from megalite.partition.activations import ELEMENT_BYTES, rows_per_choice
from megalite.partition.pipeline import placement_of
from megalite.partition.stages import parts_of_message
from megalite.pipeline.ir.simulate import Link
from megalite.planner.hardware import Cluster, SoftwareStack

Number = Any  # a float, or a numpy array over layouts


def _of(value: Callable[[RunConfig], Any]) -> Any:
    """A field of `Workload` that is computed from a config by `value`."""
    return field(metadata={"of": value})


def _recomputes(module: str) -> Any:
    """Whether selective recompute includes a module (1) or not (0)."""
    return _of(lambda c: c.training.recompute_granularity == "selective" and module in c.training.recompute_modules)


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Sizes of a microbatch on one rank's part of a layer. Flags are 0 or 1, so that they can be arrays too."""

    precision: str
    element: float = _of(lambda c: ELEMENT_BYTES[c.training.precision])  # bytes of an activation
    batch: Number = _of(lambda c: c.training.micro_batch_size)  # b: sequences per microbatch
    sequence: Number = _of(lambda c: c.training.seq_length)
    hidden: Number = _of(lambda c: c.model.hidden_size)
    heads: Number = _of(lambda c: c.model.num_attention_heads)
    groups: Number = _of(lambda c: c.model.query_groups)
    head_size: Number = _of(lambda c: c.model.head_size)
    value_size: Number = _of(lambda c: c.model.value_size)  # of a head's value
    latent: Number = _of(lambda c: c.model.multi_latent_attention)  # multi-latent attention
    q_rank: Number = _of(lambda c: c.model.q_lora_rank or 0)  # width of the query latent; 0 without
    kv_rank: Number = _of(lambda c: c.model.kv_lora_rank)
    shared_key: Number = _of(lambda c: c.model.qk_pos_emb_head_dim)  # width of the key part that all heads share
    ffn: Number = _of(lambda c: c.model.ffn_size)
    has_mlp: Number = _of(lambda c: _share_with_mlp(c.model))  # share of the layers without experts
    gates: Number = _of(lambda c: 1 + c.model.is_gated)  # matrices before the MLP's nonlinearity
    vocabulary: Number = _of(lambda c: c.model.padded_vocab_size)
    gathers_logits: Number = _of(lambda c: c.training.loss not in LOSSES.builtin)
    keys: Number = _of(lambda c: _keys(c))
    rope: Number = _of(lambda c: c.model.position_embedding_type == "rope")
    norms: Number = _of(lambda c: 2 * c.model.pre_norms + 2 * c.model.post_norms)  # over hidden size, per layer
    qk_norm: Number = _of(lambda c: c.model.qk_norm)
    qk_norm_all_heads: Number = _of(lambda c: c.model.qk_norm_all_heads)
    # Logit soft-capping, which fused attention does not support.
    softcap: Number = _of(lambda c: c.model.attn_logit_softcapping is not None)
    mtp_layers: Number = _of(lambda c: c.model.mtp_num_layers)  # multi-token prediction (MTP) layers
    hidden_dropout: Number = _of(lambda c: c.model.hidden_dropout > 0)
    attention_dropout: Number = _of(lambda c: c.model.attention_dropout > 0)
    experts: Number = _of(lambda c: c.model.num_experts or 0)  # E of a MoE layer
    topk: Number = _of(lambda c: c.model.moe_router_topk * rows_per_choice(c))  # experts per token, after capacity
    expert_ffn: Number = _of(lambda c: c.model.expert_ffn_size)
    # Share of layers with linear attention.
    linear: Number = _of(lambda c: sum(map(c.model.is_linear_layer, range(c.model.num_layers))) / c.model.num_layers)
    linear_channels: Number = _of(lambda c: c.model.linear_channels[1])  # projected for linear attention
    linear_values: Number = _of(lambda c: c.model.linear_num_value_heads)  # its value heads
    linear_value_size: Number = _of(lambda c: c.model.linear_value_head_dim)
    linear_key_size: Number = _of(lambda c: c.model.linear_key_head_dim)
    linear_corrects: Number = _of(lambda c: c.model.linear_corrects)
    index_heads: Number = _of(lambda c: c.model.dsa_indexer_n_heads * c.model.is_sparse)  # of sparse attention
    index_size: Number = _of(lambda c: c.model.dsa_indexer_head_dim)
    output_gate: Number = _of(lambda c: c.model.attention_output_gate)
    # Width of the shared experts; 0 without.
    shared_ffn: Number = _of(lambda c: c.model.moe_shared_expert_intermediate_size or 0)
    tp: Number = _of(lambda c: c.parallel.tp)
    cp: Number = _of(lambda c: c.parallel.cp)
    ep: Number = _of(lambda c: c.parallel.ep)
    expert_tp: Number = _of(lambda c: c.parallel.expert_tp)
    dp: Number = _of(lambda c: c.parallel.dp)
    pp: Number = _of(lambda c: c.parallel.pp)
    # dp varies faster over ranks than pp (1), or slower (0).
    order_dp_first: Number = _of(lambda c: c.parallel.rank_order == "tp-cp-ep-dp-pp")
    # Microbatches that use an 8-bit weight before it is cast again.
    weight_uses: Number = _of(lambda c: 1 if c.parallel.strategy.shards_parameters else microbatch_counts(c)[-1])
    sequence_parallel: Number = _of(lambda c: c.parallel.sequence_parallel)
    # Tensor-parallel ranks of a host may exchange through its memory.
    shared_memory: Number = _of(lambda c: c.parallel.shared_memory_collectives)
    scatters_messages: Number = _of(lambda c: c.parallel.scatter_gather_tensors_in_pipeline)
    message_share: Number = _of(lambda c: _message_share(c))
    # Largest number of context-parallel ranks that exchange heads; keys and values come from the others.
    heads_limit: Number = _of(lambda c: math.inf if c.parallel.cp_comm_type == "a2a" else c.parallel.cp_heads)
    # Keys and values come by an all-gather (1) or a ring (0).
    gathers_keys: Number = _of(lambda c: c.parallel.cp_comm_type == "allgather")
    recompute_full: Number = _of(lambda c: c.training.recompute_granularity == "full")
    recompute_core: Number = _recomputes("core_attn")
    recompute_up: Number = _recomputes("mla_up_proj")
    recompute_activation: Number = _recomputes("mlp_act")
    recompute_norm: Number = _recomputes("layernorm")
    recompute_mlp: Number = _recomputes("mlp")
    recompute_moe: Number = _recomputes("moe")
    recompute_shared: Number = _recomputes("shared_experts")

    @property
    def tokens(self) -> Number:
        """Tokens of a microbatch on one rank: b·s/cp."""
        return self.batch * self.sequence / self.cp

    @property
    def exact(self) -> float:
        """Bytes of an fp32 (fp64) number / bytes of an activation."""
        return max(4.0, self.element) / self.element

    @property
    def split(self) -> Number:
        """Number of ranks that divide norms, dropout and residual stream: t with sequence parallelism, else 1."""
        return 1 + (self.tp - 1) * self.sequence_parallel

    @property
    def activation_bytes(self) -> Number:
        """Bytes of the whole tensor between two layers, b·s/cp·h numbers."""
        return self.tokens * self.hidden * self.element


@cache_by_object()
def workload_of(config: RunConfig) -> Workload:
    """Return the workload of a validated config with a known vocabulary."""
    assert config.parallel.dp is not None, "validate() resolves dp"
    numbers = {each.name: float(each.metadata["of"](config)) for each in fields(Workload) if each.name != "precision"}
    return Workload(precision=config.training.precision, **numbers)


def _message_share(config: RunConfig) -> float:
    """Return the bytes of a message between stages / bytes of its tensor."""
    elements = config.training.micro_batch_size * config.training.seq_length * config.model.hidden_size
    width = ELEMENT_BYTES[config.training.precision]
    return message_bytes(config.parallel.pipeline_compression, elements, width) / (elements * width)


def _share_with_mlp(model: ModelConfig) -> float:
    layers = range(model.num_layers)
    dense, experts = (sum(map(has, layers)) for has in (model.has_dense_mlp, model.is_moe_layer))
    return dense / (model.num_layers - experts) if experts < model.num_layers else 1.0


def _keys(config: RunConfig) -> float:
    """Return the positions that a query sees before the causal mask: s, or the window. If layers with softmax attention have
    both, return the k with which the mask leaves their mean number of positions: k·(1 - k/2s)."""
    model, s = config.model, config.training.seq_length
    window = min(s, model.sliding_window or s)
    layers = model.num_layers - sum(map(model.is_linear_layer, range(model.num_layers)))
    windowed = sum(map(model.has_window, range(model.num_layers)))
    if windowed in (0, layers):
        return window if windowed else s
    share = windowed / layers
    seen = share * window * (1.0 - window / (2.0 * s)) + (1.0 - share) * s / 2.0
    return s * (1.0 - math.sqrt(max(1.0 - 2.0 * seen / s, 0.0)))


def stacked(workloads: Sequence[Workload]) -> Workload:
    """Combine workloads of one precision into one with arrays as fields."""
    first = workloads[0]
    assert all(each.precision == first.precision for each in workloads), "one precision has one peak"
    names = {each.name for each in fields(Workload)} - {"precision", "element"}
    arrays: dict[str, Any] = {name: np.array([getattr(each, name) for each in workloads]) for name in names}
    return replace(first, **arrays)


# (rows, columns) of the output tile of a multiprocessor, and its rate relative to the best: small tiles read more per
# product but fill the last wave better. Typical of vendors' libraries; assumed.
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
RAMP = 128  # steps along k that equal the time to fill a tile's pipeline and to write the tile
CORNER = 1.5  # q: sharpness of the roofline's corner; infinite if memory access overlapped fully with products


def gemm_seconds(
    m: Number, n: Number, k: Number, *, batch: Number = 1.0, element: float, peak: float, cluster: Cluster
) -> Number:
    """Return the time of `batch` products [m, k] x [k, n] in one operation.

    About max(compute, memory), with memory = (mk + kn + mn)·element / bandwidth and, for the best of `TILES`,
    compute = waves · multiprocessors · tile area · 2(k + RAMP) / (peak · efficiency); waves is the number of rounds in
    which the multiprocessors finish batch · ceil(m/rows) · ceil(n/columns) tiles. With one multiprocessor (a CPU core),
    compute = 2mnk / (peak · efficiency).

    `element`: bytes per number. `peak`: FLOP/s at the precision."""
    rate = peak * cluster.efficiency.gemm
    count = cluster.accelerator.multiprocessors
    bandwidth = cluster.accelerator.memory_bandwidth * cluster.efficiency.memory
    memory = batch * (m * k + k * n + m * n) * element / bandwidth
    if count == 1:
        compute = batch * 2.0 * m * n * k / rate
    else:
        compute = np.inf
        for rows, columns, share in TILES:
            waves = np.ceil(batch * np.ceil(m / rows) * np.ceil(n / columns) / count)
            seconds = waves * (count * rows * columns * 2.0 / share) * (k + RAMP) / rate
            compute = np.minimum(compute, seconds)
    # (compute^q + memory^q)^(1/q)
    most, least = np.maximum(compute, memory), np.minimum(compute, memory)
    return most * (1.0 + (least / most) ** CORNER) ** (1.0 / CORNER)


def with_copies(seconds: Number, volume: Number, config: RunConfig, cluster: Cluster) -> Number:
    """Return the time of an update with `volume` bytes copied from host memory and back: overlapped, except on a CPU."""
    device, passes = cluster.accelerator, OPTIMIZERS.facts(config.optimizer.optimizer).host_passes
    each = passes * volume / cluster.host_share
    return np.maximum(seconds, each) if device.asynchronous else seconds + 2.0 * each


def members_within(accelerators: float, size: Number, stride: Number) -> Number:
    """Return how many ranks of a group share a node, or pod, of `accelerators`; `stride`: ranks between neighbours."""
    return np.minimum(np.maximum(np.floor(accelerators / stride), 1.0), size)


def link_rate(members: Number, cluster: Cluster) -> Number:
    """Return the bytes per second of a ring over `members` ranks of one node. Small groups have fewer rings: a group of
    two reaches `small_groups` of the whole node's rate, and each doubling gains an equal factor."""
    rate = cluster.node.link_bandwidth * cluster.efficiency.link
    doublings = max(np.log2(cluster.node.accelerators / 2.0), 1.0)
    left = np.maximum(np.log2(cluster.node.accelerators / np.maximum(members, 2.0)), 0.0) / doublings
    return rate * cluster.efficiency.small_groups**left


def collective_seconds(
    operation: str, volume: Number, size: Number, stride: Number, cluster: Cluster, *, taking_part: float = 1.0
) -> Number:
    """Return the time of a collective of `volume` bytes (as in planner.communication); 0 in a group of one. `stride`:
    global ranks between neighbours of the group: 1 for tp, tp·cp for dp in the usual order. A ring leaves each pod once
    and the rings of a pod share its links to the spine: a group has its members' adapters there, divided by the
    oversubscription. `taking_part`: fraction of the ranks in such groups."""
    if isinstance(size, int | float) and size <= 1:  # most groups of a config
        return 0.0
    inside = members_within(cluster.node.accelerators, size, stride)
    pod, narrower = members_within(cluster.pod, size, stride), cluster.network.oversubscription
    across = inside < size
    twice = 2.0 if operation == "all-reduce" else 1.0
    part = 1.0 if operation == "send" else (size - 1.0) / size
    link = link_rate(inside, cluster)
    share = cluster.nic_share * cluster.efficiency.network
    if operation == "all-to-all":
        # Each rank sends its own data to ranks of other nodes: its adapter carries that part.
        outside = np.maximum(size - inside, (size - pod) * narrower) / size
        moved = np.where(across, volume * np.maximum(outside / share, part / link), volume * part / link)
    else:
        adapters = np.where(pod < size, np.minimum(inside, pod / (narrower * taking_part)), inside)
        moved = twice * part * volume / np.where(across, np.minimum(link, adapters * share), link)
    nodes = np.ceil(size / inside)
    # Between nodes, trees replace rings: their depth counts.
    hops = np.where(across, np.ceil(np.log2(np.maximum(nodes, 1.0))), 0.0)
    steps = 1.0 if operation == "send" else inside - 1.0
    latency = twice * (steps * cluster.node.link_latency * (1 - across * (operation == "send")))
    latency = latency + twice * hops * cluster.network.latency
    return np.where(size > 1, moved + latency, 0.0)


# Bytes that each of n ranks writes and reads in shared memory, per byte of the collective's volume: first its own part or
# tensor, then what it adds or copies.
SHARED_PASSES: Mapping[str, Callable[[Number], Number]] = {
    "all-reduce": lambda n: 1.0 + n,
    "all-gather": lambda n: 1.0 / n + 1.0,
    "reduce-scatter": lambda n: 2.0,
}


def tensor_seconds(operation: str, volume: Number, work: Workload, cluster: Cluster) -> Number:
    """Return the time of a collective over tensor-parallel ranks, which are neighbours: through host memory if the
    cluster has a measured rate, else over its links."""
    size, node = work.tp, cluster.node
    seconds = collective_seconds(operation, volume, size, 1.0, cluster)
    if node.shared_memory_bandwidth is None or operation not in SHARED_PASSES:
        return seconds
    shared = node.shared_memory_latency + SHARED_PASSES[operation](size) * volume / node.shared_memory_bandwidth
    return np.where((size > 1) & (size <= node.accelerators) & (work.shared_memory > 0), shared, seconds)


def message_seconds(volume: Number, crosses: Number, cluster: Cluster) -> tuple[Number, Number]:
    """Return (latency, seconds that the link is busy) of a message of `volume` bytes per rank between pipeline stages. It
    leaves the node unless `crosses` is 0; above 1, `crosses` divides the adapters' bandwidth."""
    adapters = cluster.nic_share / np.maximum(crosses, 1.0)
    bandwidth = np.where(crosses, adapters, cluster.node.link_bandwidth) * cluster.efficiency.p2p
    inside = cluster.node.message_steps * cluster.node.link_latency
    return np.where(crosses, cluster.network.latency, inside), volume / bandwidth


def activation_message_seconds(work: Workload, crosses: Number, cluster: Cluster) -> tuple[Number, Number]:
    """Return `message_seconds` of a microbatch's activations to the next stage; if ranks send parts of one tensor, the
    receivers' all-gather counts as latency."""
    parts = parts_of_message(work.scatters_messages, work.sequence_parallel, work.hidden, work.tp)
    latency, busy = message_seconds(work.activation_bytes * work.message_share / work.split / parts, crosses, cluster)
    return latency + np.where(parts > 1, tensor_seconds("all-gather", work.activation_bytes, work, cluster), 0.0), busy


def slowest_share(ranks: float, cluster: Cluster) -> float:
    """Return the extra time of the slowest of `ranks` devices relative to the mean: the deviation times the expected
    maximum of as many standard normal variables, by Blom's formula (1958), at most 4.4 % off."""
    return cluster.efficiency.device_deviation * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def pipeline_stride(work: Workload) -> Number:
    """Global ranks between neighbours of a pipeline."""
    return work.tp * work.cp * np.where(work.order_dp_first, work.dp, 1.0)


def pipeline_ends(stride: Number, pp: int, cluster: Cluster) -> tuple[Number, Number]:
    """Return (global ranks between the first and the last rank of a pipeline, the fraction of ranks that are an end of
    one). The ends of a pipeline within a node are on the same node, whatever their distance."""
    within = stride * pp <= cluster.node.accelerators
    return np.where(within, stride, stride * max(pp - 1, 1)), 1.0 / members_within(cluster.pod, pp, stride)


def sharing_ranks(stride: Number, pp: int, cluster: Cluster) -> Number:
    """Ranks per core if a pipeline's stages share cores; 1 if the pipeline leaves the node, as then all its ranks on a
    node may wait at the same time."""
    return np.where(stride * pp <= cluster.node.accelerators, cluster.node.ranks_per_core, 1.0)


def data_stride(work: Workload) -> Number:
    """Global ranks between the replicas of a parameter; context-parallel ranks count as replicas."""
    return work.tp * np.where(work.order_dp_first, 1.0, np.where(work.cp > 1, 1.0, work.pp))


def spine_crosses(stride: Number, pp: Number, cluster: Cluster) -> Number:
    """Return `crosses` for messages between pods: of a pipeline's ranks in a pod, only the last stage there sends."""
    return np.maximum(cluster.network.oversubscription / members_within(cluster.pod, pp, stride), 1.0)


def on_different_nodes(stride: int, first: int, second: int, size: float) -> bool:
    """Test whether any pipeline has its ranks `first` and `second` on different nodes, or pods, of `size` accelerators;
    neighbours are `stride` global ranks apart."""
    if stride * abs(second - first) >= size:
        return True
    return any((first * stride + at) // size != (second * stride + at) // size for at in range(stride))


def links_of(config: RunConfig, cluster: Cluster) -> dict[tuple[int, int], Link]:
    """Return (source, destination) -> link, for pipeline ranks with neighbouring stages."""
    placement, work = placement_of(config), workload_of(config)
    stride = int(pipeline_stride(work))
    links: dict[tuple[int, int], Link] = {}
    known: dict[float, Link] = {}
    for source, destination in itertools.pairwise(placement):
        if source == destination or (source, destination) in links:
            continue
        crosses = float(on_different_nodes(stride, source, destination, cluster.node.accelerators))
        if on_different_nodes(stride, source, destination, cluster.pod):
            crosses = float(spine_crosses(stride, config.parallel.pp, cluster))
        if crosses not in known:
            known[crosses] = Link(*map(float, activation_message_seconds(work, crosses, cluster)))
        links[source, destination] = links[destination, source] = known[crosses]
    return links


# q: how host and device times combine; infinite if the same one of the two always limited.
ALTERNATION = 6.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """Seconds by kind, and numbers of operations that the host starts; numbers or arrays over layouts."""

    gemm: Number = 0.0  # matrix products, including the attention core
    memory: Number = 0.0  # operations that read and write
    tensor: Number = 0.0  # collectives of tensor parallelism
    context: Number = 0.0  # exposed part of context-parallel communication
    expert: Number = 0.0  # exchange of rows between experts
    operations: Number = 0.0  # kernels that the host starts
    collectives: Number = 0.0

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})

    def __mul__(self, times: Number) -> "Parts":
        return Parts(**{name: getattr(self, name) * times for name in _NAMES})

    def exposed_tensor(self, stack: SoftwareStack) -> Number:
        """Seconds of tensor-parallel collectives that no matrix product hides."""
        return self.tensor - np.minimum(self.tensor, self.gemm) * stack.overlap_tensor_parallel

    def device_seconds(self, cluster: Cluster, stack: SoftwareStack) -> Number:
        """Seconds that the device needs if it never waits for the host."""
        starts = self.operations * cluster.accelerator.kernel_seconds
        return self.gemm + self.memory + self.exposed_tensor(stack) + self.context + self.expert + starts

    def host_seconds(self, stack: SoftwareStack) -> Number:
        """Seconds that the host needs to start all operations."""
        return self.operations * stack.operation_seconds + self.collectives * stack.collective_seconds

    def seconds(self, cluster: Cluster, stack: SoftwareStack) -> Number:
        """The slower of device and host, or more if both are close, as they alternate in limiting: (device^q +
        host^q)^(1/q). On a CPU, which is both, their sum."""
        device, host = self.device_seconds(cluster, stack), self.host_seconds(stack)
        if not cluster.accelerator.asynchronous:
            return device + host
        most = np.maximum(device, host)
        least = np.minimum(device, host) / np.where(most > 0, most, 1.0)
        return most * (1.0 + least**ALTERNATION) ** (1.0 / ALTERNATION)


_NAMES = tuple(each.name for each in fields(Parts))
