"""What of a replica is saved, and which rank writes which part: every element once. Replicas are compared by it too."""

import math
from collections.abc import Iterator
from typing import Literal

import torch

from megalite.checkpoint.save import SavedTensor
from megalite.checkpoint.tiling import flat_boxes, volume
from megalite.data_parallel.buckets import Bucket, Placed
from megalite.data_parallel.facts import Placement
from megalite.data_parallel.peers import check_replicas
from megalite.data_parallel.shards import OptimizerShard, placed_in
from megalite.data_parallel.strategy import FlatState, TensorState
from megalite.topology.layout import ShardSpec, Slice
from megalite.training.replica import Replica

SPLIT_ELEMENTS = 1 << 18
"""Parameters of at least this many elements are written in parts, one by each rank that holds them."""

Saved = tuple[SavedTensor, torch.Tensor]


def flat_states(replica: Replica, shard: OptimizerShard) -> list[FlatState]:
    """The states of the optimizer, and main parameters where they are apart from the model's."""
    strategy = replica.strategy
    placement = strategy.optimizer_placement
    states = {"main_param": shard.main_param.data} if shard.is_copy and strategy.replicas_agree else {}
    states |= replica.optimizer.state(shard.main_param)
    return [
        FlatState(
            name=name,
            bucket=shard.bucket,
            start=shard.start,
            values=values,
            placement=placement,
            default="zeros" if name in replica.optimizer.from_zeros else "required",
        )
        for name, values in states.items()
    ]


def replicated_states(replica: Replica) -> list[FlatState]:
    """The flat states of which each data-parallel rank has the whole, and the same, after each update."""
    return [
        state
        for shard in replica.strategy.shards
        for state in flat_states(replica, shard)
        if state.placement is Placement.REPLICATED
    ]


def tensor_states(replica: Replica) -> list[TensorState]:
    """What the optimizer and the strategy remember of whole tensors."""
    found = replica.strategy.tensor_states()
    held = replica.optimizer.tensor_state()
    for shard in replica.strategy.shards:
        for placed in placed_in(shard):
            own = placed.parameter.info.spec.name
            found += [
                TensorState(name=state, bucket=shard.bucket, placed=placed, values=values)
                for (state, name), values in held.items()
                if name == own
            ]
    return found


def state_tensors(replica: Replica) -> list[Saved]:
    """What this rank writes, as views of the live tensors: no copies, no collectives. Inside the strategy's `consensus`."""
    found: list[Saved] = []
    for shard in replica.strategy.shards:
        found += _saved(replica, shard, replica.strategy.weights(shard), "weight")
        for state in flat_states(replica, shard):
            found += _saved(replica, shard, state, "optimizer")
    shard_of = {shard.bucket: shard for shard in replica.strategy.shards}
    for state in replica.strategy.states():
        found += _saved(replica, shard_of[state.bucket], state, "optimizer")
    for whole in tensor_states(replica):
        if _writes(replica, shard_of[whole.bucket], whole):
            spec = tensor_spec(whole)
            saved = SavedTensor(key_group="optimizer", state=whole.name, spec=spec, dtype=whole.values.dtype)
            found.append((saved, whole.values.view(spec.shape)))
    return found


def _saved(
    replica: Replica, shard: OptimizerShard, state: FlatState, group: Literal["weight", "optimizer"]
) -> Iterator[Saved]:
    name = "" if group == "weight" else state.name
    for index, placed in enumerate(state.bucket.placed):
        if not _is_first_copy(replica, placed):
            continue
        parts: list[tuple[ShardSpec, torch.Tensor]] = []
        if state.placement is Placement.SHARDED:
            parts += _owned_boxes(placed, state)
        elif state.placement is Placement.PRIVATE:
            group_of = replica.strategy.groups.replicas(state.bucket.kind)
            spec = private_spec(placed.parameter.info.spec, group_of.rank, group_of.size)
            parts.append((spec, state.values[placed.start : placed.stop]))
        else:
            share = _share(replica, state.bucket, index, placed)
            if share is not None:
                parts.append((share, _part(placed, share, state.values)))
        for spec, values in parts:
            saved = SavedTensor(key_group=group, state=name, spec=spec, dtype=values.dtype)
            yield saved, values.reshape(spec.shape)


def private_spec(spec: ShardSpec, replica: int, replicas: int) -> ShardSpec:
    """One replica's own values, in a tensor with a leading dimension over replicas."""
    return ShardSpec(
        name=spec.name, global_shape=(replicas, *spec.global_shape), slice=((replica, replica + 1), *spec.slice)
    )


def tensor_spec(state: TensorState) -> ShardSpec:
    """Where the state of a whole tensor is kept; of slices, under a leading dimension over them."""
    spec, shape = state.placed.parameter.info.spec, tuple(state.values.shape) or (1,)
    if not state.per_slice:
        return ShardSpec.whole(spec.name, shape)
    index = count = 0
    for size, (start, stop) in zip(spec.global_shape, spec.slice, strict=True):
        each = size // max(stop - start, 1)
        index, count = index * each + start // max(stop - start, 1), max(count, 1) * each
    return ShardSpec(
        name=spec.name, global_shape=(count, *shape), slice=((index, index + 1), *((0, size) for size in shape))
    )


def _writes(replica: Replica, shard: OptimizerShard, state: TensorState) -> bool:
    """Of the ranks that have the same, this one writes it."""
    placed, info = state.placed, state.placed.parameter.info
    if not _is_first_copy(replica, placed):
        return False
    if not state.per_slice and any(start for start, _ in info.spec.slice):
        return False
    if replica.strategy.shards_over_dp:
        return shard.start <= placed.start < shard.stop
    return replica.strategy.groups.replicas(state.bucket.kind).rank == 0


def _is_first_copy(replica: Replica, placed: Placed) -> bool:
    """Of what tensor-parallel ranks or the two ends of a pipeline hold alike, this rank has the copy that counts."""
    info, topology = placed.parameter.info, replica.topology
    if info.shard_dim is None and not info.expert and topology.tp.rank != 0:
        return False
    return not (info.tied and topology.embedding is not None and topology.embedding.rank != 0)


def _share(replica: Replica, bucket: Bucket, index: int, placed: Placed) -> ShardSpec | None:
    """The part of a parameter that this one of its replicas writes; None: nothing."""
    spec = placed.parameter.info.spec
    group = replica.strategy.groups.replicas(bucket.kind)
    writers, writer = group.size, group.rank
    shape = spec.shape
    # A rank may hold fewer experts than there are writers: then their rows are shared out.
    dim = next((dim for dim, size in enumerate(shape) if size >= writers), None)
    if math.prod(shape) < SPLIT_ELEMENTS or dim is None:
        return spec if index % writers == writer else None
    return _cut(spec, dim, writer * shape[dim] // writers, (writer + 1) * shape[dim] // writers)


def _cut(spec: ShardSpec, dim: int, start: int, stop: int) -> ShardSpec:
    """The part from `start` to `stop` along `dim` of the slice that `spec` describes."""
    base = spec.slice[dim][0]
    bounds: Slice = (*spec.slice[:dim], (base + start, base + stop), *spec.slice[dim + 1 :])
    return ShardSpec(name=spec.name, global_shape=spec.global_shape, slice=bounds)


def _part(placed: Placed, spec: ShardSpec, flat: torch.Tensor) -> torch.Tensor:
    """The values of `spec`, a part of the parameter's slice, in a flat tensor like the bucket's data."""
    whole = placed.parameter.info.spec
    both = zip(spec.slice, whole.slice, strict=True)
    index = tuple(slice(start - base, stop - base) for (start, stop), (base, _) in both)
    return flat[placed.start : placed.stop].view(whole.shape)[index]


def _owned_boxes(placed: Placed, state: FlatState) -> Iterator[tuple[ShardSpec, torch.Tensor]]:
    """A range of a parameter, which may begin and end inside a row, as slices with their values."""
    spec = placed.parameter.info.spec
    start, stop = max(placed.start, state.start), min(placed.stop, state.stop)
    if start >= stop:
        return
    position = start - state.start
    for box in flat_boxes(spec.shape, start - placed.start, stop - placed.start):
        bounds = tuple((base + a, base + b) for (base, _), (a, b) in zip(spec.slice, box, strict=True))
        size = volume(box)
        part = ShardSpec(name=spec.name, global_shape=spec.global_shape, slice=bounds)
        yield part, state.values[position : position + size]
        position += size


def compare_replicas(replica: Replica, step: int) -> None:
    """After `step`, if it is one after which `check_replicas_interval` asks for it.

    Collectives: those of `check_replicas`.

    Raises:
        ReplicasDifferError: as `check_replicas`.
    """
    every, strategy = replica.config.data_parallel.check_replicas_interval, replica.strategy
    if every and step % every == 0 and strategy.replicas_agree:
        strategy.wait_for_parameters()
        with strategy.main_in_memory():
            states = replicated_states(replica)
            check_replicas(strategy, states=states, step=step, world=replica.topology.world)
