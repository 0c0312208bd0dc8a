"""Define bucket sizes, strategy states and wire formats of data parallelism, without torch, for training and planner.

A parameter here is any object with a kind and a size: a tensor in training, a shape in the planner."""

import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

from megalite.config.errors import ConfigError
from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.run import RunConfig

P = TypeVar("P")

ALIGNMENT = 64  # elements; each rank's part of a bucket is a multiple of this


class BucketKind(NamedTuple):
    """The properties that all parameters of a bucket share."""

    decay: bool
    split_over_tp: bool
    partial_over_tp: bool
    """Each tp rank has the whole parameter, but its gradient covers only that rank's part of the work."""
    tied: bool
    expert: bool
    orthogonal: bool = False
    learning_rate: tuple[bool, float] = (False, 1.0)  # a `models.shapes.LearningRate`
    fp8: bool = False  # gathered in fp8

    @property
    def in_parts(self) -> bool:
        """Whether the gradient must be summed over tp, or over both copies of a tied embedding, before dp."""
        return self.partial_over_tp or self.tied


def cut_into_buckets(
    parameters: Iterable[P], *, kind: Callable[[P], BucketKind], size: Callable[[P], int], bucket_size: int
) -> list[tuple[BucketKind, list[P]]]:
    """Assign parameters to buckets: in reverse order, as gradients arrive, each to the open bucket of its kind. A bucket
    is closed once it has `bucket_size` elements."""
    open_buckets: dict[BucketKind, tuple[list[P], int]] = {}
    closed: list[tuple[BucketKind, list[P]]] = []
    for parameter in reversed(list(parameters)):
        key = kind(parameter)
        members, elements = open_buckets.get(key, ([], 0))
        members.append(parameter)
        elements += size(parameter)
        if elements >= bucket_size:
            closed.append((key, members))
            open_buckets.pop(key, None)
        else:
            open_buckets[key] = members, elements
    return [*closed, *((key, members) for key, (members, _) in open_buckets.items())]


def padded(elements: int, replicas: int) -> int:
    """Return the elements of a bucket with its padding, for `replicas` ranks with the same bucket."""
    return -(-elements // (ALIGNMENT * replicas)) * ALIGNMENT * replicas


def choose_offloaded(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Return which of a rank's ranges, in the order of its buckets, are offloaded: the first ones, until they make up
    `fraction` of the sum of `sizes`."""
    wanted, before = fraction * sum(sizes), [sum(sizes[:index]) for index in range(len(sizes))]
    return [start < wanted and size > 0 for start, size in zip(before, sizes, strict=True)]


def wire_width(config: RunConfig) -> int:
    """Return the bytes per gradient element on the wire."""
    if config.data_parallel.narrow_wire:
        return 2
    return 8 if config.training.precision == "fp64" else 4


def message_elements(megabytes: float, width: int) -> int:
    """Return the elements of `width` bytes in one message to or from a server: whole aligned blocks, at least one."""
    return max(1, int(megabytes * 1e6 / width) // ALIGNMENT) * ALIGNMENT


def bucket_size(config: RunConfig, replicas: int) -> int:
    """Return the number of elements at which a bucket is closed. `replicas`: number of dp·cp ranks."""
    rule = config.parallel.strategy.buckets
    if rule == "whole":
        return sys.maxsize
    if rule == "messages":
        return replicas * message_elements(config.data_parallel.server_chunk_mb, wire_width(config))
    return config.parallel.ddp_bucket_size


class Placement(Enum):
    """How a state is distributed over the ranks with the same bucket."""

    REPLICATED = "replicated"
    SHARDED = "sharded"
    PRIVATE = "private"
    """Each rank has different values of every element. A checkpoint contains all, with a leading dimension over replicas;
    a run with another number of replicas loads their mean."""


class StateFact(NamedTuple):
    """A state that a strategy stores for each element of a bucket."""

    placement: Placement
    default: str
    """The value if a checkpoint lacks the state: `required` (an error), `zeros` (0, with a line in the log) or
    `parameter` (the main parameters)."""


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
    # The next two are main parameters, which exist anyway.
    "replica_param": StateFact(Placement.PRIVATE, "parameter"),
    "main_param": StateFact(Placement.REPLICATED, "required"),
}
"""States by their names in checkpoints, in the precision of main parameters. The registration of a user's strategy adds
its states."""


def strategy_states(config: RunConfig) -> tuple[str, ...]:
    """Return the states that a run's strategy stores with several replicas, in addition to the optimizer's."""
    onebit = config.optimizer.optimizer in ONEBIT_OPTIMIZERS
    codec = "onebit" if onebit else config.data_parallel.grad_compression
    if codec != "none":
        return tuple(name for name in STATES if name.startswith(f"{codec}_"))
    return config.parallel.strategy.states(config)


def state_elements(names: Iterable[str], replicas: int) -> float:
    """Return the elements of the states that a rank stores per element of a bucket."""
    return sum(1 / replicas if state_fact(name).placement is Placement.SHARDED else 1.0 for name in names)


def state_fact(name: str) -> StateFact:
    """Return the entry of a strategy's state. Raises ConfigError: it has none."""
    if name not in STATES:
        raise ConfigError(
            f"a data-parallel strategy keeps a state {name}, which is not in megalite.data_parallel.facts.STATES; add "
            f"STATES[{name!r}] = StateFact(placement, default) at the strategy's registration"
        )
    return STATES[name]


def low_rank_pays(rank: int, a: int, b: int) -> bool:
    """Return whether PowerSGD compresses an a×b matrix: its two factors must take less than half of the matrix."""
    return 2 * rank * (a + b) < a * b
