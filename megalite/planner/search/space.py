"""The search request, and all layouts that satisfy it as arrays: the rules of `megalite.config.validate` become masks.

A layout has two parts. A `Pipeline` is a schedule, pp, vpp, the number of microbatches and the number of offloaded
layers. A share divides and stores the work of one pipeline rank: tp, cp, ep, dp, instances, micro batch size,
recompute, strategy, sequence parallelism, and optimizer states on the device or in host memory. A `Block` combines each
of its pipelines with each of its shares, so values that depend on one part are computed once. All layouts of a block
have the same pp and number of microbatches.

The enumeration uses host memory only if a constraint requires it; `search.survey` adds it to layouts that do not fit.

Layouts that equal another one are left out: with pp 1 all one-chunk schedules take the same time, with one microbatch
gpipe equals 1f1b and looped-bfs equals interleaved, and all strategies are equal if no parameter has a replica."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.config.batch import batch_sizes
from megalite.config.describe import replace as with_settings
from megalite.config.describe import settings, value_of, values_of
from megalite.config.errors import ConfigError, nearest
from megalite.config.rules.compute import RECOMPUTE as RECOMPUTE_RULES
from megalite.config.rules.data_parallel import OPTIMIZER, STRATEGY
from megalite.config.rules.rule import divisor_list, whole_shares
from megalite.config.run import RunConfig, stage_layers
from megalite.config.validate import check_rules, validate
from megalite.partition.memory import USUAL_MEMORY
from megalite.pipeline.ir.generators import SCHEDULES
from megalite.planner.hardware import Cluster

# Values that the search chooses from; zero-2 is distributed-optimizer with shard_gradients.
STRATEGIES = ("all-reduce", "distributed-optimizer", "zero-2", "fully-sharded")
RECOMPUTE = ("none", "selective", "full")
SIZES = ("tp", "pp", "vpp", "cp", "ep", "dp", "dp_instances", "micro_batch_size")
CHOICES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "recompute_granularity": RECOMPUTE,
        "pipeline_schedule": SCHEDULES,
        "dp_strategy": STRATEGIES,
        "sequence_parallel": (False, True),
        "optimizer_cpu_offload": (False, True),
    }
)
HOST = ("optimizer_cpu_offload", "cpu_offloading_num_layers")
"""Settings that move bytes to host memory: the first is one of `CHOICES`, the second a number of layers from 0."""
SEARCHED = (*SIZES, *CHOICES, HOST[1])
"""Settings that the search decides unless a constraint fixes them."""
CONTEXT = ("cp_comm_type", "hierarchical_context_parallel_sizes", "context_parallel_load_balancer")
"""Settings that layouts with cp above 1 take from the request."""
AS_GIVEN = (*CONTEXT, "optimizer_offload_fraction", "fp8_param_gather")
"""Settings that a layout takes from the request if they have an effect in it."""
_SHORT = {
    "schedule": "pipeline_schedule",
    "recompute": "recompute_granularity",
    "strategy": "dp_strategy",
    "mbs": "micro_batch_size",
    "sp": "sequence_parallel",
}
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, kw_only=True)
class Request:
    config: RunConfig  # settings that are not searched; validated, with global_batch_size and vocabulary size
    world_size: int
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # setting -> allowed values; others are free
    memory_limit: float = float("inf")  # bytes of device memory per rank
    node: int = 0  # ranks per node; 0: ignore nodes. A sharded strategy has instances within nodes, or one instance
    host: tuple[str, ...] = ()  # the settings in HOST that a layout which does not fit may use
    host_limit: float = float("inf")  # bytes per rank in host memory

    def allows(self, name: str, value: Any) -> bool:
        return name not in self.fixed or value in self.fixed[name]

    def of(self, name: str) -> tuple[Any, ...]:
        return tuple(value for value in CHOICES[name] if self.allows(name, value))


def parse_constraint(text: str) -> tuple[str, tuple[Any, ...]]:
    """Parse `schedule=zb-v` or `tp=4,8` into (setting, allowed values). Raises ConfigError for an unknown one."""
    name, equals, words = text.partition("=")
    name = name.strip().replace("-", "_")
    name = _SHORT.get(name, name)
    if not equals or not words.strip():
        raise ConfigError(f"--fix {text} is not a constraint; write NAME=VALUE, e.g. schedule=zb-v or tp=4,8")
    if name not in SEARCHED:
        known = sorted({*SEARCHED, *_SHORT})
        raise ConfigError(f"--fix {text}: {name} is not searched{nearest(name, known)} (use {', '.join(SEARCHED)})")
    return name, tuple(_value(name, word.strip(), text) for word in words.split(","))


def _value(name: str, word: str, text: str) -> Any:
    least = 0 if name == HOST[1] else 1
    if name not in CHOICES:
        if word.isdecimal() and int(word) >= least:
            return int(word)
        takes = f"whole numbers of at least {least}, such as 4"
    elif CHOICES[name] == (False, True):
        if word in _WORDS:
            return _WORDS[word]
        takes = "true or false"
    else:
        if word in CHOICES[name]:
            return word
        takes = ", ".join(CHOICES[name])
        word += nearest(word, CHOICES[name])
    raise ConfigError(f"--fix {text}: {name} takes {takes}, got {word}")


_NOT_SEARCHED = {
    "pipeline_schedule_file": "names a single schedule",
    "pipeline_costs": "applies to schedule auto, which uses predicted costs",
    "pipeline_memory_limit": "is replaced by --max-memory, which limits all memory",
    "recompute_ahead": "is tried on the best layouts",
    "recompute_method": "is not searched: full recompute applies to each layer",
    "recompute_num_layers": "is not searched: full recompute applies to each layer",
}


def refuse_not_searched(config: RunConfig, explicit: frozenset[str]) -> None:
    """Raise ConfigError if the user set a setting that the search does not support."""
    for name, why in _NOT_SEARCHED.items():
        if name in explicit:
            raise ConfigError(f"{name} {values_of(config)[name]} {why}; remove it")


def fixed_settings(config: RunConfig, names: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Return those of the settings `names` that the search decides as constraints: setting -> its one allowed value.
    Raises ConfigError for a strategy or schedule that is not searched."""
    values, explicit = values_of(config), set(names)
    fixed = {name: (values[name],) for name in SEARCHED if name in explicit and values[name] is not None}
    if "shard_gradients" in explicit and values["shard_gradients"]:
        fixed["dp_strategy"] = ("zero-2",)
    (strategy,) = fixed.get("dp_strategy", ("all-reduce",))
    if strategy not in STRATEGIES:
        raise ConfigError(f"dp_strategy {strategy} is not searched; use {', '.join(STRATEGIES)}, or leave it out")
    if fixed.get("pipeline_schedule") == ("auto",):
        raise ConfigError("pipeline_schedule auto is built, not searched; name another, or leave it out")
    return fixed


def request_for(
    config: RunConfig,
    *,
    world_size: int,
    fixed: Mapping[str, tuple[Any, ...]],
    memory_limit: float,
    cluster: Cluster | None = None,
) -> Request:
    """Return a request for layouts of `config`, ignoring its present layout; its batch and vocabulary sizes are set.
    Raises ConfigError if the model is not legal, or no allowed strategy or use of host memory goes with the other
    settings. Without a `cluster`, node sizes are ignored and host memory is used only if a constraint fixes it."""
    shared = _without_layout(config)
    refused = {name: _refused(shared, name) for name in HOST}
    for name, found in refused.items():
        if found and settings()[name].default not in fixed.get(name, (settings()[name].default,)):
            raise ConfigError(found)
    strategies = [name for name in STRATEGIES if _is_possible(shared, name)]
    allowed = tuple(name for name in fixed.get("dp_strategy", STRATEGIES) if name in strategies)
    if not allowed:
        raise ConfigError(
            f"dp_strategy {','.join(fixed['dp_strategy'])} does not go with the other settings; use "
            f"{', '.join(strategies) or 'other settings'}"
        )
    if allowed != STRATEGIES:
        fixed = {**fixed, "dp_strategy": allowed}
    room = None if cluster is None else cluster.node.host_memory_bytes
    # On a CPU, host memory and device memory are the same.
    host = () if cluster is None or not cluster.accelerator.asynchronous else HOST
    return Request(
        config=shared,
        world_size=world_size,
        fixed=fixed,
        memory_limit=memory_limit,
        node=0 if cluster is None else cluster.node.accelerators,
        host=tuple(name for name in host if name not in fixed and not refused[name]),
        host_limit=float("inf") if cluster is None or room is None else USUAL_MEMORY * room / cluster.node.accelerators,
    )


def _refused(config: RunConfig, name: str) -> str:
    """Return why no layout of the config can use `name`, a setting in HOST; empty if some layout can."""
    plain = {"recompute_modules": settings()["recompute_modules"].default}
    tried = with_settings(
        config, dp=2, dp_strategy="distributed-optimizer", **plain, **{name: 1 if name == HOST[1] else True}
    )
    rules = (*STRATEGY, *OPTIMIZER) if name == HOST[0] else RECOMPUTE_RULES
    # Other problems are reported by the enumeration, with more detail.
    return next((text for text in check_rules(tried, not_default(tried), *rules).found if name in text), "")


def _without_layout(config: RunConfig) -> RunConfig:
    p, default = config.parallel, settings()
    searched = {name: default[name].default for name in (*SEARCHED, "shard_gradients", "dp")}
    searched["micro_batch_size"] = config.training.moe_aux_loss_sequences  # the smallest legal value
    cut = {"pipeline_layers": p.pipeline_layers, "pipeline_layout": p.pipeline_layout}
    bare = with_settings(config, **searched, **dict.fromkeys(cut))
    validated = validate(with_settings(bare, **{name: default[name].default for name in AS_GIVEN}), 1)
    return with_settings(validated, dp=None, etp=p.etp, **{name: value_of(config, name) for name in AS_GIVEN}, **cut)


def _is_possible(config: RunConfig, strategy: str) -> bool:
    zero = strategy == "zero-2"
    name = "distributed-optimizer" if zero else strategy
    fraction = settings()["optimizer_offload_fraction"].default
    tried = with_settings(config, dp=2, dp_strategy=name, shard_gradients=zero, optimizer_offload_fraction=fraction)
    return not check_rules(tried, not_default(tried), *STRATEGY, *OPTIMIZER).found


def not_default(config: RunConfig) -> frozenset[str]:
    """Return the settings that differ from their default, which a config file has to contain."""
    return frozenset(name for name, value in values_of(config).items() if value != settings()[name].default)


Integers = npt.NDArray[np.int64]
ONE_CHUNK = ("1f1b", "zb-h1", "zb-h2", "gpipe")  # equally fast on one rank; in order of memory, least first
VEE = ("zb-v", "dualpipe-v")


_IN_ONE = {"gpipe": "1f1b", "looped-bfs": "interleaved"}  # schedule -> the schedule that it equals with one microbatch


class Pipeline(NamedTuple):
    """The part of a layout that is the same whatever the ranks of a stage do."""

    schedule: str
    pp: int
    vpp: int
    microbatches: int
    offloaded: int = 0  # first layers of each stage, with activations in host memory


@dataclass(frozen=True)
class Shares:
    """Shares as columns: each array has one entry per share."""

    tp: Integers
    cp: Integers
    ep: Integers
    dp: Integers
    micro_batch_size: Integers
    recompute: Integers  # index into RECOMPUTE
    strategy: Integers  # index into STRATEGIES
    sequence_parallel: Integers  # 0 or 1
    dp_instances: Integers
    offload: Integers  # 0 or 1: optimizer states in host memory

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, which: npt.NDArray[Any]) -> "Shares":
        return Shares(**{name: column[which] for name, column in vars(self).items()})

    @classmethod
    def joined(cls, parts: list["Shares"]) -> "Shares":
        """Concatenate shares."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])})


class Layout(NamedTuple):
    pipeline: Pipeline
    tp: int
    cp: int
    ep: int
    dp: int
    micro_batch_size: int
    recompute: str
    strategy: str
    sequence_parallel: bool
    dp_instances: int
    offload: bool = False

    def settings(self) -> dict[str, Any]:
        return {
            "tp": self.tp,
            "pp": self.pipeline.pp,
            "vpp": self.pipeline.vpp,
            "cp": self.cp,
            "ep": self.ep,
            "dp": self.dp,
            "micro_batch_size": self.micro_batch_size,
            "pipeline_schedule": self.pipeline.schedule,
            "sequence_parallel": self.sequence_parallel,
            "recompute_granularity": self.recompute,
            "dp_strategy": "distributed-optimizer" if self.strategy == "zero-2" else self.strategy,
            "shard_gradients": self.strategy == "zero-2",
            **({"dp_instances": self.dp_instances} if self.dp_instances > 1 else {}),
            **({HOST[0]: True} if self.offload else {}),
            **({HOST[1]: self.pipeline.offloaded} if self.pipeline.offloaded else {}),
        }


@dataclass(frozen=True)
class Block:
    pipelines: tuple[Pipeline, ...]
    shares: Shares

    def __len__(self) -> int:
        return len(self.pipelines) * len(self.shares)

    def layout(self, pipeline: int, share: int) -> Layout:
        values: dict[str, Any] = {name: int(column[share]) for name, column in vars(self.shares).items()}
        values |= {"recompute": RECOMPUTE[values["recompute"]], "strategy": STRATEGIES[values["strategy"]]}
        values |= {name: bool(values[name]) for name in ("sequence_parallel", "offload")}
        return Layout(self.pipelines[pipeline], **values)


@dataclass(frozen=True)
class Space:
    request: Request
    blocks: tuple[Block, ...]

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def column(self, name: str) -> Integers:
        return np.concatenate([np.tile(getattr(block.shares, name), len(block.pipelines)) for block in self.blocks])


def enumerate_space(request: Request) -> Space:
    """Enumerate all legal layouts that satisfy the constraints; no blocks if there are none."""
    config = request.config
    cut, batch = stage_layers(config), config.training.global_batch_size
    assert batch is not None
    most_stages = len(cut) if cut else config.model.num_layers
    blocks: list[Block] = []
    for pp in divisor_list(request.world_size):
        if pp > most_stages or not request.allows("pp", pp):
            continue
        chunks, shares = list(_chunks(request, pp)), _shares(request, pp)
        counts = batch // (shares.dp * shares.micro_batch_size)
        for count, offloaded in itertools.product(np.unique(counts).tolist(), request.fixed.get(HOST[1], (0,))):
            pipelines = tuple(
                Pipeline(schedule, pp, vpp, count, offloaded)
                for schedule, vpp in chunks
                if (schedule != "dualpipe-v" or count >= 2 * pp)
                and not (count == 1 and (_IN_ONE.get(schedule), vpp) in chunks)
                and offloaded <= (max(cut) if cut else config.model.num_layers - (pp * vpp - 1))
            )
            fit = counts == count
            if pipelines and fit.any():
                blocks.append(Block(pipelines, shares.take(fit)))
    return Space(request, tuple(blocks))


def _chunks(request: Request, pp: int) -> Iterator[tuple[str, int]]:
    """Yield each legal (schedule, vpp) of a pipeline of pp ranks."""
    cut, layers = stage_layers(request.config), request.config.model.num_layers
    p = request.config.parallel
    for schedule in sorted(request.of("pipeline_schedule"), key=SCHEDULES.index):
        if pp == 1 and schedule in ONE_CHUNK:
            better = ONE_CHUNK[: ONE_CHUNK.index(schedule)]
            if any(request.allows("pipeline_schedule", name) for name in better):
                continue
        if p.microbatch_group_size_per_virtual_pipeline_stage is not None and schedule != "interleaved":
            continue
        if p.pipeline_warmup != "pa" and schedule != "1f1b":
            continue
        counts: Iterable[int] = (1,)
        if schedule not in ONE_CHUNK:
            counts = () if pp == 1 else (2,) if schedule in VEE else range(2, layers // pp + 1)
        for vpp in counts:
            fits = len(cut) == pp * vpp if cut else pp * vpp <= layers
            if fits and request.allows("vpp", vpp):
                yield schedule, vpp


def _shares(request: Request, pp: int) -> Shares:
    """Return all shares that are legal with pp pipeline ranks."""
    config, model, s = request.config, request.config.model, request.config.training.seq_length
    batch = config.training.global_batch_size
    assert batch is not None
    ranks = request.world_size // pp
    experts, sequences = model.num_experts or 1, config.training.moe_aux_loss_sequences
    axes: dict[str, Sequence[int]] = {
        "tp": [tp for tp in _tensor_sizes(config, ranks) if request.allows("tp", tp)],
        "cp": [cp for cp in divisor_list(ranks) if (cp == 1 or s % (2 * cp) == 0) and request.allows("cp", cp)],
        "ep": [ep for ep in divisor_list(experts) if request.allows("ep", ep)],
        "micro_batch_size": [
            b for b in divisor_list(batch) if request.allows("micro_batch_size", b) and b % sequences == 0
        ],
        "recompute": [RECOMPUTE.index(name) for name in request.of("recompute_granularity")],
        "strategy": [STRATEGIES.index(name) for name in request.of("dp_strategy")],
        "sequence_parallel": [int(value) for value in request.of("sequence_parallel")],
        # 1, or 0 as a placeholder for the number that keeps each instance within a node.
        "dp_instances": request.fixed.get("dp_instances", (1, 0)),
        "offload": [int(value) for value in request.fixed.get(HOST[0], (False,))],
    }
    grid = np.meshgrid(*(np.array(values, dtype=np.int64) for values in axes.values()), indexing="ij")
    columns = {name: axis.reshape(-1) for name, axis in zip(axes, grid, strict=True)}
    tp, cp, strategy, instances = (columns[name] for name in ("tp", "cp", "strategy", "dp_instances"))
    legal = ranks % (tp * cp) == 0
    dp = columns["dp"] = ranks // (tp * cp)
    for size in batch_sizes(config):  # each batch of a ramp-up or schedule is a whole number of microbatches
        legal &= size % np.maximum(dp * columns["micro_batch_size"], 1) == 0
    if model.linear_attention_freq is not None:
        legal &= model.linear_num_key_heads % (tp * cp) == 0
    if model.is_sparse and config.parallel.cp_comm_type != "allgather":
        legal &= cp == 1
    legal &= (columns["sequence_parallel"] == 0) | ((tp > 1) & (s % (tp * cp) == 0))
    if "dp" in request.fixed:
        legal &= np.isin(dp, request.fixed["dp"])
    sizes = config.parallel.hierarchical_context_parallel_sizes
    if config.parallel.cp_comm_type in ("a2a", "a2a+p2p"):
        groups, heads = np.maximum(model.query_groups // tp, 1), cp
        if config.parallel.cp_comm_type == "a2a+p2p" and sizes:
            heads = np.where(cp == 1, 1, sizes[0])
            legal &= (cp == 1) | (cp == math.prod(sizes))
        legal &= (model.num_attention_heads // tp % heads == 0) & ((groups % heads == 0) | (heads % groups == 0))
    replicas = np.maximum(dp * cp, 1)
    inside = _in_node(request, pp, tp, cp, dp)
    legal &= (instances > 0) | (inside > 1)
    instances = columns["dp_instances"] = np.where(instances > 0, instances, replicas // inside)
    sharded = (strategy != STRATEGIES.index("all-reduce")) & (replicas % instances == 0) & (replicas > instances)
    legal &= (instances == 1) | sharded
    if model.num_experts is not None:
        grid_fits, expert_replicas = _experts_fit(config, pp, tp, cp, columns["ep"], dp)
        legal &= grid_fits & (expert_replicas % instances == 0)
        replicas = np.maximum(replicas, expert_replicas)
    legal &= (replicas > 1) | (strategy == (axes["strategy"] or [0])[0])
    return Shares(**columns).take(legal)


def _in_node(request: Request, pp: int, tp: Integers, cp: Integers, dp: Integers) -> Integers:
    """Return the largest number of replicas, per share, that fits into a node and divides the number of all replicas; 1
    if all replicas or no two fit into a node. Smaller instances need more memory and send more."""
    pp_stride = pp if request.config.parallel.rank_order == "tp-cp-ep-pp-dp" else 1
    found = np.ones_like(tp)
    for part in divisor_list(request.node) if request.node else ():
        reach = tp * np.where(part > cp, pp_stride, 1) * part
        found = np.where((request.node % reach == 0) & (dp * cp % part == 0), part, found)
    spread = tp * np.where(dp > 1, pp_stride, 1) * dp * cp > request.node
    return np.where(spread, found, 1)


def _tensor_sizes(config: RunConfig, ranks: int) -> list[int]:
    model = config.model
    common = math.gcd(model.num_attention_heads, model.padded_vocab_size, ranks)
    if any(map(model.has_dense_mlp, range(model.num_layers))):
        common = math.gcd(common, model.ffn_size)
    if model.num_experts and model.moe_shared_expert_intermediate_size is not None:
        common = math.gcd(common, model.moe_shared_expert_intermediate_size)
    return [tp for tp in divisor_list(common) if whole_shares(model.query_groups, tp)]


def _experts_fit(
    config: RunConfig, pp: int, tp: Integers, cp: Integers, ep: Integers, dp: Integers
) -> tuple[npt.NDArray[np.bool_], Integers]:
    """Return (mask of the shares with a legal expert grid, replicas of each expert)."""
    model, p, s = config.model, config.parallel, config.training.seq_length
    etp = tp if p.etp is None else np.full_like(tp, p.etp)
    ranks = tp * cp * dp
    fits = (ranks % (etp * ep) == 0) & (model.expert_ffn_size % etp == 0) & (s % (tp * cp) == 0)
    if p.rank_order == "tp-cp-ep-pp-dp" and pp > 1:
        fits &= ((ep == 1) & (etp == tp)) | (etp * ep == tp * cp)
    return fits, ranks // (etp * ep)


def kinds(*keys: npt.NDArray[Any]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Group shares by equal `keys` (columns of integers): return (index of one share per group, group of each share)."""
    # One number per share: sorting rows takes ten times as long.
    codes = np.zeros(len(keys[0]), dtype=np.int64)
    for column in keys:
        codes = codes * (int(column.max()) + 1) + column
    _, index, of_kind = np.unique(codes, return_index=True, return_inverse=True)
    return index, of_kind
