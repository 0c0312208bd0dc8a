"""What of a replica is saved, and which rank writes which part of it: every element once, over all ranks."""

from collections.abc import Iterator

import torch

from megalite.checkpoint.save import SavedTensor
from megalite.checkpoint.tiling import flat_boxes, volume
from megalite.data_parallel.buckets import Placed
from megalite.data_parallel.strategy import OptimizerShard
from megalite.optimizers.adam import STATES
from megalite.topology.sharding import ShardSpec, Slice
from megalite.training.replica import Replica

SPLIT_ELEMENTS = 1 << 18
"""Parameters of at least this many elements are written in parts, one by each rank that holds them."""

Saved = tuple[SavedTensor, torch.Tensor]


def state_tensors(replica: Replica) -> list[Saved]:
    """The weights and optimizer states that this rank writes, as views of the live ones: no copies, no collectives."""
    found: list[Saved] = []
    for shard in replica.strategy.shards:
        found += _weights(replica, shard)
        states = {"main_param": shard.main_param.data} if shard.is_copy else {}
        states |= {name: replica.optimizer.state(shard.main_param)[name] for name in STATES}
        for state, values in states.items():
            found += _shard_state(replica, shard, state, values)
    return found


def _weights(replica: Replica, shard: OptimizerShard) -> Iterator[Saved]:
    """Every replica holds all of a bucket's weights; they share out the writing."""
    for index, placed in enumerate(shard.bucket.placed):
        if _is_first_copy(replica, placed):
            spec = _share(replica, shard, index, placed)
            if spec is not None:
                saved = SavedTensor(key_group="weight", spec=spec, dtype=shard.bucket.data.dtype)
                yield saved, _part(placed, spec, shard.bucket.data)


def _shard_state(
    replica: Replica, shard: OptimizerShard, state: str, values: torch.Tensor
) -> Iterator[Saved]:
    """One state of the optimizer: of a rank's own range if each has one, else shared out like the weights."""
    for index, placed in enumerate(shard.bucket.placed):
        if not _is_first_copy(replica, placed):
            continue
        if replica.strategy.shards_over_dp:
            for spec, flat in _owned_boxes(shard, placed, values):
                saved = SavedTensor(key_group="optimizer", state=state, spec=spec, dtype=values.dtype)
                yield saved, flat.view(spec.shape)
        else:
            shared = _share(replica, shard, index, placed)
            if shared is not None:
                saved = SavedTensor(key_group="optimizer", state=state, spec=shared, dtype=values.dtype)
                yield saved, _part(placed, shared, values)


def _is_first_copy(replica: Replica, placed: Placed) -> bool:
    """Of what tensor-parallel ranks or the two ends of a pipeline hold alike, this rank has the copy that counts."""
    info, topology = placed.parameter.info, replica.topology
    if info.shard_dim is None and not info.expert and topology.tp.rank != 0:
        return False
    return not (info.tied and topology.embedding is not None and topology.embedding.rank != 0)


def _share(replica: Replica, shard: OptimizerShard, index: int, placed: Placed) -> ShardSpec | None:
    """The part of a parameter that this one of its replicas writes; None: nothing."""
    spec = placed.parameter.info.spec
    group = replica.strategy.groups.replicas(shard.bucket.kind)
    writers, writer = group.size, group.rank
    shape = spec.shape
    # A rank may hold fewer experts than there are writers: then their rows are shared out.
    dim = next((dim for dim, size in enumerate(shape) if size >= writers), None)
    if placed.parameter.numel() < SPLIT_ELEMENTS or dim is None:
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


def _owned_boxes(
    shard: OptimizerShard, placed: Placed, values: torch.Tensor
) -> Iterator[tuple[ShardSpec, torch.Tensor]]:
    """This rank's range of a parameter, which may begin and end inside a row, as slices with their values."""
    spec = placed.parameter.info.spec
    start, stop = max(placed.start, shard.start), min(placed.stop, shard.stop)
    position = start - shard.start
    for box in flat_boxes(spec.shape, start - placed.start, stop - placed.start):
        bounds = tuple((base + a, base + b) for (base, _), (a, b) in zip(spec.slice, box, strict=True))
        size = volume(box)
        yield (
            ShardSpec(name=spec.name, global_shape=spec.global_shape, slice=bounds),
            values[position : position + size],
        )
        position += size
