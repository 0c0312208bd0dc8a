"""Data parallelism that keeps a part of everything on each rank: parameters, gradients, optimizer state (ZeRO-3)."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Variable

from megalite.data_parallel.buckets import Bucket, alloc_storage, free_storage, has_memory
from megalite.data_parallel.facts import Placement
from megalite.data_parallel.shards import OptimizerShard, SplitMain
from megalite.data_parallel.strategy import FlatState
from megalite.data_parallel.zero import DistributedOptimizer
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.group import DONE, Work


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that gathers its parameters together: a transformer layer, the embedding, the head."""

    module: torch.nn.Module
    parameters: tuple[ShardedParameter, ...]
    """Also those that an earlier unit holds too (a tied embedding)."""


def find_units(stages: Mapping[int, torch.nn.Module]) -> list[Unit]:
    """The children of each stage, and of containers among them their children, in the order of the forward.

    Parameters that a stage has in addition to its children make it a unit itself; then no child may have any.
    """
    units: list[Unit] = []
    for stage in stages.values():
        modules: list[torch.nn.Module] = []
        for child in stage.children():
            if isinstance(child, torch.nn.ModuleDict | torch.nn.ModuleList):
                modules += child.children()
            else:
                modules.append(child)
        found = [Unit(module, _parameters(module)) for module in modules]
        found = [unit for unit in found if unit.parameters]
        if not found:
            found = [Unit(stage, _parameters(stage))]
        within = {parameter for unit in found for parameter in unit.parameters}
        assert within == set(_parameters(stage)), "a stage has parameters outside its units"
        units += found
    return units


def _parameters(module: torch.nn.Module) -> tuple[ShardedParameter, ...]:
    return tuple(parameter for parameter in module.parameters() if isinstance(parameter, ShardedParameter))


class FullySharded(DistributedOptimizer):
    """A unit's parameters are in memory while it computes, those of the next one on their way (arXiv 1910.02054, 2304.11277).

    Before a unit's forward its buckets are gathered, and the gather of the unit after it is started; what neither needs
    is freed. The backward does the same in reverse order. So no more than two units are whole at a time, and the last
    one's backward, like the next microbatch's forward of the first, finds it whole still. Gradients go to their owners
    as those of a unit are complete, and add up there over microbatches.

    A parameter that two units use (a tied embedding) is gathered with each; its gradient stays whole from the first of
    its two parts to the second. The model is built whole and cut then: what a rank can build bounds its size.

    Freed memory is that of the buckets' storage, and comes back to the same storage; so what autograd has saved of a
    parameter is right again when the backward reads it.

    Wire: 3·(d-1)/d of the model's bytes a microbatch and rank: two gathers in the model's type, but for what is whole
    still, and the gradients in theirs. A recompute that runs over several layers at once gathers these once more.
    """

    always_shards_gradients = True
    allocates_gradients = False

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        # Before the buckets and shards are made.
        self._units = find_units(stages)
        self._own: dict[Bucket, torch.Tensor] = {}
        super().__init__(stages, **common)
        self._serial = self.all_buckets()[0].data.device.type == "cpu" and (
            self.options.by_rank or self.options.wire_dtype not in (None, self.options.grad_dtype)
        )
        """Reduce-scatters run in the background thread: the gathers must too, so that every rank has them in one order."""
        self._backward_of: int | None = None
        """The unit in its backward now."""

    def _make_buckets(self, parameters: list[ShardedParameter]) -> list[Bucket]:
        left, members = dict.fromkeys(parameters), []
        for unit in self._units:
            members.append([parameter for parameter in unit.parameters if parameter in left])
            for parameter in members[-1]:
                del left[parameter]
        return [bucket for own in reversed(members) for bucket in super(FullySharded, self)._make_buckets(own)]

    def _make_shard(self, bucket: Bucket) -> OptimizerShard:
        alloc_storage(bucket.grad)
        bucket.grad.zero_()
        shard = super()._make_shard(bucket)
        if self.channel(bucket).size == 1:
            return shard
        own = bucket.data[shard.start : shard.stop].clone()
        if not shard.is_copy:
            shard.main_param.data = own
        self._own[bucket] = own
        free_storage(bucket.data)
        return shard

    def _split_main(self, shard: OptimizerShard) -> SplitMain:
        return SplitMain(shard.main_param, self._weights(shard))

    def _weights(self, shard: OptimizerShard) -> torch.Tensor:
        own = self._own.get(shard.bucket)
        return shard.bucket.data[shard.start : shard.stop] if own is None else own

    # ---- gathering

    def _watch(self, stages: Mapping[int, torch.nn.Module], *, overlap: bool) -> None:
        self._gathering: dict[Bucket, Work] = {}
        self._overlap_gather = overlap
        bucket_of = {placed.parameter: bucket for bucket in self.all_buckets() for placed in bucket.placed}
        self._needs = [
            [
                bucket
                for bucket in dict.fromkeys(bucket_of[parameter] for parameter in unit.parameters)
                if bucket in self._own
            ]
            for unit in self._units
        ]
        if self._own:
            for index, unit in enumerate(self._units):
                self._watch_unit(index, unit.module)

    def _watch_unit(self, index: int, module: torch.nn.Module) -> None:
        module.register_forward_pre_hook(lambda *_: self._before_forward(index))
        module.register_forward_hook(lambda module, inputs, output: self._after_forward(index, output))

    def _before_forward(self, index: int) -> None:
        backward = self._backward_of
        # Else it is recomputed in the backward of unit `backward`, which comes when all units up to that have been.
        forwards = backward is None or index < backward
        self._hold(index, index + 1 if forwards else index - 1)
        if backward is None and index > 0 and self._sharded is not None:
            self._sharded.collect()  # the first unit's gradients, which have had its forward to go in

    def _after_forward(self, index: int, output: torch.Tensor) -> None:
        if output.requires_grad and self._backward_of is None:
            output.register_hook(lambda grad: self._before_backward(index))

    def _before_backward(self, index: int) -> None:
        if self._backward_of is None:
            Variable._execution_engine.queue_callback(self._after_backward)
        self._backward_of = index
        self._hold(index, index - 1)

    def _after_backward(self) -> None:
        self._backward_of = None

    def _hold(self, now: int, ahead: int) -> None:
        """Have unit `now` whole, `ahead` on its way if there is such a unit, and no other."""
        wanted = list(self._needs[now])
        if self._overlap_gather and 0 <= ahead < len(self._units):
            wanted += self._needs[ahead]
        self._free(but=wanted)
        for bucket in wanted:
            self._start_gather(bucket)
        for bucket in self._needs[now]:
            self._finish_gather(bucket)

    def _start_gather(self, bucket: Bucket) -> None:
        if not has_memory(bucket.data):
            alloc_storage(bucket.data)
            channel, own = self.channel(bucket), self._own[bucket]
            if self._serial:
                work: Work = channel.in_background(lambda: channel.gather_raw(bucket.data, own))
            else:
                work = channel.gather_raw_async(bucket.data, own)
            self._gathering[bucket] = work

    def _finish_gather(self, bucket: Bucket) -> None:
        self._gathering.pop(bucket, DONE).wait()

    def _free(self, *, but: list[Bucket] | None = None) -> None:
        for bucket in self._own:
            if has_memory(bucket.data) and (but is None or bucket not in but):
                self._finish_gather(bucket)
                free_storage(bucket.data)

    # ---- the hooks of a step

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        self._backward_of = None
        self._free()
        super().begin_step(step, loss_scale=loss_scale)

    def finish_grad_sync(self) -> None:
        self._free()
        super().finish_grad_sync()

    def publish_parameters(self) -> None:
        self._round()
        self._free()

    def wait_for_parameters(self) -> None:
        for bucket in self._own:
            self._start_gather(bucket)
        for bucket in self._own:
            self._finish_gather(bucket)

    def settle(self) -> None:
        self._free()

    def consensus(self) -> AbstractContextManager[None]:
        return self.main_in_memory()

    def weights(self, shard: OptimizerShard) -> FlatState:
        if shard.bucket not in self._own:
            return super().weights(shard)
        own = self._own[shard.bucket]
        return FlatState("weight", shard.bucket, own, Placement.SHARDED, shard.start)

    def loaded(self) -> None:
        self._free()
        super().loaded()
