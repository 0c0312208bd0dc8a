"""What every data-parallel strategy shares: buckets, the order of reductions, and the shards that are optimized."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megalite.data_parallel.buckets import Bucket, BucketKind, Placed, make_buckets
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.group import Group, Work

NORM_ROW = 1 << 14
"""Elements whose squares are summed in the gradient's own precision."""

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

    def replicas(self, kind: BucketKind) -> Group:
        """The ranks with the same bucket of this kind and other samples."""
        return self.expert_dp if kind.expert else self.dp


class DataParallelStrategy(ABC):
    """Owns the buckets of this rank's stages. Its life in one step:

    `zero_grad`; during the program `arm` and `launch`, stage by stage; `finish_gradients`; then, after the optimizer
    has stepped `shards`, `publish_parameters`.
    """

    def __init__(
        self,
        stages: Mapping[int, torch.nn.Module],
        *,
        groups: StrategyGroups,
        bucket_size: int,
        grad_dtype: torch.dtype,
        overlap_grad_reduce: bool,
    ) -> None:
        self.groups = groups
        self._overlap = overlap_grad_reduce
        self.buckets: dict[int, list[Bucket]] = {
            stage: make_buckets(
                own,
                bucket_size=bucket_size,
                align=lambda kind: ALIGNMENT * groups.replicas(kind).size,
                grad_dtype=grad_dtype,
            )
            for stage, own in _own_parameters(stages).items()
        }
        self._reducing: dict[Bucket, Work] = {}
        self.shards = [self._make_shard(bucket) for bucket in self.all_buckets()]

    def all_buckets(self) -> list[Bucket]:
        """Buckets of all stages."""
        return [bucket for buckets in self.buckets.values() for bucket in buckets]

    def _make_shard(self, bucket: Bucket) -> OptimizerShard:
        start, stop = self.owned_range(bucket)
        values, grad = bucket.data[start:stop], bucket.grad[start:stop]
        main_param = torch.nn.Parameter(values if values.dtype == grad.dtype else values.to(grad.dtype))
        main_param.grad = grad
        kind, groups = bucket.kind, self.groups
        first_copy = not kind.tied or groups.embedding is None or groups.embedding.rank == 0
        own_split = kind.split_over_tp or kind.expert or groups.tp.rank == 0
        counts = first_copy and own_split and (self.shards_over_dp or groups.replicas(kind).rank == 0)
        return OptimizerShard(bucket, start, stop, main_param, counts)

    shards_over_dp: bool
    """Each of the ranks with the same bucket updates a part of it of its own."""

    @abstractmethod
    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        """The part of a bucket whose gradient this rank has after reduction and whose parameters it updates."""

    @abstractmethod
    def _reduce(self, bucket: Bucket) -> Work:
        """Start summing the bucket's gradients over the ranks that hold it too."""

    @abstractmethod
    def publish_parameters(self) -> None:
        """Make the stepped main parameters the model's, on every rank."""

    @abstractmethod
    def wait_for_parameters(self) -> None:
        """Return when the model's parameters may be read outside a forward."""

    @abstractmethod
    def gather(self, shard: OptimizerShard, values: torch.Tensor) -> torch.Tensor:
        """From all replicas' `values` of one shard (like its main_param), the whole bucket's. Every rank calls it."""

    def zero_grad(self) -> None:
        """Forget the last step's gradients, also those of a step that failed half way."""
        for work in self._reducing.values():
            work.wait()
        self._reducing.clear()
        for bucket in self.all_buckets():
            bucket.disarm()
            bucket.grad.zero_()

    def arm(self, stage: int, pending: Sequence[torch.nn.Parameter] | None = None) -> None:
        """The stage's last gradients come next: start each bucket's reduction when it is full.

        Args:
            pending: the parameters whose gradients are still to come, each as often as it will report; buckets without
                any are complete and start now. None: a whole backward comes.
        """
        if self._overlap:
            counts = None if pending is None else Counter(pending)
            for bucket in self.buckets[stage]:
                if not _waits_for_others(bucket):
                    bucket.arm(lambda bucket=bucket: self._start(bucket), counts)  # type: ignore[misc]

    def launch(self, stage: int) -> None:
        """The stage's gradients are final: start what `arm` has not."""
        for bucket in self.buckets[stage]:
            if not _waits_for_others(bucket):
                self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        if bucket not in self._reducing:
            self._reducing[bucket] = self._reduce(bucket)

    def finish_gradients(self) -> None:
        """Return with the sums of the owned ranges complete.

        Gradients that tp ranks or the two copies of a tied embedding hold in parts are summed over those first:
        after a reduce-scatter over dp the parts would no longer line up.
        """
        late = [bucket for bucket in self.all_buckets() if _waits_for_others(bucket)]
        for bucket in late:
            if bucket.kind.partial_over_tp:
                self.groups.tp.all_reduce(bucket.grad)
            if bucket.kind.tied and self.groups.embedding is not None:
                self.groups.embedding.all_reduce(bucket.grad)
            self._start(bucket)
        for work in self._reducing.values():
            work.wait()
        self._reducing.clear()

    def local_norm_squared(self) -> torch.Tensor:
        """This rank's part of Σg² over the whole model, fp64; the sum over the world is the whole.

        Accumulated in fp64: torch's fp32 norm of millions of elements is off in the fifth digit on CPU.
        """
        device = self.shards[0].main_param.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for shard in self.shards:
            if shard.counts_in_norm:
                total += _norm_squared(shard.main_param.grad)
        return total


def _own_parameters(stages: Mapping[int, torch.nn.Module]) -> dict[int, list[ShardedParameter]]:
    """By stage; what two stages share (a tied embedding where both ends are on one rank) is the first one's."""
    seen: set[torch.nn.Parameter] = set()
    found: dict[int, list[ShardedParameter]] = {}
    for stage, module in stages.items():
        own = [p for p in module.parameters() if isinstance(p, ShardedParameter) and p not in seen]
        seen.update(own)
        found[stage] = own
    return found


def _norm_squared(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    # Rows small enough that fp32's pairwise sum keeps its digits, their total in fp64.
    whole = grad.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(grad[:whole].view(-1, NORM_ROW), dim=1).double().square().sum()
    return rows + torch.linalg.vector_norm(grad[whole:]).double().square()


def _waits_for_others(bucket: Bucket) -> bool:
    return bucket.kind.partial_over_tp or bucket.kind.tied


def placed_in(shard: OptimizerShard) -> list[Placed]:
    """The parameters that a shard touches."""
    return [
        placed for placed in shard.bucket.placed if placed.start < shard.stop and placed.stop > shard.start
    ]
