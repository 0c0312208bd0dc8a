"""What each data-parallel strategy is to the rest of megalite: its rules, memory, traffic and place in searches.

A strategy is a class (`data_parallel.strategy.DataParallelStrategy`) and the facts that it is registered with in
`STRATEGIES`; nothing else asks for its name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from megalite.config.registry import Registry

Config = Any
"""A RunConfig; its module imports this one."""

Volumes = list[tuple[str, float]]
"""(operation, bytes), as `planner.communication` counts them."""


class BucketTraffic(NamedTuple):
    """One bucket in one step, as what replicas send of it depends on it."""

    config: Config
    elements: int
    replicas: int
    """Of several instances those of one."""
    parameter: int
    """Bytes of an element of the model's parameters."""
    wire: int
    """Bytes of an element of a gradient on the wire."""
    in_parts: bool
    """Sums are made from parts in an order that we choose, instead of by the library's reduction."""
    gathers: int
    """How often the parameters are gathered."""
    microbatches: int
    state_bytes: int
    """Of an element of all the optimizer's states on the wire."""


@dataclass(frozen=True, kw_only=True)
class StrategyFacts:
    """Of one strategy."""

    traffic: Callable[[BucketTraffic], Volumes]
    """What the replica that sends most sends of a bucket in a step, on average."""
    settings: str = ""
    """The settings that mean something to it, of those that only some strategies have."""
    weights: Literal["equal", "local", "stale"] = "equal"
    """Of replicas: equal after each step; each its own, at least for some steps; or as old as a server's last answer."""
    shards: Literal["nothing", "states", "parameters"] = "nothing"
    """What a replica has an equal part of alone: the optimizer's states (it then updates that part), or parameters too."""
    served: bool = False
    """The first replica alone has main parameters and the optimizer's states."""
    buckets: Literal["settings", "whole", "messages"] = "settings"
    """As large as `ddp_bucket_size`, as all parameters, or as a message to each server."""
    norm_terms: int = 1
    """Numbers that give the gradient's norm, in the all-reduce of the whole world."""
    states: Callable[[Config], tuple[str, ...]] = lambda config: ()
    """What it keeps of each element, by names of `data_parallel.facts.STATES`."""
    searched: bool = False
    """The planner, and an elastic run, may choose it: its numbers do not depend on the layout."""

    def has(self, setting: str) -> bool:
        """The setting means something to it."""
        return setting in self.settings.split()

    @property
    def shards_states(self) -> bool:
        """Each replica updates an equal part of a bucket."""
        return self.shards != "nothing"

    @property
    def shards_parameters(self) -> bool:
        """Each replica has an equal part of the parameters between their uses."""
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
"""Elements that share a scale, where they travel as 8-bit integers."""


def integer_bytes(elements: int, width: int) -> int:
    """Of 8-bit integers and their scales, of `width` bytes."""
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
        return ("gossip_own", "gossip_left", *(["gossip_right"] if config.parallel.own_weights != 2 else []))
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
            f"{_HERE}.more.parameter_server:ParameterServer",
            StrategyFacts(settings=f"{_GRADIENTS} overlap_param_gather server_chunk_mb", traffic=_served, served=True),
        ),
        "sharded-parameter-server": (
            f"{_HERE}.more.parameter_server:ShardedParameterServer",
            StrategyFacts(
                settings="reduction_order overlap_param_gather server_chunk_mb",
                traffic=lambda t: [("all-to-all", t.elements * t.wire), ("all-gather", t.elements * t.parameter)],
                shards="states",
                buckets="messages",
            ),
        ),
        "async-parameter-server": (
            f"{_HERE}.more.parameter_server:AsyncParameterServer",
            StrategyFacts(
                settings="ddp_bucket_size server_chunk_mb max_staleness staleness_aware_lr",
                traffic=_served,
                weights="stale",
                served=True,
            ),
        ),
        "local-sgd": (
            f"{_HERE}.more.local_sgd:LocalSGD",
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
            f"{_HERE}.more.local_sgd:DiLoCo",
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
            f"{_HERE}.more.local_sgd:Gossip",
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
"""By name, as `dp_strategy` gives it. Your own: `@STRATEGIES.register("mine", traffic=..., ...)` above its class."""

ALIASES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "ddp": {"dp_strategy": "all-reduce"},
        "horovod": {"dp_strategy": "fused-all-reduce"},
        "byteps": {"dp_strategy": "sharded-parameter-server"},
        "zero1": {"dp_strategy": "distributed-optimizer"},
        "zero2": {"dp_strategy": "distributed-optimizer", "shard_gradients": True},
        "zero3": {"dp_strategy": "fully-sharded"},
        "fsdp": {"dp_strategy": "fully-sharded"},
    }
)
"""Names that flags and files may give for `dp_strategy` -> the settings that they stand for."""


def searched_strategies() -> tuple[str, ...]:
    """Those that the planner and an elastic run choose among."""
    return tuple(name for name in STRATEGIES if STRATEGIES.facts(name).searched)
