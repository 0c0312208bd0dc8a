"""Lists the tensors of a replica's state that each rank writes to a checkpoint, so that every element is written once.

Also loads states of whole tensors and matrices, and compares the states of replicas."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from megalite.checkpoint.load import Checkpoint
from megalite.checkpoint.manifest import flat_boxes, optimizer_key, volume
from megalite.checkpoint.save import SavedTensor
from megalite.config.optimizer import OPTIMIZERS
from megalite.data_parallel.buckets import Bucket, Placed
from megalite.data_parallel.facts import Placement
from megalite.data_parallel.shards import OptimizerShard
from megalite.data_parallel.strategy import DataParallelStrategy, FlatState, TensorState
from megalite.optimizers.base import MatrixState
from megalite.topology.group import Group
from megalite.topology.layout import ShardSpec
from megalite.training.replica import Replica

SPLIT_ELEMENTS = 1 << 18
"""Parameters with at least this many elements are written in parts, one by each rank that has a copy."""

Saved = tuple[SavedTensor, torch.Tensor]


def flat_states(replica: Replica, shard: OptimizerShard) -> list[FlatState]:
    """Return the optimizer's states of a shard, with main parameters if they are separate from the model's."""
    strategy, optimizer = replica.strategy, replica.optimizer
    states = {"main_param": shard.main} if shard.is_copy and strategy.replicas_agree else {}
    if OPTIMIZERS.facts(optimizer.config.optimizer).averaged:
        states = {"train_param": strategy.training_weights(shard)}
    defaults = dict.fromkeys(optimizer.from_zeros, "zeros") | dict.fromkeys(optimizer.from_parameters, "parameter")
    return [
        FlatState(
            name=name,
            bucket=shard.bucket,
            start=shard.start,
            values=values,
            placement=strategy.optimizer_placement,
            default=defaults.get(name, "required"),
        )
        for name, values in (states | optimizer.state(shard.main_param)).items()
    ]


def optimizer_states(replica: Replica) -> list[FlatState]:
    """Return `flat_states` of all shards of this rank."""
    return [state for shard in replica.strategy.shards for state in flat_states(replica, shard)]


def replicated_states(replica: Replica) -> list[FlatState]:
    """Return the flat states that are equal on another data-parallel rank after each update."""
    instances = replica.strategy.groups.instances
    return [
        state
        for state in optimizer_states(replica)
        if state.placement is Placement.REPLICATED
        or (state.placement is Placement.SHARDED and instances(state.bucket.kind).size > 1)
    ]


def tensor_states(replica: Replica) -> list[TensorState]:
    """Return the states of the optimizer and the strategy that belong to whole tensors."""
    states = replica.optimizer.tensor_state().items()
    return replica.strategy.tensor_states() + [
        TensorState(name=state, bucket=shard.bucket, placed=placed, values=values)
        for shard in replica.strategy.shards
        for placed, _, _ in shard.bucket.within(shard.start, shard.stop)
        for (state, name), values in states
        if name == placed.parameter.info.spec.name
    ]


def matrix_states(replica: Replica) -> list[MatrixState]:
    """Return the states of this rank's matrices, with a leading dimension over replicas if their weights differ."""
    found = replica.optimizer.matrix_states()
    if replica.strategy.replicas_agree or not found:
        return found
    replicas, _ = replica.strategy.groups.weight_replicas(replica.strategy.shards[0].bucket.kind)
    return [MatrixState(name, spec.stacked(replicas.rank, replicas.size), values[None]) for name, spec, values in found]


def state_tensors(replica: Replica) -> list[Saved]:
    """Return all tensors that this rank writes, as views of the live ones, without collectives. Call it inside the
    strategy's `consensus`."""
    found: list[Saved] = []
    for shard in replica.strategy.shards:
        found += _saved(replica, replica.strategy.weights(shard), "weight")
        for state in flat_states(replica, shard):
            found += _saved(replica, state, "optimizer")
    for state in replica.strategy.states():
        found += _saved(replica, state, "optimizer")
    if replica.topology.tp_dp_cp.rank == 0:
        for buffer in replica.buffers:
            spec = buffer.info.spec
            found.append((SavedTensor(key_group="weight", state="", spec=spec, dtype=buffer.dtype), buffer.data))
    shard_of = {shard.bucket: shard for shard in replica.strategy.shards}
    for whole in tensor_states(replica):
        if _writes(replica, shard_of[whole.bucket], whole):
            spec = tensor_spec(whole)
            saved = SavedTensor(key_group="optimizer", state=whole.name, spec=spec, dtype=whole.values.dtype)
            found.append((saved, whole.values.view(spec.shape)))
    for name, spec, values in matrix_states(replica):
        groups, kind = replica.strategy.groups, replica.strategy.shards[0].bucket.kind
        # The ranks of one replica have equal matrices.
        if replica.strategy.replicas_agree or groups.weight_replicas(kind)[1].rank == 0:
            saved = SavedTensor(key_group="optimizer", state=name, spec=spec, dtype=values.dtype)
            found.append((saved, values))
    return found


def _saved(replica: Replica, state: FlatState, group: Literal["weight", "optimizer"]) -> Iterator[Saved]:
    name = "" if group == "weight" else state.name
    if not replica.strategy.groups.first_copy(state.bucket.kind):
        return
    for index, placed in enumerate(state.bucket.placed):
        parts: list[tuple[ShardSpec, torch.Tensor]] = []
        if state.placement is Placement.SHARDED:
            # The ranks with this shard, in different instances, write a part of it each.
            same = replica.strategy.groups.instances(state.bucket.kind)
            size = state.values.numel() // same.size
            own = state.values[same.rank * size : (same.rank + 1) * size]
            parts += boxes_in(placed, own, state.start + same.rank * size)
        elif state.placement is Placement.PRIVATE:
            # Each replica writes one index of a leading dimension over replicas.
            replicas, same = replica.strategy.groups.weight_replicas(state.bucket.kind)
            if index % same.size == same.rank:
                private = placed.parameter.info.spec.stacked(replicas.rank, replicas.size)
                parts.append((private, state.values[placed.start : placed.stop]))
        else:
            share = _share(replica, state.bucket, index, placed)
            if share is not None:
                parts.append((share, _part(placed, share, state.values)))
        for spec, values in parts:
            saved = SavedTensor(key_group=group, state=name, spec=spec, dtype=values.dtype)
            yield saved, values.reshape(spec.shape)


def tensor_spec(state: TensorState) -> ShardSpec:
    """Return the shard of a whole tensor's stored state. States per slice have a leading dimension over slices."""
    spec, shape = state.placed.parameter.info.spec, tuple(state.values.shape) or (1,)
    if not state.per_slice:
        return ShardSpec.whole(spec.name, shape)
    index = count = 0
    for size, (start, stop) in zip(spec.global_shape, spec.slice, strict=True):
        each = size // max(stop - start, 1)
        index, count = index * each + start // max(stop - start, 1), max(count, 1) * each
    return ShardSpec.whole(spec.name, shape).stacked(index, count)


def load_tensor(state: TensorState, checkpoint: Checkpoint, notes: dict[str, None]) -> None:
    """Read the state of a whole tensor, if it was saved; append log lines to `notes`."""
    spec = tensor_spec(state)
    key = optimizer_key(state.name, spec.name)
    if not checkpoint.has(key) or tuple(checkpoint.entry(key).global_shape) != tuple(spec.global_shape):
        notes[f"has no {state.name} for this run: it starts over"] = None
        return
    checkpoint.read_into(state.values.view(spec.shape), key, spec.slice)


def load_matrix(state: MatrixState, checkpoint: Checkpoint, notes: dict[str, None]) -> None:
    """Read the state of a matrix. If the number of replicas differs, take one's: the mean of two bases is no basis."""
    key, (*_, rows, columns) = optimizer_key(state.name, state.spec.name), state.values.shape
    values, bounds = state.values.view(1, rows, columns), state.spec.slice[-3:]
    stored, replicas = checkpoint.entry(key).global_shape, state.spec.global_shape[:-3]
    if len(stored) == 3:
        checkpoint.read_into(values, key, bounds)
    else:
        if replicas != stored[:1]:
            notes[f"has {state.name} of {stored[0]} replicas, this run has another number: it takes one's"] = None
        replica = state.spec.slice[0][0] % stored[0] if replicas else 0
        checkpoint.read_into(values[None], key, ((replica, replica + 1), *bounds))


def _writes(replica: Replica, shard: OptimizerShard, state: TensorState) -> bool:
    """Return whether this rank, among those with the same state, writes it."""
    groups, kind, placed = replica.strategy.groups, state.bucket.kind, state.placed
    if not groups.first_copy(kind) or groups.instances(kind).rank > 0:
        return False
    if not state.per_slice and any(start for start, _ in placed.parameter.info.spec.slice):
        return False
    if replica.strategy.shards_over_dp:
        return shard.start <= placed.start < shard.stop
    return groups.replicas(kind).rank == 0


def _share(replica: Replica, bucket: Bucket, index: int, placed: Placed) -> ShardSpec | None:
    """Return the part of a parameter that this replica writes; None: nothing."""
    spec, (rank, size) = placed.parameter.info.spec, replica.strategy.groups.replica_position(bucket.kind)
    shape = spec.shape
    # If a rank has fewer experts than there are writers, split a later dimension.
    dim = next((dim for dim, extent in enumerate(shape) if extent >= size), None)
    if math.prod(shape) < SPLIT_ELEMENTS or dim is None:
        return spec if index % size == rank else None
    base = spec.slice[dim][0]
    start, stop = (base + writer * shape[dim] // size for writer in (rank, rank + 1))
    bounds = (*spec.slice[:dim], (start, stop), *spec.slice[dim + 1 :])
    return dataclasses.replace(spec, slice=bounds)


def _part(placed: Placed, spec: ShardSpec, flat: torch.Tensor) -> torch.Tensor:
    """Return the values of `spec`, a part of the parameter's slice, from a flat tensor like the bucket's data."""
    whole = placed.parameter.info.spec
    both = zip(spec.slice, whole.slice, strict=True)
    index = tuple(slice(start - base, stop - base) for (start, stop), (base, _) in both)
    return flat[placed.start : placed.stop].view(whole.shape)[index]


def boxes_in(placed: Placed, values: torch.Tensor, first: int) -> Iterator[tuple[ShardSpec, torch.Tensor]]:
    """Yield the slices of a parameter, and views of them, in `values`, a bucket's elements from `first` on.

    There may be several, because the range may begin and end inside a row."""
    spec = placed.parameter.info.spec
    start, stop = max(placed.start, first), min(placed.stop, first + values.numel())
    if start >= stop:
        return
    position = start - first
    for box in flat_boxes(spec.shape, start - placed.start, stop - placed.start):
        bounds = tuple((base + a, base + b) for (base, _), (a, b) in zip(spec.slice, box, strict=True))
        part = dataclasses.replace(spec, slice=bounds)
        yield part, values[position : position + volume(box)].view(part.shape)
        position += volume(box)


_CHUNK = 1 << 20
# 8 bytes are read as two numbers: the highest of 64 bits would add the same at each position, so two would cancel out.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_ODD = 0x9E3779B97F4A7C1


class ReplicasDifferError(RuntimeError):
    """Ranks that must have equal weights or optimizer states have different ones; the message names both."""


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a 64-bit checksum of each tensor that depends on every bit and its position."""
    return torch.stack([_fingerprint(values) for values in tensors]).tolist()


def _fingerprint(values: torch.Tensor) -> torch.Tensor:
    bits = values.detach().reshape(-1).view(_BITS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=values.device)
        # With odd factors, a change of one element always changes the sum (modulo 2^64).
        total += ((part + 1) * (2 * place + 1) * _ODD).sum()
    return total


def check_replicas(
    strategy: DataParallelStrategy, *, step: int, world: Group, states: Sequence[FlatState] = ()
) -> None:
    """Compare weights, and the optimizer `states` that must be equal, between all ranks with the same buckets. Sharded
    states are compared between instances. It reads all of them, and sends 8 bytes per tensor.

    Collectives: a gather of a number for each tensor over each group of replicas, and one over `world`.

    Raises ReplicasDifferError: a tensor differs; raised on every rank of its group with the name of the first one (ranks
    without a difference raise a RuntimeError with the same message)."""
    strategy.wait_until_idle()
    error: Exception | None = None
    weights = [strategy.weights(shard) for shard in strategy.shards]
    compared: dict[Group, list[FlatState]] = {}
    for state in (*weights, *states):
        kind = state.bucket.kind
        if state.placement is Placement.REPLICATED:
            compared.setdefault(strategy.groups.replicas(kind), []).append(state)
        compared.setdefault(strategy.groups.instances(kind), []).append(state)
    for group, group_states in compared.items():
        if group.size == 1:
            continue
        own = [
            (state, p.parameter.info.spec.name, state.values[first - state.start : last - state.start])
            for state in group_states
            for p, first, last in state.bucket.within(state.start, state.stop)
        ]
        with group.heartbeat.synchronise():
            prints = fingerprints([values for _, _, values in own])
        found = group.gather_json(prints)
        for rank, prints in enumerate(found):
            differ = [first != other for first, other in zip(found[0], prints, strict=True)]
            if error is None and any(differ):
                (state, first, _), more = own[differ.index(True)], sum(differ) - 1
                what = "weights" if state in weights else "optimizer states"
                first = first if state in weights else f"{state.name} of {first}"
                error = ReplicasDifferError(
                    f"after step {step} ranks {group.ranks[0]} and {group.ranks[rank]} should have the same {what} but "
                    f"differ in {first}{f' and {more} more tensors' if more else ''}: the run cannot be trusted; continue "
                    "from an earlier checkpoint, and check the hardware if it happens again"
                )
    world.raise_on_all_ranks(error)


def compare_replicas(replica: Replica, step: int) -> None:
    """Check after `step` that replicas with equal states are equal. Collectives: those of `check_replicas`."""
    strategy = replica.strategy
    if strategy.replicas_agree:
        with strategy.main_in_memory():
            states = replicated_states(replica)
            check_replicas(strategy, states=states, step=step, world=replica.topology.world)
