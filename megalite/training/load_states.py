"""Reading what a replica remembers out of a checkpoint of any layout, and of another strategy or optimizer."""

from collections.abc import Callable

import torch

from megalite.checkpoint.load import Checkpoint
from megalite.checkpoint.manifest import optimizer_key, weight_key
from megalite.checkpoint.safetensors_file import DTYPE_NAMES, TORCH_DTYPES
from megalite.checkpoint.tiling import flat_boxes, volume
from megalite.config.errors import CheckpointError
from megalite.data_parallel.buckets import Placed
from megalite.data_parallel.facts import Placement
from megalite.data_parallel.shards import OptimizerShard, placed_in
from megalite.data_parallel.strategy import FlatState, TensorState
from megalite.training.replica import Replica
from megalite.training.state_tensors import flat_states, tensor_spec, tensor_states


def load_states(replica: Replica, checkpoint: Checkpoint, *, with_optimizer: bool, log: Callable[[str], None]) -> None:
    """Weights, main parameters and, with_optimizer, all else that optimizer and strategy remember.

    What a checkpoint of another strategy or optimizer does not have starts over, what differs between its replicas
    is averaged where the number of replicas is another or they share it, and the log says so.

    Raises:
        CheckpointError: something that must be there is not, or does not fit.
    """
    notes: dict[str, None] = {}
    with replica.strategy.main_in_memory():
        for shard in replica.strategy.shards:
            _load_weights(replica, shard, checkpoint)
            if shard.is_copy:
                for placed in placed_in(shard):
                    _read_range(checkpoint, main_key(placed, checkpoint), placed, shard.start, shard.main_param.data)
    if with_optimizer:
        for shard in replica.strategy.shards:
            for state in flat_states(replica, shard):
                if state.name != "main_param":
                    _load_flat(replica, state, checkpoint, notes)
    for state in replica.strategy.states():
        if with_optimizer or state.default == "parameter":
            _load_flat(replica, state, checkpoint, notes, from_weights=not with_optimizer)
    if with_optimizer:
        for whole in tensor_states(replica):
            _load_tensor(whole, checkpoint, notes)
        for note in notes:
            log(f"{checkpoint.path} {note}")


def _load_weights(replica: Replica, shard: OptimizerShard, checkpoint: Checkpoint) -> None:
    state = replica.strategy.weights(shard)
    for placed in _overlapping(state):
        spec = placed.parameter.info.spec
        entry = checkpoint.entry(weight_key(spec.name))
        if tuple(entry.global_shape) != tuple(spec.global_shape):
            raise CheckpointError(
                f"{checkpoint.path}: {weight_key(spec.name)} is {list(entry.global_shape)} there, "
                f"{list(spec.global_shape)} here"
            )
        same = TORCH_DTYPES[entry.dtype] == state.values.dtype
        key = weight_key(spec.name) if same else main_key(placed, checkpoint)
        _read_range(checkpoint, key, placed, state.start, state.values)


def _overlapping(state: FlatState) -> list[Placed]:
    return [placed for placed in state.bucket.placed if placed.start < state.stop and placed.stop > state.start]


def _load_flat(
    replica: Replica, state: FlatState, checkpoint: Checkpoint, notes: dict[str, None], *, from_weights: bool = False
) -> None:
    for placed in _overlapping(state):
        key = optimizer_key(state.name, placed.parameter.info.spec.name)
        if not from_weights and checkpoint.has(key):
            _load_stored(replica, state, checkpoint, key, placed, notes)
        elif state.default == "parameter":
            _read_range(checkpoint, main_key(placed, checkpoint), placed, state.start, state.values)
            notes[f"has no {state.name} for this run: it starts from the parameters"] = None
        elif state.default == "zeros":
            _range_in(state, placed).zero_()
            notes[f"has no {state.name} for this run: it starts from 0"] = None
        else:
            section = checkpoint.manifest.config.get("optimizer", {})
            wrote = section.get("optimizer", "adam") if isinstance(section, dict) else "adam"
            if wrote != (ours := replica.config.optimizer.optimizer):
                raise CheckpointError(
                    f"{checkpoint.path} was written with optimizer {wrote} and has no {state.name}, which {ours} needs; "
                    f"use --optimizer {wrote}, or --finetune to start over from the weights"
                )
            checkpoint.entry(key)  # says that it is missing, and what is there instead


def _range_in(state: FlatState, placed: Placed) -> torch.Tensor:
    """The part of the state's values that belongs to one parameter."""
    first, last = max(placed.start, state.start), min(placed.stop, state.stop)
    return state.values[first - state.start : last - state.start]


def _load_stored(
    replica: Replica, state: FlatState, checkpoint: Checkpoint, key: str, placed: Placed, notes: dict[str, None]
) -> None:
    """A state that is there: one for all replicas, or under a leading dimension one for each replica."""
    shape, here = placed.parameter.info.spec.global_shape, state.values.dtype
    entry = checkpoint.entry(key)
    stored, there = tuple(entry.global_shape), TORCH_DTYPES[entry.dtype]
    floats = there.is_floating_point and here.is_floating_point
    if floats and torch.finfo(there).eps < torch.finfo(here).eps:
        notes[f"has {state.name} in {entry.dtype}, this run in {DTYPE_NAMES[here]}: it is rounded"] = None
    if stored == shape:
        _read_range(checkpoint, key, placed, state.start, state.values)
        return
    private = state.placement is Placement.PRIVATE
    if len(stored) != 1 + len(shape) or stored[1:] != shape:
        expected = ", or one such for each replica" if private else ""
        raise CheckpointError(f"{checkpoint.path}: {key} is {list(stored)} there, {list(shape)} here{expected}")
    group = replica.strategy.groups.replicas(state.bucket.kind)
    if private and stored[0] == group.size:
        _read_range(checkpoint, key, placed, state.start, state.values, replica=group.rank)
        return
    has = f"this run has {group.size if private else 'one for all'}"
    notes[f"has {state.name} of {stored[0]} replicas, {has}: it takes their mean"] = None
    target = _range_in(state, placed)
    total = torch.zeros(target.shape, dtype=torch.float64, device=target.device)
    one = torch.empty_like(target)
    for index in range(stored[0]):
        _read_range(checkpoint, key, placed, max(placed.start, state.start), one, replica=index)
        total += one
    target.copy_(total / stored[0])


def _load_tensor(state: TensorState, checkpoint: Checkpoint, notes: dict[str, None]) -> None:
    spec = tensor_spec(state)
    key = optimizer_key(state.name, spec.name)
    if not checkpoint.has(key) or tuple(checkpoint.entry(key).global_shape) != tuple(spec.global_shape):
        notes[f"has no {state.name} for this run: it starts over"] = None
        return
    checkpoint.read_into(state.values.view(spec.shape), key, spec.slice)


def _read_range(
    checkpoint: Checkpoint, key: str, placed: Placed, first: int, target: torch.Tensor, *, replica: int | None = None
) -> None:
    """The elements of a parameter that lie in `target`, which holds a bucket's from `first` on.

    Args:
        replica: the tensor has a leading dimension, and they are in this place of it.
    """
    spec = placed.parameter.info.spec
    start, stop = max(placed.start, first), min(placed.stop, first + target.numel())
    position = start - first
    for box in flat_boxes(spec.shape, start - placed.start, stop - placed.start):
        bounds = tuple((base + a, base + b) for (base, _), (a, b) in zip(spec.slice, box, strict=True))
        size, shape = volume(box), tuple(after - before for before, after in box)
        if replica is not None:
            bounds, shape = ((replica, replica + 1), *bounds), (1, *shape)
        checkpoint.read_into(target[position : position + size].view(shape), key, bounds)
        position += size


def main_key(placed: Placed, checkpoint: Checkpoint) -> str:
    """Where the most precise values of a parameter are."""
    name = placed.parameter.info.spec.name
    main = optimizer_key("main_param", name)
    return main if checkpoint.has(main) else weight_key(name)
