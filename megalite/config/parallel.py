"""Settings of the parallel axes, of data parallelism and of pipeline layouts."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megalite.config.errors import ConfigError
from megalite.config.numbers import as_number
from megalite.config.registry import Registry, option
from megalite.config.strategies import STRATEGIES, StrategyFacts, integer_bytes


@dataclass(frozen=True, kw_only=True)
class ScheduleFacts:
    """Facts about one pipeline schedule with the generator f."""

    chunks: Literal["one", "vee", "several"] = "one"
    """Stages per rank: one, built by f(ranks, microbatches); two in a V, by f(ranks, microbatches); or any number from
    two on in a loop, by f(ranks, chunks, microbatches)."""
    nearest: str = "interleaved (vpp 2 or more)"
    """For a schedule with one stage per rank: the most similar one with several."""


_HERE = "megalite.pipeline.ir"
PIPELINE_SCHEDULES: Registry[Callable[..., Any]] = Registry(
    "pipeline_schedule",
    {
        "gpipe": (f"{_HERE}.generators:gpipe", ScheduleFacts(nearest="looped-bfs (vpp 2 or more)")),
        "1f1b": f"{_HERE}.generators:one_f_one_b",
        "interleaved": (f"{_HERE}.generators:interleaved", ScheduleFacts(chunks="several")),
        "looped-bfs": (f"{_HERE}.generators:looped_bfs", ScheduleFacts(chunks="several")),
        "zb-h1": (f"{_HERE}.generators:zb_h1", ScheduleFacts(nearest="zb-v (vpp 2)")),
        "zb-h2": (f"{_HERE}.generators:zb_h2", ScheduleFacts(nearest="zb-v (vpp 2)")),
        "zb-v": (f"{_HERE}.generators:zb_v", ScheduleFacts(chunks="vee")),
        "dualpipe-v": (f"{_HERE}.generators:dualpipe_v", ScheduleFacts(chunks="vee")),
        "auto": f"{_HERE}.auto:build_auto",
    },
    ScheduleFacts,
)
"""Generators of schedules. `auto` receives costs and sizes of stages instead of numbers."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel axes. world = tp·cp·dp·pp; etp·ep divides tp·cp·dp."""

    tp: int = option(1, at_least=1, below=2**20, flags=("--tensor-model-parallel-size",), basic=True)
    """Tensor-parallel size: number of ranks that split each layer's matrices."""
    pp: int = option(1, at_least=1, below=2**20, flags=("--pipeline-model-parallel-size",), basic=True)
    """Pipeline-parallel size: number of ranks that split the layers."""
    vpp: int = option(1, at_least=1, below=2**20, flags=("--num-virtual-stages-per-pipeline-rank",), basic=True)
    """Virtual stages (model chunks) per pipeline rank; default: as pipeline_layout or a V schedule requires."""
    dp: int | None = option(None, at_least=1, below=2**20, flags=("--data-parallel-size",))
    """Data-parallel size; default: world / (tp·pp·cp)."""
    cp: int = option(1, at_least=1, below=2**20, flags=("--context-parallel-size",))
    """Context-parallel size: number of ranks that split the sequence."""
    cp_comm_type: str = option("p2p", choices=("p2p", "a2a", "allgather", "a2a+p2p"))
    """Context-parallel attention: send keys and values round a ring (p2p), all-gather them (allgather), exchange heads
    (a2a), or combine ring and exchange (a2a+p2p)."""
    hierarchical_context_parallel_sizes: list[int] | None = option(None, at_least=1, below=2**20)
    """a2a+p2p: number of ranks that exchange heads, and of groups in the ring, e.g. 4 2."""
    context_parallel_load_balancer: str = option("headtail", choices=("headtail", "area"))
    """Split of the sequence: an early and a late part per rank (headtail), or parts with equally many visible query-key
    pairs (area)."""
    ep: int = option(1, at_least=1, below=2**20, flags=("--expert-model-parallel-size",))
    """Expert-parallel size: number of ranks that split the experts."""
    etp: int | None = option(None, at_least=1, below=2**20, flags=("--expert-tensor-parallel-size",))
    """Tensor-parallel size inside experts; default: tp."""
    rank_order: str = option("tp-cp-ep-dp-pp", choices=("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"))
    """Order of the axes over ranks; the leftmost varies fastest."""
    sequence_parallel: bool = option(False, basic=True)
    """Split norms, dropout and the residual stream along the sequence over the tp ranks."""
    pipeline_schedule: str | None = option(None, choices=PIPELINE_SCHEDULES, basic=True)
    """Pipeline schedule (docs/schedules.md); default: interleaved if vpp > 1, 1f1b if tp > 1, else the fastest that
    fits the memory of 1f1b. auto builds one for this model's costs."""
    pipeline_schedule_file: str | None = option(None)
    """CSV file with a custom schedule, as written by megalite schedule --write-csv."""
    pipeline_warmup: str = option("pa", choices=("pa", "pb"))
    """1f1b: forwards before the first backward: p-r on rank r (pa), or 2(p-r)-1 to hide messages (pb)."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = option(
        None, at_least=1, below=2**24, flags=("--microbatch-group-size",)
    )
    """interleaved: microbatches that pass one chunk before the next; default: the smallest that fits, at least pp."""
    pipeline_layers: list[int] | None = option(None, at_least=0, below=10_000)
    """Layers of each virtual stage, in order, e.g. 3,1; default: the split that minimizes the slowest stage."""
    pipeline_layout: str | None = option(None, flags=("--pipeline-model-parallel-layout",))
    """pipeline_layers as a string: E embedding, t layer, m MTP layer, L head, | next stage, *n repeats:
    "Et*3|t*4|t*2L"."""
    pipeline_costs: str | None = option(None)
    """auto: JSON file with the times of each stage, as for megalite schedule --costs; default: FLOPs."""
    pipeline_memory_limit: str | None = option(None)
    """Limit of activation memory per rank, e.g. 12GiB. auto stays within it (default: what the GPU has left); other
    schedules are refused above it."""
    pipeline_recv_prefetch: int = option(1, at_least=0)
    """Actions between posting a receive and using it: more hide more latency but need more buffers."""
    pipeline_send_window: int = option(1, at_least=1)
    """Pending sends per neighbour; each keeps an output in memory."""
    scatter_gather_tensors_in_pipeline: bool = option(True)
    """Without sequence_parallel: each tensor-parallel rank sends 1/tp of a message, which the receivers all-gather."""
    pipeline_compression: str = option("none")
    """Compress messages between stages to bf16, uint8, or the largest elements (topk:0.25). Changes the numbers."""
    pipeline_check_memory: bool = option(False)
    """After each action, assert that the live activations match the schedule's proof."""
    dp_strategy: str = option("all-reduce", choices=STRATEGIES, basic=True)
    """Data-parallel strategy (docs/data_parallel.md); distributed-optimizer: ZeRO-1 (or 2), fully-sharded: ZeRO-3."""
    dp_instances: int = option(1, at_least=1, below=2**20, flags=("--num-distributed-optimizer-instances",))
    """distributed-optimizer, fully-sharded, local-sgd, diloco, gossip: number of groups of neighbouring replicas. ZeRO
    shards within a group; the others all-reduce within it and exchange weights between groups."""
    ddp_bucket_size: int = option(40_000_000, at_least=1)
    """Parameters in one gradient bucket (not fused-all-reduce, sharded-parameter-server)."""
    overlap_grad_reduce: bool = option(True)
    """Reduce gradient buckets during the last microbatch's backward."""
    overlap_param_gather: bool = option(True)
    """distributed-optimizer, fully-sharded, parameter-server, sharded-parameter-server: gather updated parameters
    during the next forward."""
    fp8_param_gather: bool = option(False)
    """distributed-optimizer, fully-sharded: gather the weights of fp8 layers in fp8, with identical numbers."""
    sanitize_communication: bool = option(False)
    """For tests: fill buffers in transit with NaN and delay messages at random."""
    distributed_backend: str = option("auto", choices=("auto", "nccl", "gloo"))
    """Communication backend; auto: nccl on cuda, gloo on cpu."""
    nccl_max_ctas: list[str] = option([])
    """Most thread blocks of NCCL's kernels per group (tp, cp, ep, pp, dp), such as pp=2,dp=16; default: NCCL's choice."""
    shared_memory_collectives: bool = option(True)
    """gloo: tensor-parallel ranks on one Linux x86-64 host communicate through shared memory instead of sockets."""
    distributed_timeout_minutes: float = option(10.0, above=0)
    """Minutes after which a waiting collective fails."""
    hang_timeout_minutes: float | None = option(None, at_least=0)
    """If no rank progresses for this many minutes, a watchdog names the hanging rank and ends the run; 0: never;
    default: 0.8 of distributed_timeout_minutes."""
    hang_save_timeout_minutes: float | None = option(None, above=0)
    """hang_timeout_minutes in saves and starts; default: six times that, at most 0.9 of distributed_timeout_minutes."""
    elastic: bool = option(False)
    """Start with any number of ranks, changing the layout if needed (docs/multi_node.md)."""
    elastic_cluster: str | None = option(None)
    """elastic: cluster for the planner, as for megalite plan --cluster; default: chosen by the device."""

    @property
    def schedule_name(self) -> str:
        """The schedule with its default resolved; `file` for pipeline_schedule_file."""
        if self.pipeline_schedule_file is not None:
            return "file"
        # If weight gradients are deferred, the all-reduce of the input gradient has no computation to overlap with.
        builds = self.pp > 1 and self.tp == 1 and self.pipeline_warmup == "pa"
        return self.pipeline_schedule or ("interleaved" if self.vpp > 1 else "auto" if builds else "1f1b")

    @property
    def cp_heads(self) -> int:
        """Context-parallel ranks that exchange heads; keys and values travel between groups of them."""
        if self.cp_comm_type == "a2a+p2p" and self.hierarchical_context_parallel_sizes and self.cp > 1:
            return self.hierarchical_context_parallel_sizes[0]
        return self.cp if self.cp_comm_type == "a2a" else 1

    @property
    def strategy(self) -> StrategyFacts:
        """Facts about `dp_strategy`."""
        return STRATEGIES.facts(self.dp_strategy)

    @property
    def instances(self) -> int:
        """`dp_instances`; 1 if the strategy does not support it."""
        return self.dp_instances if self.strategy.has("dp_instances") else 1

    @property
    def distinct_replicas(self) -> int | None:
        """Number of replicas with different weights, if the strategy has such: the instances, or else all ranks."""
        return self.instances if self.instances > 1 else self.dp

    @property
    def hang_timeout(self) -> float:
        """Minutes, with the default resolved: below the timeout of collectives, which cannot name the hanging rank."""
        minutes = self.hang_timeout_minutes
        return 0.8 * self.distributed_timeout_minutes if minutes is None else minutes

    @property
    def hang_save_timeout(self) -> float:
        """Minutes, with the default resolved."""
        if self.hang_save_timeout_minutes is not None:
            return self.hang_save_timeout_minutes
        return max(self.hang_timeout, min(6.0 * self.hang_timeout, 0.9 * self.distributed_timeout_minutes))

    @property
    def max_ctas(self) -> dict[str, int]:
        """`nccl_max_ctas`, parsed."""
        return cta_limits(self.nccl_max_ctas)

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size inside experts."""
        return self.etp or self.tp


CTA_GROUPS = ("tp", "cp", "ep", "pp", "dp")
"""Groups of `nccl_max_ctas`."""


def cta_limits(entries: list[str]) -> dict[str, int]:
    """Parse `nccl_max_ctas` into group -> thread blocks. Raises ConfigError: a malformed entry, or two for one
    group."""
    limits: dict[str, int] = {}
    for text in (part.strip() for entry in entries for part in entry.split(",")):
        group, _, number = text.partition("=")
        if group not in CTA_GROUPS or not number.isdecimal() or int(number) < 1:
            raise ConfigError(
                f"nccl_max_ctas: {text!r} is no limit; use GROUP=NUMBER with a GROUP of {', '.join(CTA_GROUPS)} and a NUMBER "
                "of at least 1, such as pp=2"
            )
        if limits.setdefault(group, int(number)) != int(number):
            raise ConfigError(f"nccl_max_ctas gives {group} {limits[group]} and {number}; keep one of them")
    return limits


def parse_pipeline_compression(text: str) -> tuple[str, float]:
    """Parse `pipeline_compression` into (none, bf16, uint8 or topk; share of elements sent). Raises ConfigError:
    neither."""
    kind, _, number = text.partition(":")
    share = as_number(number) if kind == "topk" else 1.0
    if text not in ("none", "bf16", "uint8") and not (kind == "topk" and 0.0 < share <= 1.0):
        raise ConfigError(f"pipeline_compression is {text!r}; use none, bf16, uint8 or topk:SHARE, e.g. topk:0.25")
    return kind, share


def message_bytes(compression: str, elements: int, width: int) -> int:
    """Return the bytes sent for `elements` of `width` bytes each with this `pipeline_compression`."""
    kind, share = parse_pipeline_compression(compression)
    if kind == "topk":  # indices and values
        return math.ceil(share * elements) * (4 + width)
    if kind == "uint8":
        return integer_bytes(elements, max(4, width))
    return elements * (2 if kind == "bf16" else width)


COMPRESSIONS = ("none", "onebit", "uint8", "topk", "powersgd")


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Settings of the data-parallel strategies; each applies to some strategies only."""

    wire_dtype: str = option("fp32", choices=("fp32", "bf16", "fp16"))
    """Format of communicated gradients and weights; sums are in fp32 or wider. fp16 uses a loss scale."""
    reduction_order: str = option("backend", choices=("backend", "rank"))
    """Summation order of gradients: the backend's, or by rank."""
    shard_gradients: bool = option(False)
    """distributed-optimizer: keep only this rank's gradient shard between microbatches (ZeRO-2)."""
    fusion_threshold_mb: float = option(64.0, above=0)
    """fused-all-reduce: reduce ready gradients once they reach this many MB."""
    server_chunk_mb: float = option(4.0, at_least=0.001, at_most=2000)
    """parameter-server, sharded-parameter-server, async-parameter-server: MB per message."""
    max_staleness: int = option(1, at_least=0)
    """async-parameter-server: steps that a worker may be ahead of the slowest; 0 is synchronous."""
    staleness_aware_lr: bool = option(True)
    """async-parameter-server: divide an update's learning rate by max(dp, 1 + its staleness in updates)."""
    sync_interval: int = option(20, at_least=1)
    """local-sgd, diloco: steps between weight exchanges."""
    sync_warmup_steps: int = option(0, at_least=0)
    """local-sgd, diloco, gossip: first steps with all-reduced gradients."""
    average_optimizer_state: bool = option(False)
    """local-sgd: average optimizer states along with the weights."""
    outer_lr: float = option(0.7, above=0)
    """diloco: learning rate of the outer Nesterov step on the averaged change of the weights."""
    outer_momentum: float = option(0.9, at_least=0, below=1)
    """diloco: momentum of the outer step."""
    sync_fragments: int = option(1, at_least=1)
    """diloco: fragments of the model, exchanged at different times (streaming DiLoCo)."""
    sync_delay: int = option(0, at_least=0)
    """local-sgd, diloco: steps until an exchange's result is used; in local-sgd: asynchronous model averaging."""
    sync_mix: float = option(0.0, at_least=0, below=1)
    """diloco: share of a rank's own weights that is kept when a fragment's result is used."""
    gossip_graph: str = option("ring", choices=("ring", "one-peer"))
    """gossip: peers: both ring neighbours, or one changing peer."""
    gossip_algorithm: str = option("d-psgd", choices=("d-psgd", "decentlam", "choco-sgd"))
    """gossip: average weights before the update (d-psgd), correct momentum too (decentlam), or send 8-bit changes
    (choco-sgd)."""
    grad_compression: str = option("none", choices=COMPRESSIONS)
    """all-reduce: compress gradients, with error feedback: signs, 8-bit integers, largest elements, or low rank."""
    compression_warmup_steps: int = option(0, at_least=0)
    """First steps without grad_compression."""
    topk_density: float = option(0.01, above=0, at_most=1)
    """topk: share of elements sent."""
    powersgd_rank: int = option(4, at_least=1)
    """powersgd: rank of the approximation."""
    check_replicas_interval: int | None = option(
        None, at_least=1, flags=("--check-weight-hash-across-dp-replicas-interval",)
    )
    """Steps between bitwise comparisons of the data-parallel ranks' weights; default: none."""

    @property
    def narrow_wire(self) -> bool:
        """Whether communicated values are rounded to two bytes."""
        return self.wire_dtype != "fp32"


_TOKEN = re.compile(r"\s*(?:(?P<item>[EtmL|])|(?P<open>\()|(?P<close>\))|\*\s*(?P<times>\d{1,6})|(?P<comma>,))\s*")
_MOST = 1_000_000
_EXAMPLE = 'e.g. "Et*3|t*4|t*4|t*2L" for four stages of 3, 4, 4 and 2 layers'


def parse_pipeline_layout(text: str) -> list[int]:
    """Parse `pipeline_layout`, Megatron-LM's language, into the layers of each stage.

    `E` is the embedding, `t` a layer, `L` head and loss, `|` the next stage; `x*n` and `(...)*n` repeat, commas and
    spaces are ignored. MTP layers (`m`) are allowed right before `L` only and are not counted. Raises ConfigError: a
    syntax error, or E or L in the wrong place."""
    items = layout_items(text)
    stages = items.split("|")
    if items.count("E") != 1 or not items.startswith("E"):
        raise _wrong(text, f"the embedding E must come once, at the very beginning, but here it reads {items[:40]}")
    if items.count("L") != 1 or not items.endswith("L"):
        raise _wrong(text, f"the head L must come once, at the very end, but here it reads ...{items[-40:]}")
    if "m" in items.rstrip("mL"):
        raise _wrong(text, f"the MTP layers m must come right before the head L, but here it reads ...{items[-40:]}")
    empty = next((index for index, stage in enumerate(stages) if not stage), None)
    if empty is not None:
        raise _wrong(text, f"stage {empty} of {len(stages)} is empty; each needs E, t, m or L")
    return [stage.count("t") for stage in stages]


def layout_items(text: str) -> str:
    """Expand the repetitions of a `pipeline_layout`. Raises ConfigError: a syntax error."""
    return "".join(_expanded(text))


def _expanded(text: str) -> Iterator[str]:
    groups: list[list[str]] = [[]]
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise _wrong(text, f"{text[position]!r} at character {position + 1} is not valid here")
        position = token.end()
        if token["item"]:
            groups[-1].append(token["item"])
        elif token["open"]:
            groups.append([])
        elif token["close"]:
            if len(groups) == 1:
                raise _wrong(text, f"the ) at character {position} closes nothing")
            group = "".join(groups.pop())
            groups[-1].append(group)
        elif token["times"]:
            times = int(token["times"])
            if not groups[-1] or times < 1:
                raise _wrong(text, f"*{times} at character {position} repeats nothing")
            repeated = groups[-1].pop()
            if times * len(repeated) > _MOST:
                raise _wrong(text, f"*{times} at character {position} makes more than {_MOST} items")
            groups[-1].append(repeated * times)
    if len(groups) > 1:
        raise _wrong(text, "a ( is not closed")
    return iter(groups[0])


def _wrong(text: str, reason: str) -> ConfigError:
    return ConfigError(f"pipeline_layout {text!r}: {reason}; {_EXAMPLE}")
