"""What every data-parallel strategy shares: buckets, the order of reductions, and the shards that are optimized.

A strategy acts in three spaces. *Gradients*: `enable_grad_sync`, `start_grad_sync` and `finish_grad_sync` turn each
rank's part into the gradient of the update. *Optimizer states*: `update` steps the optimizer, and may have it average its
own state over ranks. *Weights*: `update` ends by making the stepped main parameters the model's (`publish_parameters`),
and may average them.
"""

import contextlib
import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from megalite.config.optimizer import HOST_SLOTS, ONEBIT_OPTIMIZERS
from megalite.config.registry import imported
from megalite.config.run import RunConfig
from megalite.config.strategies import STRATEGIES
from megalite.data_parallel.buckets import Bucket, Placed, make_buckets, parameters_of
from megalite.data_parallel.facts import STATES, BucketKind, Placement, in_host_memory
from megalite.data_parallel.shards import (
    Norms,
    OptimizerShard,
    SplitMain,
    StrategyGroups,
    StrategyOptions,
    free_main,
    unfolded,
)
from megalite.data_parallel.wire import Background, Channel, WireCounter
from megalite.optimizers.base import Optimizer, Update
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.group import Group, Work
from megalite.topology.host_memory import HostMemory, pinned
from megalite.topology.topology import Topology


@dataclass(frozen=True, eq=False)
class FlatState:
    """One state for each element of a range of a bucket."""

    name: str  # its key in a checkpoint is `optimizer.<name>:<tensor>`; lower case, with underscores
    bucket: Bucket
    values: torch.Tensor  # flat and live: loading writes into it
    placement: Placement
    start: int = 0  # `values` are of the elements from here on
    default: str = "required"  # see `StateFact`

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


def kept(name: str, bucket: Bucket, values: torch.Tensor, start: int = 0) -> FlatState:
    """A state that is stated in `facts.STATES`."""
    return FlatState(name, bucket, values, STATES[name].placement, start, STATES[name].default)


@dataclass(frozen=True, eq=False)
class TensorState:
    """Something about one tensor of the model, or about this rank's slice of it. A checkpoint without it, or for
    another cut of the tensor, leaves it as it is, with a line in the log."""

    name: str
    bucket: Bucket
    placed: Placed
    values: torch.Tensor  # live, of any shape
    per_slice: bool = False
    """It belongs to the local slice: each tp (or ep) rank has its own. Replicas have the same."""


class DataParallelStrategy(ABC):
    """Owns the buckets of this rank's stages. Its life in one step:

    `begin_step`; during the program, stage by stage, `enable_grad_sync` before the last backward, `collect_grads` after
    each, and `start_grad_sync`; `finish_grad_sync`; `norm_terms` and, once they are summed over the world, `norms`; then
    `update`, unless gradients overflowed.

    Gradients come as this rank's part of the gradient of the mean over the global batch, which is their sum over the
    data-parallel ranks.
    """

    shards_over_dp: bool = False  # each of the ranks with the same bucket updates another part of it
    replicas_agree: bool = True
    """After each update the ranks with the same bucket have the same weights, to the bit."""
    allocates_gradients: bool = True  # gradients have memory from the start

    def __init__(
        self, stages: Mapping[int, torch.nn.Module], *, groups: StrategyGroups, options: StrategyOptions
    ) -> None:
        self.groups, self.options = groups, options
        self.buckets: dict[int, list[Bucket]] = {}
        seen: set[ShardedParameter] = set()
        for stage, module in stages.items():
            # What two stages share (a tied embedding where both ends are on one rank) is the first one's.
            own = [parameter for parameter in parameters_of(module) if parameter not in seen]
            seen.update(own)
            self.buckets[stage] = self._make_buckets(own)
        self.wire_counter = WireCounter()
        self.background = Background(self.device)
        self._channels: dict[Group, Channel] = {}
        self._reducing: dict[Bucket, Work] = {}
        self.notes: list[str] = []
        """Lines for the log, the same on every rank; the training loop takes them out after each step."""
        self._written: Mapping[torch.nn.Parameter, torch.Tensor] = {}
        """What the optimizer has rounded itself, while its step is being published."""
        self._averaged = False  # inside `averaged`
        self.step = 0  # the current step, counted from 1
        self.loss_scale = 1.0
        """The factor of this step's loss; a power of 2, unless the user fixed another."""
        self._unreduced: dict[Bucket, torch.Tensor] = {}
        sizes = [stop - start for start, stop in map(self.owned_range, self.all_buckets())]
        offloaded = in_host_memory(sizes, options.host_fraction)
        self._host = HostMemory(self.device, slots=HOST_SLOTS) if any(offloaded) else None
        self._in_host_memory = set(itertools.compress(self.all_buckets(), offloaded))
        self.shards = [self._make_shard(bucket) for bucket in self.all_buckets()]
        splits = self.shards if options.split_main else []
        self._split = [SplitMain(shard.main_param, self._weights(shard)) for shard in splits]

    @classmethod
    def from_config(
        cls, stages: Mapping[int, torch.nn.Module], config: RunConfig, topology: Topology, **common: Any
    ) -> "DataParallelStrategy":
        """The strategy of a run; `common` are `groups` and `options`."""
        return cls(stages, **common)

    def _make_buckets(self, parameters: Sequence[ShardedParameter]) -> list[Bucket]:
        return make_buckets(
            parameters,
            bucket_size=self.options.bucket_size,
            replicas=lambda kind: self.groups.place(kind)[1],
            grad_dtype=self.options.grad_dtype,
            allocate=self.allocates_gradients,
        )

    def all_buckets(self) -> list[Bucket]:
        return [bucket for buckets in self.buckets.values() for bucket in buckets]

    @property
    def device(self) -> torch.device:
        return self.all_buckets()[0].data.device

    @property
    def has_replicas(self) -> bool:
        return any(self.groups.place(bucket.kind)[1] > 1 for bucket in self.all_buckets())

    def channel(self, bucket: Bucket) -> Channel:
        """The ranks that hold the bucket too; of several instances those of this one."""
        return self._channel(self.groups.replicas(bucket.kind))

    def _channel(self, group: Group) -> Channel:
        if group not in self._channels:
            self._channels[group] = self.new_channel(group, self.wire_counter)
        return self._channels[group]

    def new_channel(self, group: Group, counter: WireCounter, kind: type[Channel] = Channel) -> Channel:
        """One with the run's number format; its bytes are the counter's."""
        options = self.options
        return kind(group, counter, self.background, wire_dtype=options.wire_dtype, by_rank=options.by_rank)

    def _make_shard(self, bucket: Bucket) -> OptimizerShard:
        start, stop = self.owned_range(bucket)
        values, grad = bucket.data[start:stop], bucket.grad[start:stop]
        main_param = torch.nn.Parameter(values if values.dtype == grad.dtype else values.to(grad.dtype))
        main_param.grad = grad
        host = self._host if bucket in self._in_host_memory else None
        host_main = None
        if host is not None and values.dtype != grad.dtype:
            host_main = pinned(grad.numel(), grad.dtype, grad.device)
            host_main.copy_(main_param.data)
            free_main(main_param)
        counts = self._counts(bucket) and (self.shards_over_dp or self.groups.replicas(bucket.kind).rank == 0)
        return OptimizerShard(bucket, start, stop, main_param, counts, host, host_main)

    def _counts(self, bucket: Bucket) -> bool:
        """Of the instances, and the ranks with other parts of the network, that have the bucket's tensors too, this one has
        them counted."""
        return self.groups.instances(bucket.kind).rank == 0 and self.groups.first_copy(bucket.kind)

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        """The part of a bucket that this rank has the reduced gradient of, and updates: all of it,
        unless `shards_over_dp`."""
        return 0, bucket.data.numel()

    def attach(self, optimizer: Optimizer) -> None:
        """The optimizer over `shards` has been made; called once."""

    # ---- what it does when

    @property
    def scope(self) -> Group:
        """The ranks that take the decisions of a step together and use one gradient: all of them, or one of several
        groups of equal size."""
        return self.groups.world

    def phase(self, step: int) -> str:
        """What is exchanged in a step: a function of the step, the settings and what `counters` holds."""
        return "gradients"

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        """Before the first forward of a step: forget the last one's gradients, also those of one that failed half way."""
        self.step, self.loss_scale = step, loss_scale
        self._unreduced.clear()
        self.zero_grad()

    # ---- gradients

    @abstractmethod
    def _reduce(self, bucket: Bucket) -> Work:
        """Start summing the bucket's gradients over the ranks that hold it too."""

    def zero_grad(self) -> None:
        self._finish_reductions()
        for bucket in self.all_buckets():
            bucket.stop_counting()
            bucket.grad.zero_()

    def _finish_reductions(self) -> None:
        for work in self._reducing.values():
            work.wait()
        self._reducing.clear()

    def enable_grad_sync(self, stage: int, pending: Sequence[torch.nn.Parameter] | None = None) -> None:
        """The stage's last gradients come next: start each bucket's reduction when it is full. `pending`: the
        parameters that still get gradients, each as often as it will report; buckets without any are complete and start
        now. None: a whole backward comes."""
        if self.options.overlap:
            counts = None if pending is None else Counter(pending)
            for bucket in self.buckets[stage]:
                if not bucket.kind.in_parts:
                    self._start_when_full(bucket, counts)

    def _start_when_full(self, bucket: Bucket, pending: Counter[torch.nn.Parameter] | None) -> None:
        bucket.start_counting(lambda: self._start(bucket), pending)

    def collect_grads(self, stage: int) -> None:
        """A backward of the stage is over: take what autograd has kept of it."""
        for bucket in self.buckets[stage]:
            bucket.collect()

    def start_grad_sync(self, stage: int) -> None:
        """The stage's gradients are final: start what `enable_grad_sync` has not."""
        for bucket in self.buckets[stage]:
            if not bucket.kind.in_parts:
                self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        if bucket not in self._reducing:
            if self.options.measures_noise and self.groups.first_copy(bucket.kind):
                self._unreduced[bucket] = self.options.l2norm([bucket.grad]).square()
            self._reducing[bucket] = self._reduce(bucket)

    def announce(self, stage: int | None, *, backward: bool) -> None:
        """Which stage the next computation but one belongs to, for strategies that gather weights ahead."""

    def finish_grad_sync(self) -> None:
        """Return with the sums of the owned ranges complete; what is in parts is made whole before it is summed over
        dp."""
        for bucket in self.all_buckets():
            if bucket.kind.in_parts:
                self._add_parts(bucket.kind, bucket.grad)
                self._start(bucket)
        self._finish_reductions()

    def _add_parts(self, kind: BucketKind, gradient: torch.Tensor) -> None:
        """In place: the sum over what tp ranks, or the two copies of a tied embedding, hold parts of."""
        if kind.partial_over_tp:
            self.groups.tp.all_reduce(gradient)
        if kind.tied and self.groups.embedding is not None:
            self.groups.embedding.all_reduce(gradient)

    @property
    def unreduced_squared(self) -> torch.Tensor:
        """This rank's part of Σg² over the gradients of all data-parallel ranks before they are summed, with `measures_noise`."""
        return self.total(self._unreduced)

    def total(self, of_buckets: Mapping[Bucket, torch.Tensor]) -> torch.Tensor:
        """fp64 numbers of buckets, added up in one order, whatever the order in which gradients came."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        return sum((of_buckets[bucket] for bucket in self.all_buckets() if bucket in of_buckets), zero)

    def norm_terms(self) -> torch.Tensor:
        """fp64 numbers [k] of this rank, k the same on all; `norms` gets their sums over the world."""
        return self.local_norm_squared().view(1)

    def norms(self, sums: Sequence[float]) -> Norms:
        """The norms, from the sums of `norm_terms`; NaN or infinite where a gradient is."""
        norm = math.sqrt(sums[0]) if sums[0] >= 0.0 else math.nan
        return Norms(shown=norm, clipping=norm)

    def local_norm_squared(self) -> torch.Tensor:
        """This rank's part of Σg² over the whole model, fp64; the sum over the world is the whole.

        Accumulated in fp64: torch's fp32 norm of millions of elements is off in the fifth digit on CPU.
        """
        counted = [shard.grad for shard in self.shards if shard.counts_in_norm]
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return self.options.l2norm(counted).square()

    def local_zeros(self) -> torch.Tensor:
        """This rank's part of the number of gradient elements that are 0, fp64; padding is none of them."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for shard in self.shards:
            if shard.counts_in_norm:
                end = max((stop for _, _, stop in shard.bucket.within(shard.start, shard.stop)), default=shard.start)
                real = shard.grad[: end - shard.start]
                total += real.numel() - torch.count_nonzero(real)
        return total

    def local_params_squared(self) -> torch.Tensor:
        """This rank's part of Σw² over the whole model's main parameters, fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self.main_in_memory():
            for shard in self.shards:
                if shard.counts_in_norm:
                    for values in shard.on_device():
                        total += self.options.l2norm([values]).square()
        return total

    # ---- optimizer states and weights

    def update(self, optimizer: Optimizer, update: Update) -> None:
        """Step the main parameters and make them the model's. Not called where gradients overflowed: then the step
        must not have changed anything."""
        if not optimizer.applies_factor:
            update = self._scale_gradients(update)
        with self.main_in_memory():
            # What comes from host memory is not there to be rounded later.
            visiting = {shard.main_param for shard in self.shards if shard.host_main is not None}
            copies = self._rounded()
            self._written = {p: copies[p] for p in copies if optimizer.writes_copies or p in visiting}
            optimizer.step(dataclasses.replace(update, copies=self._written))
            if update.clipped_rows:
                optimizer.clip_rows(update.clipped_rows)
                self._written = {p: copies[p] for p in copies if p in visiting}
            optimizer.average()  # before parameters that are on their way again
            self.publish_parameters()
            self._written = {}

    def _scale_gradients(self, update: Update) -> Update:
        """The update that is left once gradients are multiplied with its factor."""
        if update.factor != 1.0:
            for shard in self.shards:
                shard.grad.mul_(update.factor)
        return dataclasses.replace(update, factor=1.0)

    def _weights(self, shard: OptimizerShard) -> torch.Tensor:
        return shard.bucket.data[shard.start : shard.stop]

    def _rounded(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Main parameter -> the model's elements, where those have another precision."""
        return {shard.main_param: self._weights(shard) for shard in self.shards if shard.is_copy}

    def publish_parameters(self) -> None:
        """Make the stepped main parameters the model's, on every rank: here, round them to its precision."""
        for shard in self.shards:
            if shard.is_copy and shard.main_param not in self._written:
                self._weights(shard).copy_(shard.main)

    def wait_for_parameters(self) -> None:
        """Return when the model's parameters may be read outside a forward."""

    def gather(self, shard: OptimizerShard, values: torch.Tensor) -> torch.Tensor:
        """From all replicas' `values` of one shard (like its main_param), the whole bucket's. Every rank calls it."""
        return values

    def consensus(self) -> AbstractContextManager[None]:
        """Inside, the buckets' `data` is the model that is evaluated and saved, and main parameters are in memory. Where
        replicas have different weights it is their mean; their own come back at the end. Every rank enters it."""
        self.wait_for_parameters()
        return self.main_in_memory()

    @contextlib.contextmanager
    def averaged(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the model has what the optimizer says is `evaluated`; at the end, its parameters again, to the bit. Within
        `consensus`, between steps: parameters without a copy stay in their gradients' memory."""
        with self.main_in_memory():
            for shard in self.shards:
                average = optimizer.evaluated(shard.main_param)
                assert average is not None
                if shard.is_copy:
                    self._weights(shard).copy_(average)
                else:
                    shard.grad.copy_(shard.main_param.data)
                    shard.main_param.data.copy_(average)
            self._written, self._averaged = self._rounded(), True
            self.publish_parameters()
            self.wait_until_idle()
            self._written = {}
            try:
                yield
            finally:
                self.wait_until_idle()
                self._averaged = False
                for shard in self.shards:
                    if not shard.is_copy:
                        shard.main_param.data.copy_(shard.grad)
                self.publish_parameters()
                self.wait_until_idle()

    def trained(self, shard: OptimizerShard) -> torch.Tensor:
        """The shard's main parameters, wherever `averaged` has put them."""
        return shard.grad if self._averaged and not shard.is_copy else shard.main_param.data

    def main_in_memory(self) -> AbstractContextManager[None]:
        """Inside, main parameters are in memory, and what is written into them stays. At the end the model's must be
        theirs, rounded."""
        if self._host is not None:
            self._host.wait()
        return unfolded(self._split)

    # ---- what is saved, counted and reported

    @property
    def optimizer_placement(self) -> Placement:
        """Of the optimizer's states of a shard."""
        return Placement.SHARDED if self.shards_over_dp else Placement.REPLICATED

    def weights(self, shard: OptimizerShard) -> FlatState:
        """The model's weights of a shard's bucket, as this rank holds them."""
        return FlatState("weight", shard.bucket, shard.bucket.data, Placement.REPLICATED)

    def states(self) -> list[FlatState]:
        """What the strategy itself keeps from step to step and element by element, as live views."""
        return []

    def tensor_states(self) -> list[TensorState]:
        """What it keeps of whole tensors."""
        return []

    def counters(self) -> dict[str, Any]:
        """Further numbers that a checkpoint keeps: the same on every rank, and plain JSON."""
        return {}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Load saved `counters`; those of another strategy are ignored."""

    def loaded(self) -> None:
        """All states and counters have been loaded from a checkpoint: recompute what follows from them."""

    def wire(self) -> float:
        """Payload bytes that this rank has sent for data parallelism since the last call."""
        return self.wire_counter.take()

    def wait_until_idle(self) -> None:
        """Return when nothing of an earlier step is in flight. Else it could overtake what is written into parameters
        next, or block the next user of these groups. Every rank calls it."""
        self.wait_for_parameters()

    def finish(self) -> None:
        """The last step is done; every rank calls it: return when no other rank needs this one."""
        self.wait_until_idle()

    def close(self) -> None:
        """The run ends: release threads and peers."""
        self.background.close()


class AllReduce(DataParallelStrategy):
    """Buckets are all-reduced as the last backward fills them, as in PyTorch DDP (arXiv 2006.15704).

    Wire: 2·(d-1)/d of the gradient bytes per step and rank; d is the expert-dp size for experts.
    """

    def _reduce(self, bucket: Bucket) -> Work:
        return self.channel(bucket).all_reduce_async(bucket.grad)


_MORE = "megalite.data_parallel.more.compression"


def strategy_class(config: RunConfig) -> type[DataParallelStrategy]:
    """What `dp_strategy` names, unless compression or a 1-bit optimizer exchanges something else."""
    if config.data_parallel.grad_compression != "none":
        path = f"{_MORE}:CompressedAllReduce"
    elif config.optimizer.optimizer == "zero-one-adam":
        path = f"{_MORE}:LocalMomentumExchange"
    elif config.optimizer.optimizer in ONEBIT_OPTIMIZERS:
        path = f"{_MORE}:MomentumExchange"
    else:
        return STRATEGIES.get(config.parallel.dp_strategy)
    return imported(path)
