"""How ranks are split: the parallel axes, what data-parallel ranks exchange, layouts of pipeline stages."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megalite.config.errors import ConfigError
from megalite.config.option import option
from megalite.config.registry import Registry
from megalite.config.strategies import STRATEGIES, StrategyFacts, integer_bytes


@dataclass(frozen=True, kw_only=True)
class ScheduleFacts:
    """Of one pipeline schedule, by its generator f."""

    chunks: Literal["one", "vee", "several"] = "one"
    """Stages on each rank: one, as f(ranks, microbatches); two, down the ranks and up again, as f(ranks, microbatches);
    or any number from two on, round and round, as f(ranks, chunks, microbatches)."""
    nearest: str = "interleaved (vpp 2 or more)"
    """Of a schedule of one stage per rank: what is like it with several."""


_HERE = "megalite.pipeline.ir.generators"
PIPELINE_SCHEDULES: Registry[Callable[..., Any]] = Registry(
    "pipeline_schedule",
    {
        "gpipe": (f"{_HERE}.one_chunk:gpipe", ScheduleFacts(nearest="looped-bfs (vpp 2 or more)")),
        "1f1b": f"{_HERE}.one_chunk:one_f_one_b",
        "interleaved": (f"{_HERE}.many_chunks:interleaved", ScheduleFacts(chunks="several")),
        "looped-bfs": (f"{_HERE}.many_chunks:looped_bfs", ScheduleFacts(chunks="several")),
        "zb-h1": (f"{_HERE}.one_chunk:zb_h1", ScheduleFacts(nearest="zb-v (vpp 2)")),
        "zb-h2": (f"{_HERE}.one_chunk:zb_h2", ScheduleFacts(nearest="zb-v (vpp 2)")),
        "zb-v": (f"{_HERE}.many_chunks:zb_v", ScheduleFacts(chunks="vee")),
        "dualpipe-v": (f"{_HERE}.many_chunks:dualpipe_v", ScheduleFacts(chunks="vee")),
        "auto": f"{_HERE}.auto:build_auto",
    },
    ScheduleFacts,
)
"""Generators of schedules; `auto` alone is given the costs and sizes of stages instead of numbers."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the axes. world = tp·cp·dp·pp; experts (ep) are carved out of the dp·cp grid of a pipeline stage."""

    tp: int = option(1, at_least=1, below=2**20, flags=("--tensor-model-parallel-size",), basic=True)
    """Tensor-parallel size: each layer's matrices are split over this many ranks."""
    pp: int = option(1, at_least=1, below=2**20, flags=("--pipeline-model-parallel-size",), basic=True)
    """Pipeline-parallel size: layers are split over this many ranks."""
    vpp: int = option(1, at_least=1, below=2**20, flags=("--num-virtual-stages-per-pipeline-rank",), basic=True)
    """Virtual stages (model chunks) per pipeline rank; default: what pipeline_layout or a V schedule needs."""
    dp: int | None = option(None, at_least=1, below=2**20, flags=("--data-parallel-size",))
    """Data-parallel size; default world / (tp·pp·cp)."""
    cp: int = option(1, at_least=1, below=2**20, flags=("--context-parallel-size",))
    """Context-parallel size: the sequence is split over this many ranks."""
    cp_comm_type: str = option("p2p", choices=("p2p", "a2a", "allgather", "a2a+p2p"))
    """How attention sees the whole sequence: keys and values go round a ring (p2p) or are gathered (allgather), heads
    are exchanged (a2a), or both."""
    hierarchical_context_parallel_sizes: list[int] | None = option(None, at_least=1, below=2**20)
    """a2a+p2p: ranks of a group that exchange heads, and groups of the ring, e.g. 4 2."""
    context_parallel_load_balancer: str = option("headtail", choices=("headtail", "area"))
    """What each rank holds of a sequence: an early and a late part (headtail), or parts with equally many visible pairs of
    query and key (area)."""
    ep: int = option(1, at_least=1, below=2**20, flags=("--expert-model-parallel-size",))
    """Expert-parallel size."""
    etp: int | None = option(None, at_least=1, below=2**20, flags=("--expert-tensor-parallel-size",))
    """Tensor-parallel size inside experts; default tp."""
    rank_order: str = option("tp-cp-ep-dp-pp", choices=("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"))
    """Which axis varies fastest over ranks, leftmost first."""
    sequence_parallel: bool = option(False, basic=True)
    """Split norms, dropout and residual stream over the sequence, inside the tp group."""
    pipeline_schedule: str | None = option(None, choices=PIPELINE_SCHEDULES, basic=True)
    """Pipeline order (docs/schedules.md); default: interleaved if vpp > 1, 1f1b if tp > 1, else the fastest in the
    memory of 1f1b. auto builds one for this model's costs."""
    pipeline_schedule_file: str | None = option(None)
    """Your schedule instead: a CSV file, as megalite schedule --write-csv writes."""
    pipeline_warmup: str = option("pa", choices=("pa", "pb"))
    """1f1b: forwards before the first backward: p-r on rank r (pa), or 2(p-r)-1 to hide messages (pb)."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = option(
        None, at_least=1, below=2**24, flags=("--microbatch-group-size",)
    )
    """interleaved: microbatches through one chunk before the next; default: the least that fits, pp or more."""
    pipeline_layers: list[int] | None = option(None, at_least=0, below=10_000)
    """Layers on each virtual stage, in order, e.g. 3,1; default: cut so that the slowest stage is fastest."""
    pipeline_layout: str | None = option(None, flags=("--pipeline-model-parallel-layout",))
    """The same in words: E embedding, t layer, m layer for a further token, L head, | next stage, *n repeats, e.g.
    "Et*3|t*4|t*2L"."""
    pipeline_costs: str | None = option(None)
    """auto: JSON file with the times of each stage, as for megalite schedule --costs; default: their FLOPs."""
    pipeline_memory_limit: str | None = option(None)
    """Bytes of activations per rank, e.g. 12GiB; auto keeps within (default: what the GPU leaves), others are refused."""
    pipeline_recv_prefetch: int = option(1, at_least=0)
    """Actions between the posting of a receive and its reader: more hides more latency and holds more buffers."""
    pipeline_send_window: int = option(1, at_least=1)
    """Sends that may be pending to one neighbour; each keeps an output alive."""
    scatter_gather_tensors_in_pipeline: bool = option(True)
    """Without sequence parallelism each tensor-parallel rank sends 1/tp of a message, and the receivers gather it."""
    pipeline_compression: str = option("none")
    """Messages between stages are rounded to bf16 or uint8, or the largest elements alone, as topk:0.25. Changes the
    numbers."""
    pipeline_check_memory: bool = option(False)
    """Assert after each action that live activations are those of the proof."""
    dp_strategy: str = option("all-reduce", choices=STRATEGIES, basic=True)
    """What data-parallel ranks exchange. distributed-optimizer is ZeRO-1 (or 2), fully-sharded ZeRO-3;
    docs/data_parallel.md explains each."""
    dp_instances: int = option(1, at_least=1, below=2**20, flags=("--num-distributed-optimizer-instances",))
    """distributed-optimizer, fully-sharded, local-sgd, diloco, gossip: parts of neighbours. ZeRO shards inside one; the
    others all-reduce inside and exchange weights between."""
    ddp_bucket_size: int = option(40_000_000, at_least=1)
    """Parameters in one gradient bucket (not fused-all-reduce, sharded-parameter-server)."""
    overlap_grad_reduce: bool = option(True)
    """Reduce gradient buckets while the last microbatch's backward still runs."""
    overlap_param_gather: bool = option(True)
    """distributed-optimizer, fully-sharded, parameter-server, sharded-parameter-server: gather updated parameters while the
    next forward runs."""
    fp8_param_gather: bool = option(False)
    """distributed-optimizer, fully-sharded: gather weights that multiply in fp8 in that format, with the same bits."""
    sanitize_communication: bool = option(False)
    """For tests: what is on its way holds NaN until it is waited for, and messages are delayed at random."""
    distributed_backend: str = option("auto", choices=("auto", "nccl", "gloo"))
    """auto: nccl on cuda, gloo on cpu."""
    nccl_max_ctas: list[str] = option([])
    """Most thread blocks of NCCL's kernels for a group: GROUP=NUMBER, of tp, cp, ep, pp and dp, such as pp=2,dp=16.
    Default: as NCCL decides."""
    shared_memory_collectives: bool = option(True)
    """On gloo, tensor-parallel ranks of one Linux host on x86-64 exchange through memory instead of sockets."""
    distributed_timeout_minutes: float = option(10.0, above=0)
    """A collective that waits longer fails."""
    hang_timeout_minutes: float | None = option(None, at_least=0)
    """If no rank progresses for so long, a watch process names the rank that stands still and ends the run; 0: never.
    Default: 0.8 of distributed_timeout_minutes."""
    hang_save_timeout_minutes: float | None = option(None, above=0)
    """The same during saves and starts. Default: six times hang_timeout_minutes, at most 0.9 of
    distributed_timeout_minutes."""
    elastic: bool = option(False)
    """Take as many ranks as there are at each start, with another layout where needed (docs/multi_node.md)."""
    elastic_cluster: str | None = option(None)
    """elastic: machines for the planner, as megalite plan --cluster takes; default: by the device."""

    @property
    def schedule_name(self) -> str:
        """The schedule with its default filled in; `file` if it comes from one."""
        if self.pipeline_schedule_file is not None:
            return "file"
        # Where a weight gradient waits, the all-reduce of the input gradient has nothing to hide behind.
        builds = self.pp > 1 and self.tp == 1 and self.pipeline_warmup == "pa"
        return self.pipeline_schedule or ("interleaved" if self.vpp > 1 else "auto" if builds else "1f1b")

    @property
    def cp_heads(self) -> int:
        """Context-parallel ranks that exchange heads with one another; keys and values go between groups of them."""
        if self.cp_comm_type == "a2a+p2p" and self.hierarchical_context_parallel_sizes and self.cp > 1:
            return self.hierarchical_context_parallel_sizes[0]
        return self.cp if self.cp_comm_type == "a2a" else 1

    @property
    def strategy(self) -> StrategyFacts:
        """What `dp_strategy` names."""
        facts: StrategyFacts = STRATEGIES.facts(self.dp_strategy)
        return facts

    @property
    def instances(self) -> int:
        """`dp_instances`; 1 with a strategy that has none."""
        return self.dp_instances if self.strategy.has("dp_instances") else 1

    @property
    def own_weights(self) -> int | None:
        """Replicas with different weights, of a strategy that has such: instances, or without them each rank."""
        return self.instances if self.instances > 1 else self.dp

    @property
    def hang_timeout(self) -> float:
        """Minutes, with the default filled in: less than after which collectives fail, for those can name no one."""
        given = self.hang_timeout_minutes
        return 0.8 * self.distributed_timeout_minutes if given is None else given

    @property
    def hang_save_timeout(self) -> float:
        """Minutes, with the default filled in."""
        if self.hang_save_timeout_minutes is not None:
            return self.hang_save_timeout_minutes
        return max(self.hang_timeout, min(6.0 * self.hang_timeout, 0.9 * self.distributed_timeout_minutes))

    @property
    def max_ctas(self) -> dict[str, int]:
        """`cta_limits` of `nccl_max_ctas`."""
        return cta_limits(self.nccl_max_ctas)

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size inside experts."""
        return self.etp or self.tp


CTA_GROUPS = ("tp", "cp", "ep", "pp", "dp")
"""What `nccl_max_ctas` names."""


def cta_limits(given: list[str]) -> dict[str, int]:
    """Group -> thread blocks, of the setting `nccl_max_ctas`.
    Raises ConfigError: an entry is no limit, or a group has two."""
    limits: dict[str, int] = {}
    for text in (part.strip() for entry in given for part in entry.split(",")):
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
    """(none, bf16, uint8 or topk; the share of the elements that is sent). Raises ConfigError: it is none of them."""
    kind, _, number = text.partition(":")
    try:
        share = float(number) if kind == "topk" else 1.0
    except ValueError:
        share = math.nan
    if text not in ("none", "bf16", "uint8") and not (kind == "topk" and 0.0 < share <= 1.0):
        raise ConfigError(f"pipeline_compression is {text!r}; use none, bf16, uint8 or topk:SHARE, e.g. topk:0.25")
    return kind, share


def message_bytes(compression: str, elements: int, width: int) -> int:
    """What travels of so many elements of `width` bytes, by `pipeline_compression`."""
    kind, share = parse_pipeline_compression(compression)
    if kind == "topk":  # places and values
        return math.ceil(share * elements) * (4 + width)
    if kind == "uint8":
        return integer_bytes(elements, max(4, width))
    return elements * (2 if kind == "bf16" else width)


COMPRESSIONS = ("none", "onebit", "uint8", "topk", "powersgd")
GOSSIP_GRAPHS = ("ring", "one-peer")
GOSSIP_ALGORITHMS = ("d-psgd", "decentlam", "choco-sgd")


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Settings of the data-parallel strategies; each has an effect with some of them only."""

    wire_dtype: str = option("fp32", choices=("fp32", "bf16", "fp16"))
    """Format in which gradients and exchanged weights travel; sums are in fp32 or wider. fp16 has a loss scale."""
    reduction_order: str = option("backend", choices=("backend", "rank"))
    """Order in which gradients of ranks are added: the backend's, or by rank."""
    shard_gradients: bool = option(False)
    """distributed-optimizer: keep only the owned part of the gradients between microbatches (ZeRO-2)."""
    fusion_threshold_mb: float = option(64.0, above=0)
    """fused-all-reduce: gradients that are ready are reduced together at this many MB."""
    server_chunk_mb: float = option(4.0, at_least=0.001, at_most=2000)
    """parameter-server, sharded-parameter-server, async-parameter-server: MB in one message."""
    max_staleness: int = option(1, at_least=0)
    """async-parameter-server: steps that a worker may be ahead of the slowest; 0 is synchronous."""
    staleness_aware_lr: bool = option(True)
    """async-parameter-server: divide an update's learning rate by 1 + the updates that its weights are behind, at least
    by dp."""
    sync_interval: int = option(20, at_least=1)
    """local-sgd, diloco: steps between two exchanges of weights."""
    sync_warmup_steps: int = option(0, at_least=0)
    """local-sgd, diloco, gossip: first steps, in which gradients are all-reduced."""
    average_optimizer_state: bool = option(False)
    """local-sgd: average the optimizer's state with the weights."""
    outer_lr: float = option(0.7, above=0)
    """diloco: learning rate of the outer Nesterov step on the averaged change of the weights."""
    outer_momentum: float = option(0.9, at_least=0, below=1)
    """diloco: momentum of the outer step."""
    sync_fragments: int = option(1, at_least=1)
    """diloco: fragments of the network, each exchanged at its own time (streaming DiLoCo)."""
    sync_delay: int = option(0, at_least=0)
    """local-sgd, diloco: steps until an exchange's result is used; with local-sgd asynchronous model averaging."""
    sync_mix: float = option(0.0, at_least=0, below=1)
    """diloco: share of a rank's own weights that stays when a fragment's result is used."""
    gossip_graph: str = option("ring", choices=GOSSIP_GRAPHS)
    """gossip: average with both neighbours of a ring, or with one changing peer."""
    gossip_algorithm: str = option("d-psgd", choices=GOSSIP_ALGORITHMS)
    """gossip: average weights before the update (d-psgd), also correct momentum (decentlam), or exchange 8-bit changes
    (choco-sgd)."""
    grad_compression: str = option("none", choices=COMPRESSIONS)
    """all-reduce: lossy gradients with error feedback: signs, 8-bit integers, the largest elements, or low rank."""
    compression_warmup_steps: int = option(0, at_least=0)
    """First steps with whole gradients."""
    topk_density: float = option(0.01, above=0, at_most=1)
    """topk: share of the elements that is sent."""
    powersgd_rank: int = option(4, at_least=1)
    """powersgd: rank of the matrices that stand for a gradient."""
    check_replicas_interval: int | None = option(
        None, at_least=1, flags=("--check-weight-hash-across-dp-replicas-interval",)
    )
    """Steps between comparisons of the weights of data-parallel ranks, to the bit; default: none."""

    @property
    def narrow_wire(self) -> bool:
        """What travels is rounded, to two bytes."""
        return self.wire_dtype != "fp32"


_TOKEN = re.compile(r"\s*(?:(?P<item>[EtmL|])|(?P<open>\()|(?P<close>\))|\*\s*(?P<times>\d{1,6})|(?P<comma>,))\s*")
_MOST = 1_000_000
_EXAMPLE = 'e.g. "Et*3|t*4|t*4|t*2L" for four stages of 3, 4, 4 and 2 layers'


def parse_pipeline_layout(text: str) -> list[int]:
    """Layers of each stage. `E` is the embedding, `t` a layer, `L` head and loss, `|` the next stage; `x*n` and
    `(...)*n` repeat, commas and spaces say nothing. The language is Megatron-LM's. Its `m`, a layer that predicts a further
    token, has one place here, before `L`; they are not counted.
    Raises ConfigError: the text is not in that language, or embedding or head are not where the model has them."""
    items = layout_items(text)
    stages = items.split("|")
    if items.count("E") != 1 or not items.startswith("E"):
        raise _wrong(text, f"the embedding E must come once, at the very beginning, but here it reads {items[:40]}")
    if items.count("L") != 1 or not items.endswith("L"):
        raise _wrong(text, f"the head L must come once, at the very end, but here it reads ...{items[-40:]}")
    if "m" in items.rstrip("mL"):
        raise _wrong(
            text,
            f"the layers m for further tokens must come right before the head L, but here it reads ...{items[-40:]}",
        )
    empty = next((index for index, stage in enumerate(stages) if not stage), None)
    if empty is not None:
        raise _wrong(text, f"stage {empty} of {len(stages)} is empty, and each needs something to do")
    return [stage.count("t") for stage in stages]


def layout_items(text: str) -> str:
    """The text with repetitions written out. Raises ConfigError: it is not in that language."""
    return "".join(_expanded(text))


def _expanded(text: str) -> Iterator[str]:
    groups: list[list[str]] = [[]]
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise _wrong(text, f"{text[position]!r} at character {position + 1} means nothing")
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
