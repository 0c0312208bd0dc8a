"""Resuming from a checkpoint of any layout: each rank reads the slices that it needs; which data will differ is logged."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megalite.checkpoint.load import Checkpoint, find_checkpoint
from megalite.checkpoint.manifest import CheckpointMissing
from megalite.config.data import DEFAULT_SPLIT, DataConfig
from megalite.config.errors import CheckpointError, ConfigError
from megalite.config.model import TRAINING_FIELDS, ModelConfig
from megalite.config.run import RunConfig
from megalite.config.training import TrainingConfig
from megalite.data.sources import megatron_lengths
from megalite.optimizers.schedules import Progress
from megalite.training.load_states import load_states
from megalite.training.replica import Replica

_ORDER = {"training": ("seed", "seq_length"), "data": ("split", "packing", "data_order")}
"""Settings that the order of samples is a function of, by section."""
_SOURCES = ("data_path", "train_data_path", "mock_data")


def data_changes(saved: Mapping[str, Any], config: RunConfig, *, dp: Any = None) -> list[str]:
    """A line for each difference between the training samples of a checkpoint's run and of this one from here on.

    Args:
        saved: the config in the checkpoint's manifest.
        config: of the run that continues.
        dp: data-parallel size of the checkpoint's run, for a global batch that its config leaves open.
    """
    # A setting that came after the checkpoint was written had its default's meaning.
    before = {
        name: asdict(default) | (section if isinstance(section := saved.get(name), dict) else {})
        for name, default in (("training", TrainingConfig()), ("data", DataConfig()))
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
        is_known = all(isinstance(length, int) for length in before.values())
    except (AssertionError, ArithmeticError, TypeError, ValueError):
        is_known = False
    if not is_known:
        return ["the checkpoint does not say how long its run was: with data_order megatron samples may repeat"]
    differ = [
        f"{split} {before[split]} -> {length}"
        for split, length in megatron_lengths(config).items()
        if before.get(split, length) != length
    ]
    if not differ:
        return []
    return [
        "the order of samples is another from here on: with data_order megatron a run of another length has another "
        f"order, and samples may repeat: {', '.join(differ)} samples"
    ]


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "(none)" if isinstance(value, list) else str(value)


def resume(replica: Replica, *, tokenizer: str | None, log: Callable[[str], None]) -> Progress:
    """Continue from what `load` says, or from step 0 where it is empty and may be.

    Raises:
        CheckpointError: as `load`.
    """
    checkpoint = replica.config.checkpoint
    assert checkpoint.load is not None
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
    """Load the newest checkpoint that verifies (or `ckpt_step`), of any layout; returns where the run stands.

    With `finetune` only the weights are loaded and the run starts at 0. Else the log says where the run will read other
    samples than the one that it continues; that is legal.

    Raises:
        CheckpointError: nothing there, damage, or another model; the same on every rank.
    """
    config, topology = replica.config, replica.topology
    checkpoint = find_checkpoint(
        folder, step=config.checkpoint.ckpt_step, world=topology.world, device=topology.device, log=log
    )
    manifest, finetune = checkpoint.manifest, config.checkpoint.finetune
    check_same_model(checkpoint, config.model, finetune=finetune)
    # In a replica that has trained the last step's parameters may be on their way still: they would overtake what is read.
    replica.strategy.settle()
    if not finetune and tokenizer and manifest.tokenizer and tokenizer != manifest.tokenizer:
        raise CheckpointError(
            f"{checkpoint.path} was trained with another tokenizer (sha256 {manifest.tokenizer[:12]}..., "
            f"this run's is {tokenizer[:12]}...); give the same tokenizer, or --finetune to start over from the weights"
        )
    if not finetune and not any(key.startswith("optimizer.") for key in manifest.tensors):
        raise CheckpointError(
            f"{checkpoint.path} holds weights alone, no optimizer state to continue from; add --finetune"
        )
    error, notes = None, list[str]()
    try:
        load_states(replica, checkpoint, with_optimizer=not finetune, log=notes.append)
    except CheckpointError as found:
        error = found
    topology.world.agree(error, topology.device)
    log(f"loaded {checkpoint.path} (written by {_describe(manifest.layout)})")
    progress = Progress(0, 0)
    if not finetune:
        for line in (*notes, *data_changes(manifest.config, config, dp=manifest.layout.get("dp"))):
            log(line)
        progress = _load_counters(replica, checkpoint)
    replica.strategy.loaded()
    return progress


def _load_counters(replica: Replica, checkpoint: Checkpoint) -> Progress:
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


def check_same_model(checkpoint: Checkpoint, model: ModelConfig, *, finetune: bool = False) -> None:
    """The checkpoint's model section must describe the same network.

    Raises:
        CheckpointError: naming each field that differs with both values.
    """
    # A setting that came after the checkpoint was written: it had its default's meaning.
    section = checkpoint.manifest.config.get("model", {})
    if not isinstance(section, dict):
        raise CheckpointError(f"{checkpoint.path}: config.model in its manifest.json is not a section of settings")
    saved, ours, free = asdict(ModelConfig()) | section, asdict(model), set(TRAINING_FIELDS)
    if model.position_embedding_type != "learned_absolute":
        free.add("max_position_embeddings")  # a limit, not a shape
    if finetune:
        # how a context is extended
        free |= {"rotary_base", "sliding_window"} | {name for name in ours if name.startswith("rope_")}
    differ = [
        f"{name} {saved.get(name)} there, {value} here"
        for name, value in ours.items()
        if name not in free and saved.get(name) != value
    ]
    if differ:
        raise CheckpointError(
            f"{checkpoint.path} is of another model: {'; '.join(differ)}. Use the settings of the checkpoint "
            "(they are under config.model in its manifest.json), or another --load"
        )


def _describe(layout: dict[str, object]) -> str:
    axes = [(axis, layout[axis]) for axis in ("tp", "pp", "dp", "cp", "ep") if axis in layout]
    return ", ".join(f"{axis} {size}" for axis, size in axes if axis not in ("cp", "ep") or size != 1)
