"""What strategies are given and what they give: groups and options, ranges to optimize, norms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megalite.data_parallel.buckets import Bucket, BucketKind, Placed
from megalite.kernels.l2norm import l2norm
from megalite.topology.group import Group

ALIGNMENT = 64
"""Elements; shards of buckets start at multiples of this."""


@dataclass(frozen=True, eq=False)
class OptimizerShard:
    """A flat range of a bucket that this rank updates.

    `main_param` is what the optimizer steps, in the gradient's precision: the bucket's own memory where parameters
    have that precision, else a copy of it. `main_param.grad` is the matching range of the bucket's gradient.
    """

    bucket: Bucket
    start: int
    stop: int
    main_param: torch.nn.Parameter
    counts_in_norm: bool
    """Some other rank holds the same gradient and has it counted, unless this is true."""

    @property
    def grad(self) -> torch.Tensor:
        """The gradient of the range."""
        assert self.main_param.grad is not None
        return self.main_param.grad

    @property
    def decay(self) -> bool:
        """Weight decay applies."""
        return self.bucket.kind.decay

    @property
    def is_copy(self) -> bool:
        """The main parameters are apart from the model's."""
        return self.main_param.dtype != self.bucket.data.dtype


@dataclass(frozen=True, kw_only=True)
class StrategyGroups:
    """The groups that gradients are combined over."""

    dp: Group
    """Ranks with other samples; dp·cp where there is context parallelism."""
    tp: Group
    embedding: Group | None
    """First and last rank of the pipeline; None in between."""
    expert_dp: Group
    """Ranks that hold the same part of the same experts, whose gradients are of other tokens."""
    world: Group = field(default_factory=lambda: Group.solo("world"))
    """All ranks: for what all must decide alike."""

    def replicas(self, kind: BucketKind) -> Group:
        """The ranks with the same bucket of this kind and other samples."""
        return self.expert_dp if kind.expert else self.dp


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """What all strategies are told alike."""

    bucket_size: int
    """Elements."""
    grad_dtype: torch.dtype
    overlap: bool
    """Reduce buckets while the last backward still runs."""
    wire_dtype: torch.dtype | None = None
    """None: gradients travel in their own type."""
    by_rank: bool = False
    """Sums over ranks are made in the order of ranks."""
    split_main: bool = False
    """bf16: between updates main parameters are kept as the 16 bits that the model's lack."""
    l2norm: Callable[[Sequence[torch.Tensor]], torch.Tensor] = l2norm
    """The kernel for the norm of gradients, fp64 []."""


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Of the gradient, with the loss scale still in it."""

    shown: float
    """For the log: the same on every rank."""
    clipping: float
    """Of the gradient that this rank's update goes by."""


def placed_in(shard: OptimizerShard) -> list[Placed]:
    """The parameters that a shard touches."""
    return [
        placed for placed in shard.bucket.placed if placed.start < shard.stop and placed.stop > shard.start
    ]
