"""Resuming from a checkpoint of any layout: each rank reads the slices that it needs; which data will differ is logged."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megalite.checkpoint.folders import candidates
from megalite.checkpoint.load import Checkpoint, find_checkpoint
from megalite.checkpoint.manifest import CheckpointMissing
from megalite.config.data import DEFAULT_SPLIT, DataConfig
from megalite.config.errors import CheckpointError, ConfigError
from megalite.config.model import TRAINING_FIELDS, ModelConfig
from megalite.config.run import RunConfig
from megalite.config.training import TrainingConfig
from megalite.data.sources import megatron_lengths
from megalite.models.gpt import GPTStage
from megalite.optimizers.schedules import Progress
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.training.load_states import load_parameter, load_states
from megalite.training.replica import Replica

_ORDER = {"training": ("seed", "seq_length"), "data": ("split", "packing", "data_order")}
"""Settings that the order of samples is a function of, by section."""

_SOURCES = ("data_path", "train_data_path", "mock_data")


def data_changes(saved: Mapping[str, Any], config: RunConfig, *, dp: Any = None) -> list[str]:
    """A line for each difference between the training samples of a checkpoint's run and of this one from here on.

    Args:
        saved: the config in the checkpoint's manifest.
        config: of the run that goes on.
        dp: data-parallel size of the checkpoint's run, for a global batch that its config leaves open.
    """
    # A setting that came after the checkpoint was written had its default's meaning.
    before = {
        "training": asdict(TrainingConfig()) | _section(saved, "training"),
        "data": asdict(DataConfig()) | _section(saved, "data"),
    }
    now = {"training": asdict(config.training), "data": asdict(config.data)}
    for sections in (before, now):
        sections["data"]["split"] = sections["data"]["split"] or DEFAULT_SPLIT
    lines = [
        f"the order of samples is another from here on: {name} {before[section][name]} -> {now[section][name]}"
        for section, names in _ORDER.items()
        for name in names
        if before[section][name] != now[section][name]
    ]
    lines += [
        f"the samples are others from here on, unless these hold the same: {name} {_shown(before['data'][name])} -> "
        f"{_shown(now['data'][name])}"
        for name in _SOURCES
        if before["data"][name] != now["data"][name]
    ]
    if before["data"]["data_order"] == now["data"]["data_order"] == "megatron":
        lines += _length_changes(before["training"], config, dp)
    return lines


def _length_changes(training: Mapping[str, Any], config: RunConfig, dp: Any) -> list[str]:
    """Megatron's order is made for the length of the run."""
    known = {name: training[name] for name in asdict(config.training)}
    try:
        if known["global_batch_size"] is None:
            known["global_batch_size"] = known["micro_batch_size"] * dp
        before = megatron_lengths(replace(config, training=TrainingConfig(**known)))
        told = all(isinstance(length, int) for length in before.values())
    except (AssertionError, ArithmeticError, TypeError, ValueError):
        told = False
    if not told:
        return ["the checkpoint does not say how long its run was: with data_order megatron samples may repeat"]
    now = megatron_lengths(config)
    differ = [
        f"{split} {before[split]} -> {now[split]}" for split in now if before.get(split, now[split]) != now[split]
    ]
    if not differ:
        return []
    return [
        "the order of samples is another from here on: with data_order megatron a run of another length has another "
        f"order, and samples may repeat: {', '.join(differ)} samples"
    ]


def _section(saved: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = saved.get(name)
    return section if isinstance(section, dict) else {}


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "(none)" if isinstance(value, list) else str(value)


def same_folder(one: str | None, other: str | None) -> bool:
    """Both name one folder, however they spell it."""
    return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()


def refuse_foreign_checkpoints(config: RunConfig, progress: Progress) -> None:
    """A run must not save among later checkpoints of another one: the next resume would take those for its own.

    Later ones in the folder that the run has just resumed from are damaged, or they would have been taken. Nor may a
    run remove checkpoints that it has not made.

    Raises:
        ConfigError: the save folder holds checkpoints beyond `progress`, or any that keep_latest would remove.
    """
    c = config.checkpoint
    if c.save is None:
        return
    goes_on = same_folder(c.load, c.save) and not c.finetune
    if goes_on and c.ckpt_step is None:
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
    if c.keep_latest is not None and not goes_on:
        raise ConfigError(
            f"{c.save} holds checkpoints up to step {newest.step} that this run has not made, and keep_latest "
            f"{c.keep_latest} would remove them; give another --save, add --load {c.save} to go on from them, or leave "
            "out --keep-latest"
        )


def resume(replica: Replica, *, tokenizer: str | None, log: Callable[[str], None]) -> Progress:
    """Go on from what `load` says, or from step 0 where it says nothing, or is empty and may be.

    Raises:
        CheckpointError: as `load`.
    """
    checkpoint = replica.config.checkpoint
    if checkpoint.load is None:
        return Progress(0, 0)
    try:
        return load(replica, Path(checkpoint.load), tokenizer=tokenizer, log=log)
    except CheckpointMissing as error:
        if not checkpoint.fresh_if_missing:
            raise CheckpointMissing(
                f"{error}; give --load the folder of a run's checkpoints, or add --fresh-if-missing to start from "
                "step 0 where there are none"
            ) from None
        log(f"no checkpoint in {checkpoint.load}: starting from step 0, as fresh_if_missing says")
        return Progress(0, 0)


def load(replica: Replica, folder: Path, *, tokenizer: str | None, log: Callable[[str], None]) -> Progress:
    """Take up the newest checkpoint that verifies (or `ckpt_step`), of any layout; returns where the run stands.

    With `finetune` only the weights are taken and the run starts at 0. Else the log says where the run will read other
    samples than the one that it goes on from; that is legal.

    Raises:
        CheckpointError: nothing there, damage, or another model; the same on every rank.
    """
    config, topology = replica.config, replica.topology
    checkpoint = find_checkpoint(
        folder, step=config.checkpoint.ckpt_step, world=topology.world, device=topology.device, log=log
    )
    finetune = config.checkpoint.finetune
    check_same_model(checkpoint, config.model, finetune=finetune)
    # In a replica that has trained the last step's parameters may be on their way still: they would overtake what is read.
    replica.strategy.settle()
    if not finetune and tokenizer and checkpoint.manifest.tokenizer and tokenizer != checkpoint.manifest.tokenizer:
        raise CheckpointError(
            f"{checkpoint.path} was trained with another tokenizer (sha256 {checkpoint.manifest.tokenizer[:12]}..., "
            f"this run's is {tokenizer[:12]}...); give the same tokenizer, or --finetune to start anew from the weights"
        )
    if not finetune and not any(key.startswith("optimizer.") for key in checkpoint.manifest.tensors):
        raise CheckpointError(
            f"{checkpoint.path} holds weights alone, no optimizer state to go on from; add --finetune"
        )
    error, notes = None, list[str]()
    try:
        load_states(replica, checkpoint, with_optimizer=not finetune, log=notes.append)
    except CheckpointError as found:
        error = found
    topology.world.agree(error, topology.device)
    log(f"loaded {checkpoint.path} (written by {_describe(checkpoint.manifest.layout)})")
    if finetune:
        replica.strategy.loaded()
        return Progress(0, 0)
    changes = data_changes(checkpoint.manifest.config, config, dp=checkpoint.manifest.layout.get("dp"))
    for line in (*notes, *changes):
        log(line)
    progress = _take_counters(replica, checkpoint)
    replica.strategy.loaded()
    return progress


def _take_counters(replica: Replica, checkpoint: Checkpoint) -> Progress:
    counters = checkpoint.manifest.counters
    try:
        if int(counters["step"]) != checkpoint.manifest.step:
            raise ValueError(f"step is {counters['step']} in a checkpoint of step {checkpoint.manifest.step}")
        replica.optimizer.updates = int(counters["optimizer_updates"])
        replica.scaler.load_state(counters["loss_scaler"])
        # Checkpoints from before there were such counters have none.
        replica.optimizer.load_counters(counters.get("optimizer", {}))
        replica.strategy.load_counters(counters.get("strategy", {}))
        return Progress(int(counters["step"]), int(counters["consumed_samples"]))
    except ConfigError:
        raise  # of a setting that does not go with what was saved
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: its counters are not those of a training run ({type(error).__name__}: {error}); "
            "--finetune takes the weights alone"
        ) from None


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
    section = checkpoint.manifest.config.get("model", {})
    if not isinstance(section, dict):
        raise CheckpointError(f"{checkpoint.path}: config.model in its manifest.json is not a section of settings")
    saved = asdict(ModelConfig()) | section
    ours = asdict(model)
    free = set(TRAINING_FIELDS)
    if model.position_embedding_type != "learned_absolute":
        free.add("max_position_embeddings")  # a limit, not a shape
    if finetune:
        # how a context is extended
        free |= {"rotary_base", "sliding_window"} | {name for name in ours if name.startswith("rope_")}
    names = [name for name in ours if name not in free]
    differ = [f"{name} {saved.get(name)} there, {ours[name]} here" for name in names if saved.get(name) != ours[name]]
    if differ:
        raise CheckpointError(
            f"{checkpoint.path} is of another model: {'; '.join(differ)}. Use the settings of the checkpoint "
            "(they are under config.model in its manifest.json), or another --load"
        )


def _describe(layout: dict[str, object]) -> str:
    shown = {axis: layout[axis] for axis in ("tp", "pp", "dp", "cp", "ep") if axis in layout}
    return ", ".join(f"{axis} {size}" for axis, size in shown.items() if axis not in ("cp", "ep") or size != 1)
