"""Resumes from a checkpoint of any layout: each rank reads its slices. Logs settings that change data or numbers."""

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from megalite.checkpoint.files import THREADS
from megalite.checkpoint.load import Checkpoint, agreed_candidates, find_checkpoint
from megalite.checkpoint.manifest import CheckpointMissing, Manifest, Slice, TensorEntry, optimizer_key, weight_key
from megalite.checkpoint.safetensors_file import DTYPE_NAMES, TORCH_DTYPES
from megalite.config.data import DEFAULT_SPLIT, PATH_SETTINGS, is_address, parse_data_path
from megalite.config.errors import CheckpointError, ConfigError, Problems
from megalite.config.model import TRAINING_FIELDS, ModelConfig, free_settings
from megalite.config.optimizer import OPTIMIZERS, OptimizerConfig
from megalite.config.parallel import DataParallelConfig
from megalite.config.registry import Registry
from megalite.config.run import RunConfig, hugging_face_folder, save_folder
from megalite.config.strategies import STRATEGIES
from megalite.config.validate import validate
from megalite.data.token_files import require_recorded_tokenizer
from megalite.data_parallel.buckets import Bucket, Placed
from megalite.data_parallel.facts import Placement
from megalite.data_parallel.shards import OptimizerShard
from megalite.data_parallel.strategy import FlatState
from megalite.optimizers.schedules import Progress
from megalite.tokenizers.base import Tokenizer
from megalite.topology.group import Group
from megalite.training.replica import Replica
from megalite.training.saving import newest_saved
from megalite.training.state_tensors import (
    boxes_in,
    load_matrix,
    load_tensor,
    matrix_states,
    optimizer_states,
    tensor_states,
)


class Source(Protocol):
    """Source of weight slices: a `Checkpoint`, or weights of another format under a checkpoint's names and shapes."""

    path: Path

    def has(self, key: str) -> bool: ...
    def entry(self, key: str) -> TensorEntry: ...
    def read_into(self, output: torch.Tensor, key: str, slice: Slice) -> None: ...


class Weights(Source, Protocol):
    """Weights of another format."""

    model: ModelConfig
    remarks: str
    """Continuation of a log line: weights that are stored in fewer bits, and tensors that are left out."""


FORMATS: Registry[Callable[[Path, ModelConfig], Weights]] = Registry(
    "format of load", {"hf": "megalite.conversion.huggingface.weights:HuggingFaceSource"}
)
"""Functions that open a folder `hf:FOLDER` for a model, imported only in runs that start from one."""

_ORDER = {"training": ("seed", "seq_length"), "data": ("split", "packing", "data_order", "text_field", "sft")}
"""Settings that determine the order of samples, by section."""
_LENGTH = ("train_iters", "train_samples", "global_batch_size", "eval_interval", "eval_iters")
"""Settings that determine the length of a run, on which the order of samples of `data_order` megatron depends."""
_SOURCES = ("dataset", "data_path", "train_data_path", "mock_data")


def _section(tree: Mapping[str, Any], name: str, dp: Any = None) -> dict[str, Any]:
    """Return a section of a stored config. Settings newer than the checkpoint have their defaults. A global batch size
    that is not set follows from `dp`."""
    stored = tree.get(name)
    values = asdict(getattr(RunConfig(), name)) | (stored if isinstance(stored, dict) else {})
    micro = values.get("micro_batch_size")
    if name == "training" and values["global_batch_size"] is None and isinstance(micro, int) and isinstance(dp, int):
        values["global_batch_size"] = micro * dp
    return values


def changed_data(saved: Mapping[str, Any], written: RunConfig, *, dp: Any, here: int | None) -> list[str]:
    """Return a line for each setting that makes this run read other training samples than the checkpoint's run. `dp`:
    of the checkpoint's run; `here`: of this run."""
    before, now = (
        {name: _section(tree, name, ranks) for name in _ORDER} for tree, ranks in ((saved, dp), (asdict(written), here))
    )
    for sections in (before, now):
        sections["data"]["split"] = sections["data"]["split"] or DEFAULT_SPLIT
    order = dict(_ORDER)
    if before["data"]["data_order"] == now["data"]["data_order"] == "megatron":
        order["training"] += _LENGTH
    lines = [
        f"the order of samples changes from here on: {name} {before[section][name]} -> {now[section][name]}"
        for section, names in order.items()
        for name in names
        if before[section][name] != now[section][name]
    ]
    return lines + [
        f"the samples change from here on, unless the contents are the same: {name} {_shown(before['data'][name])} -> "
        f"{_shown(now['data'][name])}"
        for name in _SOURCES
        if before["data"][name] != now["data"][name]
    ]


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "(none)" if isinstance(value, list) else str(value)


def resume(replica: Replica, *, tokenizer: str | None, log: Callable[[str], None]) -> Progress:
    """Load from `load`; start from step 0 if it has no checkpoint and `fresh_if_missing` allows it."""
    checkpoint = replica.config.checkpoint
    assert checkpoint.load is not None
    if (folder := hugging_face_folder(checkpoint.load)) is not None:
        return _start_from(replica, folder, log)
    try:
        return load(replica, Path(checkpoint.load), tokenizer=tokenizer, log=log)
    except CheckpointMissing as error:
        if not checkpoint.fresh_if_missing:
            raise
        log(f"{error}: starting from step 0 because of fresh_if_missing")
        return Progress(0, 0)


def choose_checkpoint(config: RunConfig, *, world: Group, log: Callable[[str], None]) -> RunConfig:
    """Require that `load` exists or may be missing; if another format, prefer the run's own checkpoints.

    Collectives: a broadcast over the world."""
    save, load, checkpoint = save_folder(config), str(config.checkpoint.load), config.checkpoint
    foreign = hugging_face_folder(load) is not None
    if not foreign and not is_address(load):
        try:
            agreed_candidates(Path(load), checkpoint.ckpt_step, world)
        except CheckpointMissing as error:
            if not checkpoint.fresh_if_missing:
                works = "give --load the folder of a run's checkpoints, or add --fresh-if-missing to start from step 0"
                raise CheckpointMissing(f"{error}; {works}") from None
    if save is None or not foreign:
        return config
    found = True
    if world.rank == 0:
        with contextlib.suppress(ConfigError):  # all ranks raise it later, when they look for the newest
            found = newest_saved(replace(config, checkpoint=replace(checkpoint, save=save))) is not None
    if not world.broadcast_json(found):
        return config
    log(f"{save} holds checkpoints: the run resumes from the newest of them, not from {load}")
    return replace(config, checkpoint=replace(checkpoint, load=save, finetune=False))


def _start_from(replica: Replica, folder: Path, log: Callable[[str], None]) -> Progress:
    """Load weights of another format, and start at step 0."""
    config, topology = replica.config, replica.topology
    replica.strategy.wait_until_idle()
    with topology.world.errors_on_all_ranks():
        try:
            source = FORMATS.get("hf")(folder, config.model)
            _refuse_other_model(folder, asdict(source.model), config.model, finetune=config.checkpoint.finetune)
            load_weights(replica, source)
        except OSError as error:
            raise CheckpointError(f"cannot read {folder}: {error.strerror}") from None
    log(f"loaded the weights of {folder}{source.remarks}; training begins at step 0")
    replica.strategy.after_load()
    return Progress(0, 0)


def load(replica: Replica, folder: Path, *, tokenizer: str | None, log: Callable[[str], None]) -> Progress:
    """Load the newest valid checkpoint (or `ckpt_step`) of any layout, and return the run's progress.

    With `finetune` load only the weights and start at step 0. Otherwise log settings that change samples or numbers,
    which is legal. A CheckpointError is raised on every rank."""
    config, topology = replica.config, replica.topology
    checkpoint = find_checkpoint(folder, step=config.checkpoint.ckpt_step, world=topology.world, log=log)
    manifest, finetune = checkpoint.manifest, config.checkpoint.finetune
    check_fits(str(checkpoint.path), manifest, config)
    # A replica that has trained may still gather parameters of its last step, which would overwrite the loaded ones.
    replica.strategy.wait_until_idle()
    with topology.world.errors_on_all_ranks():
        require_tokenizer(str(checkpoint.path), manifest, config, tokenizer)
    with_optimizer = not finetune and config.checkpoint.load_optimizer
    notes: list[str] = []
    with topology.world.errors_on_all_ranks(CheckpointError):
        load_states(replica, checkpoint, with_optimizer=with_optimizer, log=notes.append)
    if with_optimizer and OPTIMIZERS.facts(config.optimizer.optimizer).averaged:
        # The checkpoint's weights are the averages; the trained parameters were read into main parameters.
        replica.strategy.publish_parameters()
        replica.strategy.wait_until_idle()
    log(f"loaded {checkpoint.path} (written by {_describe(manifest.layout)})")
    progress = Progress(0, 0)
    if not finetune:
        both: dict[str, Any] = {"dp": manifest.layout.get("dp"), "here": config.parallel.dp}
        written = replica.written
        for line in (
            *notes,
            *changed_data(manifest.config, written, **both),
            *changed_numbers(manifest.config, written, **both),
        ):
            log(line)
        if not with_optimizer:
            log("the optimizer states start from their initial values because of load_optimizer")
        progress = _load_counters(replica, checkpoint, with_optimizer=with_optimizer)
    replica.strategy.after_load()
    return progress


def _load_counters(replica: Replica, checkpoint: Checkpoint, *, with_optimizer: bool) -> Progress:
    counters = checkpoint.manifest.counters
    try:
        if int(counters["step"]) != checkpoint.manifest.step:
            raise ValueError(f"step is {counters['step']} in a checkpoint of step {checkpoint.manifest.step}")
        replica.scaler.load_state(counters["loss_scaler"])
        if with_optimizer:
            replica.optimizer.updates = int(counters["optimizer_updates"])
            # Older checkpoints do not have these counters.
            replica.optimizer.load_counters(counters.get("optimizer", {}))
            replica.strategy.load_counters(counters.get("strategy", {}))
            if replica.noise is not None:
                replica.noise.load_state(counters.get("gradient_noise", {}))
        return Progress(int(counters["step"]), int(counters["consumed_samples"]))
    except ConfigError:
        raise  # a setting that is not compatible with the saved counters
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: its counters are not those of a training run ({type(error).__name__}: {error}); "
            "--finetune loads only the weights"
        ) from None


SCHEDULE = (
    *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "lr_multipliers"),
    *("lr_decay_style", "lr_decay_iters", "lr_decay_samples"),
    *("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_warmup_init", "lr_schedule_offset"),
    *("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style", "weight_decay", "weight_decay_incr_style"),
    *("start_weight_decay", "end_weight_decay"),
)
"""Settings of the learning-rate and weight-decay schedules."""


_SAME_NUMBERS = {
    *("eval_ema", "main_params", "optimizer_cpu_offload", "optimizer_offload_fraction"),
    *("reduction_order", "shard_gradients", "fusion_threshold_mb", "server_chunk_mb", "check_replicas_interval"),
    *("init_method_std", "mtp_num_layers", "moe_pad_expert_input_to_capacity"),
    *("exp_avg_dtype", "exp_avg_sq_dtype"),  # logged when states are rounded
}
_NUMBERS = {
    "training": (
        *("loss", "precision", "global_batch_size", "iterations_to_skip"),
        *("rampup_batch_size", "step_batch_size_schedule", "seq_length_warmup", "moe_aux_loss_sequences"),
    ),
    "data": ("eod_mask_loss", "reset_attention_mask", "reset_position_ids"),
    "compute": ("fp8", "fp8_recipe", "fp8_wgrad", "tf32"),
    "parallel": ("dp_strategy", "pipeline_compression"),
    "data_parallel": tuple(name for name in DataParallelConfig.__dataclass_fields__ if name not in _SAME_NUMBERS),
    "optimizer": tuple(name for name in OptimizerConfig.__dataclass_fields__ if name not in _SAME_NUMBERS),
    "model": tuple(sorted(TRAINING_FIELDS - _SAME_NUMBERS)),
}
"""Settings that may differ when a run resumes, but change its numbers, by section."""


def _equal_weights(strategy: object) -> bool:
    """Return whether replicas have equal weights after each step: such strategies give the same numbers."""
    return strategy in STRATEGIES and STRATEGIES.facts(str(strategy)).weights == "equal"


def _decay_length(optimizer: OptimizerConfig) -> tuple[str, ...]:
    """Return the settings of the run's length if the learning rate decays until its end."""
    until_end = optimizer.lr_decay_iters is None and optimizer.lr_decay_samples is None
    return ("train_iters", "train_samples") if until_end and optimizer.lr_decay_style != "constant" else ()


def changed_numbers(saved: Mapping[str, Any], written: RunConfig, *, dp: Any, here: int | None) -> list[str]:
    """Return a line with the settings of `_NUMBERS` that differ from the checkpoint's run, if any. The global batch size
    may follow from dp: `dp` in the checkpoint's run, `here` in this run."""
    differ = list[str]()
    for section, names in _NUMBERS.items():
        before, now = _section(saved, section, dp), _section(asdict(written), section, here)
        if section == "training":
            names = (*names, *_decay_length(written.optimizer))
        if section == "parallel" and all(_equal_weights(values["dp_strategy"]) for values in (before, now)):
            names = ("pipeline_compression",)
        changed = (name for name in names if before[name] != now[name])
        differ += [f"{name} {_shown(before[name])} -> {_shown(now[name])}" for name in changed]
    return [f"other settings than the checkpoint's run had: {', '.join(differ)}"] if differ else []


TokenizerOf = Callable[[RunConfig], Tokenizer | None]


def check_settings(
    name: str, manifest: Manifest, config: RunConfig, *, explicit: frozenset[str], tokenizer_of: TokenizerOf
) -> None:
    """Apply `check_fits` and `require_tokenizer` to a config before it is resolved."""
    model, tokenizer = validate(config, None, explicit, problems=Problems()).model, tokenizer_of(config)
    if model.vocab_size is None:
        saved = _section(manifest.config, "model").get("vocab_size")
        model = replace(model, vocab_size=saved if tokenizer is None else tokenizer.vocab_size)
    check_fits(name, manifest, replace(config, model=model))
    require_tokenizer(name, manifest, config, None if tokenizer is None else tokenizer.fingerprint())


def require_tokenizer(name: str, manifest: Manifest, config: RunConfig, tokenizer: str | None) -> None:
    """Raise ConfigError if a run that continues has another tokenizer than the checkpoint, or, without a tokenizer,
    token files that record another one. `tokenizer`: fingerprint of the run's tokenizer."""
    if config.checkpoint.finetune or not manifest.tokenizer:
        return
    if tokenizer and tokenizer != manifest.tokenizer:
        raise CheckpointError(
            f"{name} was trained with another tokenizer (sha256 {manifest.tokenizer[:12]}..., "
            f"this run's is {tokenizer[:12]}...); give the same tokenizer, or --finetune to start over from the weights"
        )
    if not tokenizer and config.data.dataset is None:
        for setting in PATH_SETTINGS:
            for _, prefix in parse_data_path(getattr(config.data, setting), setting):
                require_recorded_tokenizer(prefix, manifest.tokenizer)


def check_fits(name: str, manifest: Manifest, config: RunConfig) -> None:
    """Raise CheckpointError if a checkpoint's manifest does not fit the config."""
    finetune = config.checkpoint.finetune
    _refuse_other_model(name, _section(manifest.config, "model"), config.model, finetune=finetune)
    saved = _section(manifest.config, "optimizer") | _section(manifest.config, "training")
    now = asdict(config.optimizer) | asdict(config.training)
    names = (*SCHEDULE, *_decay_length(config.optimizer))
    differ = [f"{each} {saved[each]} there, {now[each]} here" for each in names if saved[each] != now[each]]
    if differ and config.checkpoint.require_same_schedule and not finetune:
        raise CheckpointError(
            f"{name} has other schedules: {'; '.join(differ)}. Give the checkpoint's settings, or leave out "
            "--require-same-schedule (--use-checkpoint-opt-param-scheduler)"
        )
    needs_states = config.checkpoint.load_optimizer and not finetune
    if needs_states and not any(key.startswith("optimizer.") for key in manifest.tensors):
        raise CheckpointError(
            f"{name} has only weights, no optimizer state to continue from; add --finetune, or --no-load-optim"
        )


def _refuse_other_model(path: Path | str, saved: Mapping[str, Any], model: ModelConfig, *, finetune: bool) -> None:
    free = free_settings(model.position_embedding_type, extends=finetune)
    if model.mtp_num_layers > saved["mtp_num_layers"]:
        free -= {"mtp_num_layers"}  # --finetune may leave such layers out, not add them
    differ = [
        f"{name} {saved.get(name)} there, {value} here"
        for name, value in asdict(model).items()
        if name not in free and saved.get(name) != value
    ]
    if differ:
        raise CheckpointError(
            f"{path} is of another model: {'; '.join(differ)}. Use the settings of the checkpoint (leave out those of the model), "
            "or another --load"
        )


def _describe(layout: dict[str, object]) -> str:
    axes = [(axis, layout[axis]) for axis in ("tp", "pp", "dp", "cp", "ep") if axis in layout]
    return ", ".join(f"{axis} {size}" for axis, size in axes if axis not in ("cp", "ep") or size != 1)


def load_states(replica: Replica, checkpoint: Checkpoint, *, with_optimizer: bool, log: Callable[[str], None]) -> None:
    """Load weights, main parameters and, if `with_optimizer`, the states of optimizer and strategy.

    States that the checkpoint does not have start from their defaults. States that differ between the checkpoint's
    replicas are averaged if this run has another number of replicas, or if its replicas share them. Both are logged."""
    if not with_optimizer:
        load_weights(replica, checkpoint)
        return
    notes: dict[str, None] = {}
    _load_parameters(replica, checkpoint)
    states = [state for state in optimizer_states(replica) if state.name != "main_param"] + replica.strategy.states()
    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(lambda state: _load_flat(replica, state, checkpoint), states):
            notes |= found
    for whole in tensor_states(replica):
        load_tensor(whole, checkpoint, notes)
    for matrix in matrix_states(replica):
        _require(replica, checkpoint, matrix.name, optimizer_key(matrix.name, matrix.spec.name))
        load_matrix(matrix, checkpoint, notes)
    for note in notes:
        log(f"{checkpoint.path} {note}")


def load_weights(replica: Replica, source: Source) -> None:
    """Load weights, main parameters, and states that are initialized with the parameters."""
    _load_parameters(replica, source)
    for state in (*replica.strategy.states(), *optimizer_states(replica)):
        if state.default == "parameter":
            _read_parameters(source, state.bucket, state.start, state.values)


def _load_parameters(replica: Replica, source: Source) -> None:
    for buffer in replica.buffers:
        source.read_into(buffer.data, weight_key(buffer.info.spec.name), buffer.info.spec.slice)
    threads = THREADS if isinstance(source, Checkpoint) else 1  # other formats read whole tensors: only one at a time
    with replica.strategy.main_in_memory(), ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda shard: _load_shard(replica, shard, source), replica.strategy.shards))


def _load_shard(replica: Replica, shard: OptimizerShard, source: Source) -> None:
    state = replica.strategy.weights(shard)
    for placed, _, _ in state.bucket.within(state.start, state.stop):
        spec = placed.parameter.info.spec
        key = weight_key(spec.name)
        entry = source.entry(key)
        if tuple(entry.global_shape) != tuple(spec.global_shape):
            stored, shape = list(entry.global_shape), list(spec.global_shape)
            raise CheckpointError(f"{source.path}: {key} is {stored}, but this run has {shape}")
        if TORCH_DTYPES[entry.dtype] != state.values.dtype:
            key = main_key(placed, source)
        _read_range(source, key, placed, state.start, state.values)
    if shard.is_copy:
        _read_parameters(source, shard.bucket, shard.start, shard.main)


def _read_parameters(source: Source, bucket: Bucket, first: int, target: torch.Tensor) -> None:
    """Read the most precise parameter values into `target`, the bucket's elements from `first` on."""
    for placed, _, _ in bucket.within(first, first + target.numel()):
        _read_range(source, main_key(placed, source), placed, first, target)


def _load_flat(replica: Replica, state: FlatState, checkpoint: Checkpoint) -> dict[str, None]:
    """Read one state, and return lines for the log."""
    notes: dict[str, None] = {}
    for placed, first, last in state.bucket.within(state.start, state.stop):
        key = optimizer_key(state.name, placed.parameter.info.spec.name)
        if checkpoint.has(key):
            _load_stored(replica, state, checkpoint, key, placed, notes)
        elif state.default == "parameter":
            _read_range(checkpoint, main_key(placed, checkpoint), placed, state.start, state.values)
            notes[f"has no {state.name} for this run: it starts from the parameters"] = None
        elif state.default == "zeros":
            state.values[first - state.start : last - state.start].zero_()
            notes[f"has no {state.name} for this run: it starts from 0"] = None
        else:
            _require(replica, checkpoint, state.name, key)
    return notes


def _require(replica: Replica, checkpoint: Checkpoint, state: str, key: str) -> None:
    wrote = _section(checkpoint.manifest.config, "optimizer")["optimizer"]
    if not checkpoint.has(key) and wrote != (ours := replica.config.optimizer.optimizer):
        raise CheckpointError(
            f"{checkpoint.path} was written with optimizer {wrote} and has no {state}, which {ours} needs; "
            f"use --optimizer {wrote}, or --finetune to start over from the weights"
        )
    checkpoint.entry(key)  # raises an error that lists similar keys if it is missing


def _load_stored(
    replica: Replica, state: FlatState, checkpoint: Checkpoint, key: str, placed: Placed, notes: dict[str, None]
) -> None:
    """Read a stored state: one for all replicas, or one for each replica in a leading dimension."""
    shape, dtype = placed.parameter.info.spec.global_shape, state.values.dtype
    entry = checkpoint.entry(key)
    stored, stored_dtype = tuple(entry.global_shape), TORCH_DTYPES[entry.dtype]
    floats = stored_dtype.is_floating_point and dtype.is_floating_point
    if floats and torch.finfo(stored_dtype).eps < torch.finfo(dtype).eps:
        notes[f"has {state.name} in {entry.dtype}, this run in {DTYPE_NAMES[dtype]}: it is rounded"] = None
    if stored == shape:
        _read_range(checkpoint, key, placed, state.start, state.values)
        return
    private = state.placement is Placement.PRIVATE
    if len(stored) != 1 + len(shape) or stored[1:] != shape:
        expected = ", or one of these for each replica" if private else ""
        raise CheckpointError(f"{checkpoint.path}: {key} is {list(stored)}, but this run has {list(shape)}{expected}")
    group, _ = replica.strategy.groups.weight_replicas(state.bucket.kind)
    if private and stored[0] == group.size:
        _read_range(checkpoint, key, placed, state.start, state.values, replica=group.rank)
        return
    has = f"this run has {group.size if private else 'one for all'}"
    notes[f"has {state.name} of {stored[0]} replicas, {has}: it takes their mean"] = None
    first, last = max(placed.start, state.start), min(placed.stop, state.stop)
    target = state.values[first - state.start : last - state.start]
    total = torch.zeros(target.shape, dtype=torch.float64, device=target.device)
    one = torch.empty_like(target)
    for index in range(stored[0]):
        _read_range(checkpoint, key, placed, first, one, replica=index)
        total += one
    target.copy_(total / stored[0])


def _read_range(
    checkpoint: Source, key: str, placed: Placed, first: int, target: torch.Tensor, *, replica: int | None = None
) -> None:
    """Read a parameter's elements into `target`, which contains a bucket's elements from `first` on. `replica`: index
    of the leading dimension, if the stored tensor has one over replicas."""
    for part, values in boxes_in(placed, target, first):
        if replica is None:
            checkpoint.read_into(values, key, part.slice)
        else:
            checkpoint.read_into(values.unsqueeze(0), key, ((replica, replica + 1), *part.slice))


def main_key(placed: Placed, checkpoint: Source) -> str:
    """Return the key of a parameter's most precise values."""
    name = placed.parameter.info.spec.name
    main = optimizer_key("main_param", name)
    return main if checkpoint.has(main) else weight_key(name)
