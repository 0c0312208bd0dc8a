"""Facts about each data-parallel strategy: its rules, memory, traffic and place in searches.

A strategy is a class (`data_parallel.strategy.DataParallelStrategy`) and the facts it is registered with in
`STRATEGIES`. No other code checks a strategy's name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megalite.config.registry import Registry

Config = Any
"""A RunConfig, untyped because its module imports this one."""

Volumes = list[tuple[str, float]]
"""(operation, bytes) pairs, as `planner.communication` counts them."""


class BucketTraffic(NamedTuple):
    """One bucket in one step: the numbers that determine a replica's traffic."""

    config: Config
    elements: int
    replicas: int
    """Replicas of one instance."""
    parameter: int
    """Bytes per element of the model's parameters."""
    wire: int
    """Bytes per element of a gradient on the wire."""
    in_parts: bool
    """Whether sums are computed from parts in a fixed order instead of by the library's reduction."""
    gathers: int
    """Number of gathers of the parameters."""
    microbatches: int
    state_bytes: int
    """Bytes per element of all optimizer states on the wire."""


@dataclass(frozen=True, kw_only=True)
class StrategyFacts:
    """Facts about one strategy."""

    traffic: Callable[[BucketTraffic], Volumes]
    """Average traffic of a bucket per step, for the replica that sends most."""
    settings: str = ""
    """Settings that this strategy uses, of those that only some strategies use."""
    weights: Literal["equal", "local", "stale"] = "equal"
    """Weights of the replicas: equal after each step; local, at least for some steps; or stale (a server's last
    answer)."""
    shards: Literal["nothing", "states", "parameters"] = "nothing"
    """Tensors that are sharded over replicas: the optimizer states (each updates its shard), or the parameters too."""
    served: bool = False
    """Whether only the first replica stores main parameters and optimizer states."""
    buckets: Literal["settings", "whole", "messages"] = "settings"
    """Bucket size: `ddp_bucket_size`, all parameters, or one message to each server."""
    norm_terms: int = 1
    """Values that determine the gradient norm, in the all-reduce over all ranks."""
    states: Callable[[Config], tuple[str, ...]] = lambda config: ()
    """Per-element states of the strategy, by names of `data_parallel.facts.STATES`."""
    searched: bool = False
    """Whether the planner and elastic runs may choose it; never one with other weights than equal."""

    def has(self, setting: str) -> bool:
        """Return whether the strategy uses the setting."""
        return setting in self.settings.split()

    @property
    def shards_states(self) -> bool:
        """Whether each replica updates a shard of a bucket."""
        return self.shards != "nothing"

    @property
    def shards_parameters(self) -> bool:
        """Whether each replica stores a shard of the parameters between uses."""
        return self.shards == "parameters"


def _summed(t: BucketTraffic) -> Volumes:
    size = t.elements * t.wire
    return [("all-to-all", size), ("all-gather", size)] if t.in_parts else [("all-reduce", size)]


def _sharded(t: BucketTraffic, pushes: int) -> Volumes:
    reduction = "all-to-all" if t.in_parts else "reduce-scatter"
    return [(reduction, pushes * t.elements * t.wire), ("all-gather", t.gathers * t.elements * t.parameter)]


def _served(t: BucketTraffic) -> Volumes:
    return [("send", (t.replicas - 1) * t.elements * t.parameter)]


def _averaged(t: BucketTraffic) -> Volumes:
    d = t.config.data_parallel
    size = t.elements * (t.wire + (t.state_bytes if d.average_optimizer_state else 0)) / d.sync_interval
    return [("all-to-all", size), ("all-gather", size)]


INTEGER_BLOCK = 2048
"""Elements that share a scale when they are sent as 8-bit integers."""


def integer_bytes(elements: int, width: int) -> int:
    """Return the bytes of 8-bit integers and their scales, which have `width` bytes each."""
    return elements + -(-elements // INTEGER_BLOCK) * width


def _neighbours(t: BucketTraffic) -> Volumes:
    d = t.config.data_parallel
    peers = 1 if d.gossip_graph == "one-peer" or t.replicas == 2 else 2
    if d.gossip_algorithm == "choco-sgd":
        return [("send", peers * integer_bytes(t.elements, max(4, t.parameter)))]
    return [("send", peers * t.elements * t.wire)]


def _gossip_states(config: Config) -> tuple[str, ...]:
    algorithm = config.data_parallel.gossip_algorithm
    if algorithm == "choco-sgd":
        return ("gossip_own", "gossip_left", *(["gossip_right"] if config.parallel.distinct_replicas != 2 else []))
    return ("gossip_momentum",) if algorithm == "decentlam" else ()


_HERE = "megalite.data_parallel"
_GRADIENTS = "reduction_order ddp_bucket_size"
_LOCAL = f"{_GRADIENTS} sync_warmup_steps dp_instances"

STRATEGIES: Registry[type] = Registry(
    "dp_strategy",
    {
        "all-reduce": (
            f"{_HERE}.strategy:AllReduce",
            StrategyFacts(settings=f"{_GRADIENTS} grad_compression", traffic=_summed, searched=True),
        ),
        "fused-all-reduce": (
            f"{_HERE}.fused_all_reduce:FusedAllReduce",
            StrategyFacts(
                settings="reduction_order fusion_threshold_mb", traffic=_summed, buckets="whole", norm_terms=2
            ),
        ),
        "distributed-optimizer": (
            f"{_HERE}.zero:DistributedOptimizer",
            StrategyFacts(
                settings=f"{_GRADIENTS} overlap_param_gather fp8_param_gather shard_gradients dp_instances",
                traffic=lambda t: _sharded(t, t.microbatches if t.config.data_parallel.shard_gradients else 1),
                shards="states",
                searched=True,
            ),
        ),
        "fully-sharded": (
            f"{_HERE}.fully_sharded:FullySharded",
            StrategyFacts(
                settings=f"{_GRADIENTS} overlap_param_gather fp8_param_gather dp_instances",
                traffic=lambda t: _sharded(t, t.microbatches),
                shards="parameters",
                searched=True,
            ),
        ),
        "parameter-server": (
            f"{_HERE}.parameter_server:ParameterServer",
            StrategyFacts(settings=f"{_GRADIENTS} overlap_param_gather server_chunk_mb", traffic=_served, served=True),
        ),
        "sharded-parameter-server": (
            f"{_HERE}.parameter_server:ShardedParameterServer",
            StrategyFacts(
                settings="reduction_order overlap_param_gather server_chunk_mb",
                traffic=lambda t: [("all-to-all", t.elements * t.wire), ("all-gather", t.elements * t.parameter)],
                shards="states",
                buckets="messages",
            ),
        ),
        "async-parameter-server": (
            f"{_HERE}.parameter_server:AsyncParameterServer",
            StrategyFacts(
                settings="ddp_bucket_size server_chunk_mb max_staleness staleness_aware_lr",
                traffic=_served,
                weights="stale",
                served=True,
            ),
        ),
        "local-sgd": (
            f"{_HERE}.local_sgd:LocalSGD",
            StrategyFacts(
                settings=f"{_LOCAL} sync_interval sync_delay average_optimizer_state",
                traffic=_averaged,
                weights="local",
                states=lambda config: (
                    *(["anchor"] if config.data_parallel.narrow_wire else []),
                    *(["sync_change"] if config.data_parallel.sync_delay else []),
                ),
            ),
        ),
        "diloco": (
            f"{_HERE}.local_sgd:DiLoCo",
            StrategyFacts(
                settings=f"{_LOCAL} sync_interval outer_lr outer_momentum sync_fragments sync_delay sync_mix",
                traffic=_averaged,
                weights="local",
                states=lambda config: (
                    "anchor",
                    "outer_momentum",
                    *(["outer_mean"] if config.data_parallel.sync_delay else []),
                ),
            ),
        ),
        "gossip": (
            f"{_HERE}.local_sgd:Gossip",
            StrategyFacts(
                settings=f"{_LOCAL} gossip_graph gossip_algorithm",
                traffic=_neighbours,
                weights="local",
                states=_gossip_states,
            ),
        ),
    },
    StrategyFacts,
)
"""Strategies by name. Register your own with `@STRATEGIES.register("mine", traffic=..., ...)` above its class."""

ALIASES: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"dp_strategy": "all-reduce"},
    "horovod": {"dp_strategy": "fused-all-reduce"},
    "byteps": {"dp_strategy": "sharded-parameter-server"},
    "zero1": {"dp_strategy": "distributed-optimizer"},
    "zero2": {"dp_strategy": "distributed-optimizer", "shard_gradients": True},
    "zero3": {"dp_strategy": "fully-sharded"},
    "fsdp": {"dp_strategy": "fully-sharded"},
}
"""Aliases of `dp_strategy` values -> the settings that they set."""
