"""Shard parameters, gradients and optimizer state over data-parallel ranks (ZeRO-3, FSDP)."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import Variable

from megalite.data_parallel.buckets import Bucket, alloc_storage, free_storage, has_memory, parameters_of
from megalite.data_parallel.shards import OptimizerShard
from megalite.data_parallel.wire import Channel
from megalite.data_parallel.zero import DistributedOptimizer
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.group import DONE, Work


def find_units(stage: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that gather their parameters together (a transformer layer, the embedding, the head), in forward
    order: the children of the stage; containers are replaced by their children.

    If no child has parameters, the stage itself is the unit; parameters outside the units are an AssertionError."""
    modules: list[torch.nn.Module] = []
    for child in stage.children():
        containers = isinstance(child, torch.nn.ModuleDict | torch.nn.ModuleList)
        modules += child.children() if containers else [child]
    units = [module for module in modules if parameters_of(module)] or [stage]
    within = {parameter for unit in units for parameter in parameters_of(unit)}
    assert within == set(parameters_of(stage)), "a stage has parameters outside its units"
    return units


class FullySharded(DistributedOptimizer):
    """Gathers a unit's parameters while it computes, and prefetches those of the next unit (arXiv 1910.02054, 2304.11277).

    Before a unit's forward its buckets are gathered, and the gather of the next unit is started; all other buckets are
    freed. The backward does the same in reverse order. After the last unit of a stage, the next unit is the first one
    of the program's next computation, of any stage and microbatch. So at most two units are whole at a time. A backward
    right after its forward finds the last unit still whole; so does a forward after a backward with the first unit. A
    unit's gradients are reduce-scattered once they are complete, and accumulate over microbatches on their owners.

    A parameter that two units use (a tied embedding) is gathered with each; its gradient stays whole from its first part
    to the second. A unit's first values are drawn just before it is sharded: no rank ever stores the whole model.

    Freeing resizes the storage of a bucket, and gathering fills the same storage again. So tensors that autograd saved
    of a parameter are valid again when the backward reads them.

    Wire: 3·(d-1)/d of the bytes of the stages, per rank and microbatch: two gathers in the model's type, except of units
    that are still whole, and the gradients in their type. A recompute over several layers gathers them once more."""

    always_shards_gradients = True
    allocates_gradients = False

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        # Before the buckets and shards are made.
        units = {stage: find_units(module) for stage, module in stages.items()}
        self._units = [unit for found in units.values() for unit in found]
        starts = list(itertools.accumulate(map(len, units.values()), initial=0))
        self._of_stage = {stage: range(*ends) for stage, ends in zip(stages, itertools.pairwise(starts), strict=True)}
        """Indices of each stage's units."""
        super().__init__(stages, **common)
        self._backward_of: int | None = None  # the unit that is in its backward
        self._next_unit: int | None = None  # the first unit of the program's next computation

    def _make_buckets(self, parameters: Sequence[ShardedParameter]) -> list[Bucket]:
        left, members = set(parameters), []
        for unit in self._units:
            members.append([parameter for parameter in parameters_of(unit) if parameter in left])
            left.difference_update(members[-1])
        return [bucket for own in reversed(members) for bucket in super(FullySharded, self)._make_buckets(own)]

    def _make_shard(self, bucket: Bucket) -> OptimizerShard:
        bucket.draw()
        alloc_storage(bucket.grad)
        bucket.grad.zero_()
        shard = super()._make_shard(bucket)
        if bucket in self._own:
            free_storage(bucket.data)
        return shard

    def _keeps_own(self, bucket: Bucket) -> bool:
        return True

    # ---- gathering

    def _watch(self, stages: Mapping[int, torch.nn.Module], *, overlap: bool) -> None:
        self._gathering: dict[Bucket, Work] = {}
        self._overlap_gather = overlap
        bucket_of = {placed.parameter: bucket for bucket in self._own for placed in bucket.placed}
        self._needs = [
            list(dict.fromkeys(bucket_of[parameter] for parameter in parameters_of(unit) if parameter in bucket_of))
            for unit in self._units
        ]
        if self._own:
            for stage in self._of_stage.values():
                for index in stage:
                    self._watch_unit(index, stage)

    def _watch_unit(self, index: int, stage: range) -> None:
        module = self._units[index]
        module.register_forward_pre_hook(lambda *_: self._before_forward(index, stage))
        module.register_forward_hook(lambda module, inputs, output: self._after_forward(index, stage, output))

    def _before_forward(self, index: int, stage: range) -> None:
        backward = self._backward_of
        # A recompute in the backward of unit `backward` runs forwards up to that unit, and then the backward continues.
        forwards = backward is None or index < backward
        self._make_whole(index, index + 1 if forwards else index - 1, stage)
        if backward is None and index > stage.start and self._sharded is not None:
            self._sharded.collect()  # the first unit's gradients, sent during its forward

    def _after_forward(self, index: int, stage: range, output: torch.Tensor) -> None:
        if output.requires_grad and self._backward_of is None:
            output.register_hook(lambda grad: self._before_backward(index, stage))

    def _before_backward(self, index: int, stage: range) -> None:
        if self._backward_of is None:
            Variable._execution_engine.queue_callback(self._after_backward)
        self._backward_of = index
        self._make_whole(index, index - 1, stage)

    def _after_backward(self) -> None:
        self._backward_of = None

    def set_prefetch(self, stage: int | None, *, backward: bool) -> None:
        self._next_unit = None if stage is None else self._of_stage[stage][-1 if backward else 0]

    def _make_whole(self, now: int, ahead: int, stage: range) -> None:
        """Gather unit `now`, start to gather `ahead` (past the end of the stage: `_next_unit`), and free others."""
        wanted, following = list(self._needs[now]), ahead if ahead in stage else self._next_unit
        if self._overlap_gather and following is not None:
            wanted += self._needs[following]
        self._free(but=wanted)
        self._start_gathers(wanted)
        self._finish_gathers(self._needs[now])

    def _start_gathers(self, buckets: Iterable[Bucket], *, exact: bool = False) -> None:
        for bucket in buckets:
            if not has_memory(bucket.data):
                alloc_storage(bucket.data)
                self._gathering[bucket] = self._gather(bucket, exact=exact)

    def _gathers(self, bucket: Bucket) -> Channel:
        return self._channel(self.groups.gathers_of(bucket.kind))

    def _in_background(self, bucket: Bucket) -> bool:
        """Whether reduce-scatters run in the background thread: then gathers must too, in one order on all ranks."""
        return self.device.type == "cpu" and self._gathers(bucket).sums_in_parts(bucket.grad.dtype)

    def _finish_gathers(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._gathering.pop(bucket, DONE).wait()

    def _free(self, *, but: Sequence[Bucket] = ()) -> None:
        for bucket in self._own:
            if has_memory(bucket.data) and bucket not in but:
                self._finish_gathers([bucket])
                free_storage(bucket.data)

    # ---- the hooks of a step

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        self._backward_of = self._next_unit = None
        self._free()
        super().begin_step(step, loss_scale=loss_scale)

    def finish_grad_sync(self) -> None:
        self._free()
        super().finish_grad_sync()

    def publish_parameters(self) -> None:
        super(DistributedOptimizer, self).publish_parameters()
        self._free()
        self._scales = None

    def wait_for_parameters(self) -> None:
        self._free()  # whole buckets may contain weights rounded to fp8
        self._start_gathers(self._own, exact=True)
        self._finish_gathers(self._own)

    def wait_until_idle(self) -> None:
        self._free()

    def consensus(self) -> AbstractContextManager[None]:
        return self.main_in_memory()

    def after_load(self) -> None:
        self._free()
        self._scales = None
        super(DistributedOptimizer, self).after_load()
