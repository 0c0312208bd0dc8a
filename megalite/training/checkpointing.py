"""Between a replica and the checkpoint format: who writes which slice, and who reads it back."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from megalite.checkpoint.folders import candidates
from megalite.checkpoint.load import Checkpoint, find_checkpoint
from megalite.checkpoint.manifest import CheckpointError, CheckpointMissing, optimizer_key, weight_key
from megalite.checkpoint.save import SavedTensor, save_checkpoint
from megalite.config.errors import ConfigError
from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig
from megalite.data_parallel.buckets import Placed
from megalite.data_parallel.strategy import OptimizerShard, placed_in
from megalite.models.gpt import GPTStage
from megalite.optimizers.adam import STATES
from megalite.optimizers.schedules import Progress
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.sharding import ShardSpec, Slice
from megalite.training.replica import Replica

SPLIT_ELEMENTS = 1 << 18
"""Parameters of at least this many elements are written in parts, one by each rank that holds them."""

FREE_MODEL_FIELDS = {
    *("hidden_dropout", "attention_dropout", "init_method_std"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_token_drop_policy"),
}
"""Settings of the model that may differ between a checkpoint and the run that loads it."""


def save(replica: Replica, folder: Path, progress: Progress, *, tokenizer: str | None) -> Path:
    """Write everything that the run needs to go on, from every rank; returns the checkpoint's folder.

    Raises:
        CheckpointError: the same on every rank.
    """
    replica.strategy.wait_for_parameters()
    config = replica.config
    return save_checkpoint(
        folder,
        step=progress.step,
        plan=[entry for shard in replica.strategy.shards for entry in _plan(replica, shard)],
        tensors=_tensors(replica),
        counters={
            "step": progress.step,
            "consumed_samples": progress.samples,
            "optimizer_updates": replica.optimizer.updates,
            "loss_scaler": replica.scaler.state(),
        },
        config=asdict(config),
        layout=asdict(replica.topology.layout),
        tokenizer=tokenizer,
        world=replica.topology.world,
        device=replica.topology.device,
    )


def _states(shard: OptimizerShard) -> tuple[str, ...]:
    return ("main_param", *STATES) if shard.is_copy else STATES


def _plan(replica: Replica, shard: OptimizerShard) -> Iterator[SavedTensor]:
    """What this rank writes of one bucket: weights first, then each optimizer state."""
    dtypes = (("", shard.bucket.data.dtype), *((state, shard.main_param.dtype) for state in _states(shard)))
    for state, dtype in dtypes:
        for index, placed in enumerate(shard.bucket.placed):
            part = _written_part(replica, shard, index, placed)
            if part is not None:
                group = "optimizer" if state else "weight"
                yield SavedTensor(key_group=group, state=state, spec=part, dtype=dtype)  # type: ignore[arg-type]


def _written_part(replica: Replica, shard: OptimizerShard, index: int, placed: Placed) -> ShardSpec | None:
    """The part of this rank's shard of a parameter that it, and no other rank, writes; None: nothing."""
    info, topology = placed.parameter.info, replica.topology
    if info.shard_dim is None and not info.expert and topology.tp.rank != 0:
        return None
    if info.tied and topology.embedding is not None and topology.embedding.rank != 0:
        return None
    group = replica.strategy.groups.replicas(shard.bucket.kind)
    writers, writer = group.size, group.rank
    shape = info.spec.shape
    # A rank may hold fewer experts than there are writers: then their rows are shared out.
    dim = next((dim for dim, size in enumerate(shape) if size >= writers), None)
    if placed.parameter.numel() < SPLIT_ELEMENTS or dim is None:
        return info.spec if index % writers == writer else None
    return _cut(info.spec, dim, writer * shape[dim] // writers, (writer + 1) * shape[dim] // writers)


def _cut(spec: ShardSpec, dim: int, start: int, stop: int) -> ShardSpec:
    """The part from `start` to `stop` along `dim` of the slice that `spec` describes."""
    base = spec.slice[dim][0]
    bounds: Slice = (*spec.slice[:dim], (base + start, base + stop), *spec.slice[dim + 1 :])
    return ShardSpec(name=spec.name, global_shape=spec.global_shape, slice=bounds)


def _tensors(replica: Replica) -> Iterator[torch.Tensor]:
    """The data of `_plan`, a bucket at a time. All replicas of a bucket take part in its gathers."""
    for shard in replica.strategy.shards:
        yield from _own_parts(replica, shard, shard.bucket.data)
        states = {"main_param": shard.main_param.data, **replica.optimizer.state(shard.main_param)}
        for state in _states(shard):
            yield from _own_parts(replica, shard, replica.strategy.gather(shard, states[state]))


def _own_parts(replica: Replica, shard: OptimizerShard, flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for index, placed in enumerate(shard.bucket.placed):
        part = _written_part(replica, shard, index, placed)
        if part is not None:
            info = placed.parameter.info
            whole = flat[placed.start : placed.stop].view(info.spec.shape)
            both = zip(part.slice, info.spec.slice, strict=True)
            yield whole[tuple(slice(start - base, stop - base) for (start, stop), (base, _) in both)]


def same_folder(one: str | None, other: str | None) -> bool:
    """Both name one folder, however they spell it."""
    return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()


def refuse_foreign_checkpoints(config: RunConfig, progress: Progress) -> None:
    """A run must not save among later checkpoints of another one: the next resume would take those for its own.

    Later ones in the folder that the run has just resumed from are damaged, or they would have been taken.

    Raises:
        ConfigError: the save folder holds checkpoints beyond `progress`.
    """
    c = config.checkpoint
    if c.save is None:
        return
    resumed = c.load is not None and c.ckpt_step is None and not c.finetune
    if resumed and same_folder(c.load, c.save):
        return
    try:
        newest = candidates(Path(c.save))[0]
    except CheckpointMissing:
        return
    if newest.step > progress.step:
        raise ConfigError(
            f"{c.save} holds checkpoints up to step {newest.step} but this run starts at step {progress.step}; add "
            f"--load {c.save} to go on from the newest, or give another --save"
        )


def load(replica: Replica, folder: Path, *, tokenizer: str | None, log: Callable[[str], None]) -> Progress:
    """Take up the newest checkpoint that verifies (or `ckpt_step`), of any layout; returns where the run stands.

    With `finetune` only the weights are taken and the run starts at 0.

    Raises:
        CheckpointError: nothing there, damage, or another model; the same on every rank.
    """
    config, topology = replica.config, replica.topology
    checkpoint = find_checkpoint(
        folder, step=config.checkpoint.ckpt_step, world=topology.world, device=topology.device, log=log
    )
    finetune = config.checkpoint.finetune
    check_same_model(checkpoint, config.model, finetune=finetune)
    if (
        not finetune
        and tokenizer
        and checkpoint.manifest.tokenizer
        and tokenizer != checkpoint.manifest.tokenizer
    ):
        raise CheckpointError(
            f"{checkpoint.path} was trained with another tokenizer (sha256 {checkpoint.manifest.tokenizer[:12]}..., "
            f"this run's is {tokenizer[:12]}...); give the same tokenizer, or --finetune to start anew from the weights"
        )
    error = None
    try:
        for shard in replica.strategy.shards:
            _load_shard(replica, shard, checkpoint, with_optimizer=not finetune)
    except CheckpointError as found:
        error = found
    topology.world.agree(error, topology.device)
    log(f"loaded {checkpoint.path} (written by {_describe(checkpoint.manifest.layout)})")
    if finetune:
        return Progress(0, 0)
    counters = checkpoint.manifest.counters
    replica.optimizer.set_updates(int(counters["optimizer_updates"]))
    replica.scaler.load_state(counters["loss_scaler"])
    return Progress(int(counters["step"]), int(counters["consumed_samples"]))


def _load_shard(
    replica: Replica, shard: OptimizerShard, checkpoint: Checkpoint, *, with_optimizer: bool
) -> None:
    for placed in shard.bucket.placed:
        load_parameter(placed.parameter, checkpoint)
    targets = {"main_param": shard.main_param.data} if shard.is_copy else {}
    if with_optimizer:
        targets |= replica.optimizer.state(shard.main_param)
    for placed in placed_in(shard):
        for state, target in targets.items():
            key = _main_key(placed.parameter, checkpoint)
            if state != "main_param":
                key = optimizer_key(state, placed.parameter.info.spec.name)
            start, stop = max(placed.start, shard.start), min(placed.stop, shard.stop)
            values = _read_flat(
                checkpoint,
                key,
                placed.parameter.info.spec,
                start - placed.start,
                stop - placed.start,
                target.dtype,
            )
            target[start - shard.start : stop - shard.start].copy_(values)


def _read_flat(
    checkpoint: Checkpoint, key: str, spec: ShardSpec, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    """Elements [start, stop) of the flattened local slice; no more than the rows that hold them are read."""
    row = max(1, torch.Size(spec.shape[1:]).numel())
    first, last = start // row, -(-stop // row)
    rows = checkpoint.read(key, _cut(spec, 0, first, last).slice, device=torch.device("cpu"), dtype=dtype)
    return rows.flatten()[start - first * row : stop - first * row]


def _main_key(parameter: ShardedParameter, checkpoint: Checkpoint) -> str:
    """Where the most precise values of a parameter are."""
    name = parameter.info.spec.name
    main = optimizer_key("main_param", name)
    return main if checkpoint.has(main) else weight_key(name)


def load_parameter(parameter: ShardedParameter, checkpoint: Checkpoint) -> None:
    """Read this rank's slice of one parameter, rounded to the parameter's type."""
    spec = parameter.info.spec
    values = checkpoint.read(
        _main_key(parameter, checkpoint), spec.slice, device=torch.device("cpu"), dtype=parameter.dtype
    )
    parameter.data.copy_(values)


def load_weights(stage: GPTStage, checkpoint: Checkpoint) -> None:
    """Weights alone, into a stage that is not being trained."""
    check_same_model(checkpoint, stage.config)
    for parameter in stage.parameters():
        assert isinstance(parameter, ShardedParameter)
        load_parameter(parameter, checkpoint)


def check_same_model(checkpoint: Checkpoint, model: ModelConfig, *, finetune: bool = False) -> None:
    """The checkpoint's model section must describe the same network.

    Raises:
        CheckpointError: naming each field that differs with both values.
    """
    # A setting that came after the checkpoint was written: it had its default's meaning.
    saved = asdict(ModelConfig()) | checkpoint.manifest.config.get("model", {})
    ours = asdict(model)
    free = set(FREE_MODEL_FIELDS)
    if model.position_embedding_type != "learned_absolute":
        free.add("max_position_embeddings")  # a limit, not a shape
    if finetune:
        # how a context is extended
        free |= {"rotary_base", "sliding_window"} | {name for name in ours if name.startswith("rope_")}
    names = [name for name in ours if name not in free]
    differ = [
        f"{name} {saved.get(name)} there, {ours[name]} here"
        for name in names
        if saved.get(name) != ours[name]
    ]
    if differ:
        raise CheckpointError(
            f"{checkpoint.path} is of another model: {'; '.join(differ)}. Use the settings of the checkpoint "
            "(they are under config.model in its manifest.json), or another --load"
        )


def _describe(layout: dict[str, object]) -> str:
    shown = {axis: layout[axis] for axis in ("tp", "pp", "dp", "cp", "ep") if axis in layout}
    return ", ".join(
        f"{axis} {size}" for axis, size in shown.items() if axis not in ("cp", "ep") or size != 1
    )
