"""What data-parallel strategies cut, keep and send, without torch: for the strategies, and for what plans their memory.

A parameter here is anything with a kind and a size: a tensor in training, a shape in the planner.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

from megalite.config.errors import ConfigError
from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.run import RunConfig

P = TypeVar("P")

ALIGNMENT = 64  # elements; what each rank has of a bucket is a multiple of this


class BucketKind(NamedTuple):
    """What all parameters of a bucket have in common."""

    decay: bool
    split_over_tp: bool
    partial_over_tp: bool
    """Each tp rank's gradient covers its part of the work alone, although it has the whole parameter."""
    tied: bool
    expert: bool
    orthogonal: bool = False
    learning_rate: tuple[bool, float] = (False, 1.0)  # a `models.shapes.LearningRate`
    fp8: bool = False  # it is gathered in fp8

    @property
    def in_parts(self) -> bool:
        """Its gradient must be summed over tp, or over both copies of a tied embedding, before it is over dp."""
        return self.partial_over_tp or self.tied


def cut_into_buckets(
    parameters: Iterable[P], *, kind: Callable[[P], BucketKind], size: Callable[[P], int], bucket_size: int
) -> list[tuple[BucketKind, list[P]]]:
    """The bucket rule: parameters in reverse order, as gradients come, each to the open bucket of its kind, which is
    closed once it has `bucket_size` elements."""
    open_buckets: dict[BucketKind, tuple[list[P], int]] = {}
    closed: list[tuple[BucketKind, list[P]]] = []
    for parameter in reversed(list(parameters)):
        of = kind(parameter)
        members, elements = open_buckets.get(of, ([], 0))
        members.append(parameter)
        elements += size(parameter)
        if elements >= bucket_size:
            closed.append((of, members))
            open_buckets.pop(of, None)
        else:
            open_buckets[of] = members, elements
    return [*closed, *((of, members) for of, (members, _) in open_buckets.items())]


def padded(elements: int, replicas: int) -> int:
    """Elements of a bucket that so many ranks share, with its padding."""
    return -(-elements // (ALIGNMENT * replicas)) * ALIGNMENT * replicas


def in_host_memory(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Which of a rank's ranges, in the order of its buckets, are offloaded: the first, until so much of their sum is."""
    wanted, before = fraction * sum(sizes), [sum(sizes[:index]) for index in range(len(sizes))]
    return [start < wanted and size > 0 for start, size in zip(before, sizes, strict=True)]


def wire_width(config: RunConfig) -> int:
    """Bytes of an element of a gradient on the wire."""
    if config.data_parallel.narrow_wire:
        return 2
    return 8 if config.training.precision == "fp64" else 4


def message_elements(megabytes: float, width: int) -> int:
    """Elements of `width` bytes in one message to or from a server: whole aligned blocks, at least one."""
    return max(1, int(megabytes * 1e6 / width) // ALIGNMENT) * ALIGNMENT


def bucket_size(config: RunConfig, replicas: int) -> int:
    """Elements at which a bucket is closed, with so many dp·cp ranks."""
    rule = config.parallel.strategy.buckets
    if rule == "whole":
        return sys.maxsize
    if rule == "messages":
        return replicas * message_elements(config.data_parallel.server_chunk_mb, wire_width(config))
    return config.parallel.ddp_bucket_size


class Placement(Enum):
    """How the ranks with the same bucket have a state of it."""

    REPLICATED = "replicated"
    SHARDED = "sharded"
    PRIVATE = "private"
    """Each has different values for every element; all are saved, under a leading dimension over replicas. Another
    number of replicas loads the mean of the old ones."""


class StateFact(NamedTuple):
    """A state that a strategy keeps of each element of a bucket."""

    placement: Placement
    default: str
    """What a checkpoint without it means: `required` (an error), `zeros` (0 with a line in the log) or `parameter` (the
    main parameters)."""


STATES: dict[str, StateFact] = {
    "onebit_error": StateFact(Placement.PRIVATE, "zeros"),
    "onebit_server_error": StateFact(Placement.SHARDED, "zeros"),
    "uint8_error": StateFact(Placement.PRIVATE, "zeros"),
    "uint8_server_error": StateFact(Placement.SHARDED, "zeros"),
    "topk_error": StateFact(Placement.PRIVATE, "zeros"),
    "powersgd_error": StateFact(Placement.PRIVATE, "zeros"),
    "sync_change": StateFact(Placement.PRIVATE, "zeros"),
    "anchor": StateFact(Placement.REPLICATED, "parameter"),
    "outer_momentum": StateFact(Placement.REPLICATED, "zeros"),
    "outer_mean": StateFact(Placement.REPLICATED, "zeros"),
    "gossip_momentum": StateFact(Placement.PRIVATE, "zeros"),
    "gossip_own": StateFact(Placement.PRIVATE, "parameter"),
    "gossip_left": StateFact(Placement.PRIVATE, "parameter"),
    "gossip_right": StateFact(Placement.PRIVATE, "parameter"),
    # The next two are main parameters, which are there anyway.
    "replica_param": StateFact(Placement.PRIVATE, "parameter"),
    "main_param": StateFact(Placement.REPLICATED, "required"),
}
"""By their names in checkpoints; values have the precision of main parameters. A strategy of users has its own added
where it is registered."""


def strategy_states(config: RunConfig) -> tuple[str, ...]:
    """The states that a run's strategy keeps where there are several replicas, in addition to the optimizer's."""
    onebit = config.optimizer.optimizer in ONEBIT_OPTIMIZERS
    codec = "onebit" if onebit else config.data_parallel.grad_compression
    if codec != "none":
        return tuple(name for name in STATES if name.startswith(f"{codec}_"))
    return config.parallel.strategy.states(config)


def state_elements(names: Iterable[str], replicas: int) -> float:
    """Elements that a rank keeps of the states for each element of a bucket."""
    return sum(1 / replicas if state_fact(name).placement is Placement.SHARDED else 1.0 for name in names)


def state_fact(name: str) -> StateFact:
    """What is stated of a strategy's state. Raises ConfigError: nothing is."""
    if name not in STATES:
        raise ConfigError(
            f"a data-parallel strategy keeps a state {name}, of which nothing is stated; add STATES[{name!r}] = "
            "StateFact(placement, default) of megalite.data_parallel.facts where it is registered"
        )
    return STATES[name]


def low_rank_pays(rank: int, a: int, b: int) -> bool:
    """PowerSGD sends two factors of an a×b matrix: they are far smaller than it."""
    return 2 * rank * (a + b) < a * b
