"""Define the base class of data-parallel strategies: buckets, the order of reductions, and optimizer shards.

A strategy acts on three things. *Gradients*: `enable_grad_sync`, `start_grad_sync` and `finish_grad_sync` turn each
rank's part into the gradient of the update. *Optimizer states*: `update` steps the optimizer, which may average its
state over ranks. *Weights*: `update` ends by copying the stepped main parameters to the model (`publish_parameters`),
and may average them."""

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
from megalite.data_parallel.facts import STATES, BucketKind, Placement, choose_offloaded
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
    start: int = 0  # first element of the bucket in `values`
    default: str = "required"  # see `StateFact`

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


def flat_state(name: str, bucket: Bucket, values: torch.Tensor, start: int = 0) -> FlatState:
    """Return a state with the placement and default of `facts.STATES`."""
    return FlatState(name, bucket, values, STATES[name].placement, start, STATES[name].default)


@dataclass(frozen=True, eq=False)
class TensorState:
    """A state of one tensor of the model, or of this rank's slice of it. If a checkpoint lacks it, or has it for another
    slicing of the tensor, it keeps its value, with a line in the log."""

    name: str
    bucket: Bucket
    placed: Placed
    values: torch.Tensor  # live, of any shape
    per_slice: bool = False
    """Whether it belongs to the local slice, so that each tp (or ep) rank has a different one. Replicas have equal ones."""


class DataParallelStrategy(ABC):
    """Owns the buckets of this rank's stages. Calls in one step:

    `begin_step`; during the program, for each stage, `enable_grad_sync` before the last backward, `collect_grads` after
    each backward, and `start_grad_sync` at the end; `finish_grad_sync`; `norm_terms` and, after their sum over the world,
    `norms`; then `update`, unless gradients overflowed.

    The gradients of a rank are its part of the gradient of the mean over the global batch: their sum over the
    data-parallel ranks is that gradient."""

    shards_over_dp: bool = False  # each of the ranks with the same bucket updates another part of it
    replicas_agree: bool = True
    """Whether the ranks with the same bucket have bit-equal weights after each update."""
    allocates_gradients: bool = True  # gradients have memory from the start

    def __init__(
        self, stages: Mapping[int, torch.nn.Module], *, groups: StrategyGroups, options: StrategyOptions
    ) -> None:
        self.groups, self.options = groups, options
        self.buckets: dict[int, list[Bucket]] = {}
        seen: set[ShardedParameter] = set()
        for stage, module in stages.items():
            # A parameter of two stages (a tied embedding with both ends on one rank) belongs to the first.
            own = [parameter for parameter in parameters_of(module) if parameter not in seen]
            seen.update(own)
            self.buckets[stage] = self._make_buckets(own)
        self.wire_counter = WireCounter()
        self.background = Background(self.device)
        self._channels: dict[Group, Channel] = {}
        self._reducing: dict[Bucket, Work] = {}
        self.notes: list[str] = []
        """Lines for the log, the same on every rank; the training loop removes them after each step."""
        self._written: Mapping[torch.nn.Parameter, torch.Tensor] = {}
        """During `update`: main parameters -> weights that the optimizer rounds and writes itself."""
        self._evaluating = False  # inside `evaluation_weights`
        self.step = 0  # the current step, counted from 1
        self.loss_scale = 1.0
        """The factor of this step's loss; a power of 2, unless the user fixed another."""
        self._unreduced: dict[Bucket, torch.Tensor] = {}
        sizes = [stop - start for start, stop in map(self.owned_range, self.all_buckets())]
        offloaded = choose_offloaded(sizes, options.host_fraction)
        self._host = HostMemory(self.device, slots=HOST_SLOTS) if any(offloaded) else None
        self._in_host_memory = set(itertools.compress(self.all_buckets(), offloaded))
        self.shards = [self._make_shard(bucket) for bucket in self.all_buckets()]
        splits = self.shards if options.split_main else []
        self._split = [SplitMain(shard.main_param, self._weights(shard)) for shard in splits]

    @classmethod
    def from_config(
        cls, stages: Mapping[int, torch.nn.Module], config: RunConfig, topology: Topology, **common: Any
    ) -> "DataParallelStrategy":
        """Return the strategy of a run; `common` are `groups` and `options`."""
        return cls(stages, **common)

    def _make_buckets(self, parameters: Sequence[ShardedParameter]) -> list[Bucket]:
        return make_buckets(
            parameters,
            bucket_size=self.options.bucket_size,
            replicas=lambda kind: self.groups.replica_position(kind)[1],
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
        return any(self.groups.replica_position(bucket.kind)[1] > 1 for bucket in self.all_buckets())

    def channel(self, bucket: Bucket) -> Channel:
        """Return the channel to the ranks with the same bucket, in this instance."""
        return self._channel(self.groups.replicas(bucket.kind))

    def _channel(self, group: Group) -> Channel:
        if group not in self._channels:
            self._channels[group] = self.new_channel(group, self.wire_counter)
        return self._channels[group]

    def new_channel(self, group: Group, counter: WireCounter, kind: type[Channel] = Channel) -> Channel:
        """Return a channel in the run's number format that adds its bytes to `counter`."""
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
        """Return whether this rank's instance, and its copy of the bucket's tensors, counts in sums over the world."""
        return self.groups.instances(bucket.kind).rank == 0 and self.groups.first_copy(bucket.kind)

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        """Return the range of a bucket that this rank reduces and updates: all of it, unless `shards_over_dp`."""
        return 0, bucket.data.numel()

    def attach(self, optimizer: Optimizer) -> None:
        """Take the optimizer over `shards`; called once, when it exists."""

    # ---- the step

    @property
    def scope(self) -> Group:
        """The ranks that decide about a step together and use one gradient: all ranks, or one of several groups of equal
        size."""
        return self.groups.world

    def phase(self, step: int) -> str:
        """Return what a step exchanges; depends on the step, the settings and `counters` only."""
        return "gradients"

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        """Discard the last step's gradients, also of a step that failed half way; called before the first forward."""
        self.step, self.loss_scale = step, loss_scale
        self._unreduced.clear()
        self.zero_grad()

    # ---- gradients

    @abstractmethod
    def _reduce(self, bucket: Bucket) -> Work:
        """Start to sum the bucket's gradients over the ranks with the same bucket."""

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
        """Start each bucket's reduction when its last gradient arrives; called before the stage's last backward.
        `pending`: the parameters that still get gradients, each once per gradient; buckets without any start now. None:
        a whole backward follows."""
        if self.options.overlap:
            counts = None if pending is None else Counter(pending)
            for bucket in self.buckets[stage]:
                if not bucket.kind.in_parts:
                    self._start_when_full(bucket, counts)

    def _start_when_full(self, bucket: Bucket, pending: Counter[torch.nn.Parameter] | None) -> None:
        bucket.start_counting(lambda: self._start(bucket), pending)

    def collect_grads(self, stage: int) -> None:
        """Move the gradients of a finished backward of the stage from autograd to the buckets."""
        for bucket in self.buckets[stage]:
            bucket.collect()

    def start_grad_sync(self, stage: int) -> None:
        """Start the reductions that `enable_grad_sync` has not started; called when the stage's gradients are final."""
        for bucket in self.buckets[stage]:
            if not bucket.kind.in_parts:
                self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        if bucket not in self._reducing:
            if self.options.measures_noise and self.groups.first_copy(bucket.kind):
                self._unreduced[bucket] = self.options.l2norm([bucket.grad]).square()
            self._reducing[bucket] = self._reduce(bucket)

    def set_prefetch(self, stage: int | None, *, backward: bool) -> None:
        """Set the stage of the computation after the coming one, for strategies that prefetch weights."""

    def finish_grad_sync(self) -> None:
        """Wait until the sums of the owned ranges are complete. Buckets with `in_parts` are summed over tp or both copies
        of a tied embedding first, and then over dp."""
        for bucket in self.all_buckets():
            if bucket.kind.in_parts:
                self._add_parts(bucket.kind, bucket.grad)
                self._start(bucket)
        self._finish_reductions()

    def _add_parts(self, kind: BucketKind, gradient: torch.Tensor) -> None:
        """Sum a gradient, in place, over tp ranks or both copies of a tied embedding that have parts of it."""
        if kind.partial_over_tp:
            self.groups.tp.all_reduce(gradient)
        if kind.tied and self.groups.embedding is not None:
            self.groups.embedding.all_reduce(gradient)

    @property
    def unreduced_squared(self) -> torch.Tensor:
        """With `measures_noise`: this rank's part of Σg² over all data-parallel ranks' gradients before their sum."""
        return self.total(self._unreduced)

    def total(self, of_buckets: Mapping[Bucket, torch.Tensor]) -> torch.Tensor:
        """Return the sum of fp64 numbers of buckets, in an order that does not depend on the arrival of gradients."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        return sum((of_buckets[bucket] for bucket in self.all_buckets() if bucket in of_buckets), zero)

    def norm_terms(self) -> torch.Tensor:
        """Return fp64 numbers [k] of this rank, with equal k on all ranks; `norms` gets their sums over the world."""
        return self.local_norm_squared().view(1)

    def norms(self, sums: Sequence[float]) -> Norms:
        """Return the norms, from the sums of `norm_terms`; NaN or infinite if a gradient is."""
        norm = math.sqrt(sums[0]) if sums[0] >= 0.0 else math.nan
        return Norms(logged=norm, clipping=norm)

    def local_norm_squared(self) -> torch.Tensor:
        """Return this rank's part of Σg² over the whole model, fp64; its sum over the world is the whole.

        Accumulated in fp64: torch's fp32 norm of millions of elements is off in the fifth digit on CPU."""
        counted = [shard.grad for shard in self.shards if shard.counts_in_norm]
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return self.options.l2norm(counted).square()

    def local_zeros(self) -> torch.Tensor:
        """Return this rank's part of the number of gradient elements that are 0, without padding, fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for shard in self.shards:
            if shard.counts_in_norm:
                end = max((stop for _, _, stop in shard.bucket.within(shard.start, shard.stop)), default=shard.start)
                real = shard.grad[: end - shard.start]
                total += real.numel() - torch.count_nonzero(real)
        return total

    def local_params_squared(self) -> torch.Tensor:
        """Return this rank's part of Σw² over the whole model's main parameters, fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self.main_in_memory():
            for shard in self.shards:
                if shard.counts_in_norm:
                    for values in shard.on_device():
                        total += self.options.l2norm([values]).square()
        return total

    # ---- optimizer states and weights

    def update(self, optimizer: Optimizer, update: Update) -> None:
        """Step the main parameters and copy them to the model. Not called if gradients overflowed: such a step must not
        change anything."""
        if not optimizer.applies_factor:
            update = self._scale_gradients(update)
        with self.main_in_memory():
            # Offloaded main parameters are on the device only during the step, so they are rounded there.
            offloaded = {shard.main_param for shard in self.shards if shard.host_main is not None}
            copies = self._rounded()
            self._written = {p: copies[p] for p in copies if optimizer.writes_copies or p in offloaded}
            optimizer.step(dataclasses.replace(update, copies=self._written))
            if update.clipped_rows:
                optimizer.clip_rows(update.clipped_rows)
                self._written = {p: copies[p] for p in copies if p in offloaded}
            optimizer.average()  # before `publish_parameters` starts to send parameters
            self.publish_parameters()
            self._written = {}

    def _scale_gradients(self, update: Update) -> Update:
        """Multiply gradients with the update's factor, and return the update with a factor of 1."""
        if update.factor != 1.0:
            for shard in self.shards:
                shard.grad.mul_(update.factor)
        return dataclasses.replace(update, factor=1.0)

    def _weights(self, shard: OptimizerShard) -> torch.Tensor:
        return shard.bucket.data[shard.start : shard.stop]

    def _rounded(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Return main parameter -> the model's elements, for shards with different precisions."""
        return {shard.main_param: self._weights(shard) for shard in self.shards if shard.is_copy}

    def publish_parameters(self) -> None:
        """Copy the stepped main parameters to the model on every rank; this method rounds them to its precision."""
        for shard in self.shards:
            if shard.is_copy and shard.main_param not in self._written:
                self._weights(shard).copy_(shard.main)

    def wait_for_parameters(self) -> None:
        """Wait until the model's parameters may be read outside a forward."""

    def gather(self, shard: OptimizerShard, values: torch.Tensor) -> torch.Tensor:
        """Return the whole bucket's values from all replicas' `values`, each like its shard's `main_param`. Every rank
        calls it."""
        return values

    def consensus(self) -> AbstractContextManager[None]:
        """Make the buckets' `data`, inside the block, the model to evaluate and save, with main parameters in memory. If
        replicas have different weights, it is their mean; their own weights return at the end. Every rank enters it."""
        self.wait_for_parameters()
        return self.main_in_memory()

    @contextlib.contextmanager
    def evaluation_weights(self, optimizer: Optimizer) -> Iterator[None]:
        """Put the optimizer's `evaluated` values into the model inside the block, and restore its parameters bit for bit
        at the end. Use it inside `consensus`, between steps: the memory of gradients stores parameters without a copy."""
        with self.main_in_memory():
            for shard in self.shards:
                average = optimizer.evaluated(shard.main_param)
                assert average is not None
                if shard.is_copy:
                    self._weights(shard).copy_(average)
                else:
                    shard.grad.copy_(shard.main_param.data)
                    shard.main_param.data.copy_(average)
            self._written, self._evaluating = self._rounded(), True
            self.publish_parameters()
            self.wait_until_idle()
            self._written = {}
            try:
                yield
            finally:
                self.wait_until_idle()
                self._evaluating = False
                for shard in self.shards:
                    if not shard.is_copy:
                        shard.main_param.data.copy_(shard.grad)
                self.publish_parameters()
                self.wait_until_idle()

    def training_weights(self, shard: OptimizerShard) -> torch.Tensor:
        """Return the shard's main parameters, also inside `evaluation_weights`, which moves some of them."""
        return shard.grad if self._evaluating and not shard.is_copy else shard.main_param.data

    def main_in_memory(self) -> AbstractContextManager[None]:
        """Bring main parameters into memory inside the block; writes to them persist. At the end, the model's parameters
        must equal them, rounded."""
        if self._host is not None:
            self._host.wait()
        return unfolded(self._split)

    # ---- saved states and counters

    @property
    def optimizer_placement(self) -> Placement:
        """Placement of the optimizer's states of a shard."""
        return Placement.SHARDED if self.shards_over_dp else Placement.REPLICATED

    def weights(self, shard: OptimizerShard) -> FlatState:
        """Return the model's weights of a shard's bucket, as far as this rank stores them."""
        return FlatState("weight", shard.bucket, shard.bucket.data, Placement.REPLICATED)

    def states(self) -> list[FlatState]:
        """Return the strategy's element-wise states as live views."""
        return []

    def tensor_states(self) -> list[TensorState]:
        """Return the strategy's states of whole tensors."""
        return []

    def counters(self) -> dict[str, Any]:
        """Return further numbers for the checkpoint: plain JSON, the same on every rank."""
        return {}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Load saved `counters`; those of another strategy are ignored."""

    def after_load(self) -> None:
        """Recompute derived values after all states and counters have been loaded from a checkpoint."""

    def take_wire_bytes(self) -> float:
        """Return the payload bytes that this rank has sent for data parallelism since the last call."""
        return self.wire_counter.take()

    def wait_until_idle(self) -> None:
        """Wait until no operation of an earlier step is in flight. Otherwise it could overwrite new values of parameters,
        or block the next user of these groups. Every rank calls it."""
        self.wait_for_parameters()

    def finish(self) -> None:
        """Wait until no other rank needs this rank; every rank calls it after the last step."""
        self.wait_until_idle()

    def close(self) -> None:
        """Release threads and peers at the end of the run."""
        self.background.close()


class AllReduce(DataParallelStrategy):
    """All-reduces buckets as the last backward fills them, as in PyTorch DDP (arXiv 2006.15704).

    Wire: 2·(d-1)/d of the gradient bytes per step and rank; d is the expert-dp size for experts."""

    def _reduce(self, bucket: Bucket) -> Work:
        return self.channel(bucket).all_reduce_async(bucket.grad)


_COMPRESSION = "megalite.data_parallel.compression"


def strategy_class(config: RunConfig) -> type[DataParallelStrategy]:
    """Return the class of `dp_strategy`, or of compression or of a 1-bit optimizer's exchange if configured."""
    if config.data_parallel.grad_compression != "none":
        path = f"{_COMPRESSION}:CompressedAllReduce"
    elif config.optimizer.optimizer == "zero-one-adam":
        path = f"{_COMPRESSION}:LocalMomentumExchange"
    elif config.optimizer.optimizer in ONEBIT_OPTIMIZERS:
        path = f"{_COMPRESSION}:MomentumExchange"
    else:
        return STRATEGIES.get(config.parallel.dp_strategy)
    return imported(path)
