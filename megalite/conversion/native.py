"""Read weights from megalite's checkpoints of any layout, and write converted weights as a checkpoint."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml

from megalite import __version__
from megalite.checkpoint.files import FileEntry
from megalite.checkpoint.folders import LATEST_NAME, candidates, step_name, step_of
from megalite.checkpoint.load import Checkpoint, find_checkpoint
from megalite.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    Part,
    Slice,
    TensorEntry,
    file_key,
    flat_boxes,
    optimizer_key,
    weight_key,
)
from megalite.checkpoint.safetensors_file import DTYPE_NAMES, TORCH_DTYPES
from megalite.checkpoint.save import code_version
from megalite.config.data import DataConfig, local_path
from megalite.config.errors import CheckpointError, ConfigError
from megalite.config.files import CONFIG_NAME, level_from_text
from megalite.config.merge import merge
from megalite.config.optimizer import EMA
from megalite.config.run import RunConfig
from megalite.config.training import TrainingConfig
from megalite.config.validate import validate
from megalite.conversion.huggingface.config_json import read_json
from megalite.conversion.model_folder import (
    GENERATION,
    TOKENIZER_SETTINGS,
    has_tokenizer,
    missing_tokenizer,
    named_tokenizer_files,
    open_tokenizer,
    saved_tokenizer_files,
    tokenizer_of,
    tokenizer_settings,
)
from megalite.conversion.output import (
    DEFAULT_FILE_BYTES,
    Advance,
    Log,
    Output,
    Target,
    identity_of,
    silent,
    split_files,
    write_file,
)
from megalite.conversion.weights import (
    ConversionError,
    LastRead,
    Read,
    Training,
    WeightPiece,
    Weights,
    Wrapped,
    first_rows,
    innermost,
    parameter_shapes,
)
from megalite.models.shapes import WORD, buffer_shapes
from megalite.tokenizers.build import TIKTOKEN
from megalite.topology.group import Group
from megalite.topology.layout import ParallelLayout

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
"""Dtypes of weights -> their names in --dtype and --precision."""
DTYPES = {name: dtype for dtype, name in PRECISIONS.items()}

TOKENIZER_FOLDER = "tokenizer"
_CPU = torch.device("cpu")


class NativeWeights(Weights):
    """The weights of a verified megalite checkpoint. If the checkpoint has main parameters (of a bf16 or fp16 run),
    they are read instead of the rounded weights.

    `folder`: a folder of checkpoints, one of them, or an open checkpoint. `step`: step to read from a folder of
    checkpoints; default: the newest, without fallback to an older one. `main`: read main parameters. `ema`: read the
    moving average of the weights instead."""

    format = "megalite"

    def __init__(
        self, folder: Path | Checkpoint, *, step: int | None = None, main: bool = True, ema: bool = False
    ) -> None:
        self._checkpoint = folder if isinstance(folder, Checkpoint) else _open(folder, step)
        self.kind = "ema" if ema else "trained"
        self.path = self._checkpoint.path
        config = saved_config(self._checkpoint)
        self.model = config.model
        self.seq_length = config.training.seq_length
        self._data = config.data
        has_pattern = config.data.tiktoken_pattern is not None
        self.tokenizer_hints = DataConfig(
            tokenizer_type=TIKTOKEN if has_pattern else config.data.tokenizer_type,
            tiktoken_pattern=config.data.tiktoken_pattern,
        )
        self.recorded_tokenizer: str | None = self._checkpoint.manifest.tokenizer
        self.missing_tokenizer: str | None = missing_tokenizer(config.data, self.path.parent)
        self.layout = dict(self._checkpoint.manifest.layout)
        self._keys: dict[str, str] = {}
        for name, shape in parameter_shapes(self.model).items():
            key = key_of(self._checkpoint, name, ema=ema) if main or ema else weight_key(name)
            entry = self._checkpoint.entry(key)
            if entry.global_shape != shape.shape:
                found, expected = list(entry.global_shape), list(shape.shape)
                raise ConversionError(f"{self.path}: {name} has shape {found}; a model of its settings has {expected}")
            self._keys[name] = key
        others = sorted({key.partition(":")[2] for key in self._checkpoint.manifest.tensors} - self._keys.keys())
        if others:
            raise ConversionError(f"{self.path} contains {others[0]}, which a model of its settings does not have")

    @cached_property
    def tokenizer_files(self) -> Sequence[Path]:  # type: ignore[override]
        """See `Weights`. Checked on first access, so that a damaged tokenizer can be left out of a conversion."""
        files = saved_tokenizer_files(self._data, self.path.parent)
        if files and self.recorded_tokenizer is not None:
            tokenizer = open_tokenizer(files, self.tokenizer_hints, self.model.vocab_size)
            if tokenizer is not None and tokenizer.fingerprint() != self.recorded_tokenizer:
                raise ConversionError(
                    f"{', '.join(map(str, files))}: not the tokenizer that {self.path} was trained with (sha256 "
                    f"{self.recorded_tokenizer[:12]}...); give that one with --tokenizer-model, or use --without-tokenizer"
                )
        return files

    @cached_property
    def generation(self) -> Mapping[str, Any]:  # type: ignore[override]
        folder = self.path.parent / TOKENIZER_FOLDER
        return (read_json(folder, GENERATION) or {}) if folder.is_dir() else {}

    def dtype(self, name: str) -> torch.dtype:
        return TORCH_DTYPES[self._checkpoint.entry(self._keys[name]).dtype]

    def read(self, name: str, part: Slice | None = None) -> torch.Tensor:
        """See `Weights`. `part`: slice to read; None for all."""
        return self._checkpoint.read(self._keys[name], part, device=_CPU)

    def elements(self, piece: WeightPiece) -> tuple[tuple[int, ...], Read]:
        """See `Weights`."""
        name = piece.parameter
        shape = self._checkpoint.entry(self._keys[name]).global_shape

        def read(start: int, count: int, room: torch.Tensor | None = None) -> torch.Tensor:
            parts = [self.read(name, box).view(-1) for box in flat_boxes(shape, start, start + count)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return shape, read


def key_of(checkpoint: Checkpoint, name: str, *, ema: bool) -> str:
    """Return the key of a tensor in its highest stored precision or, with `ema`, of its moving average. Buffers have
    neither main parameters nor averages; their weight key is returned.

    Raises:
        ConversionError: the run kept no average."""
    if ema and not checkpoint.has(optimizer_key(EMA, WORD)):
        raise ConversionError(
            f"{checkpoint.path} has no moving average of the weights: its run had no --ema-decay; use --weights trained"
        )
    states = (EMA, "main_param") if ema else ("main_param",)
    keys = (optimizer_key(state, name) for state in states)
    return next(filter(checkpoint.has, keys), weight_key(name))


def chosen_step(folder: Path, step: int | None, flag: str) -> tuple[Path, int | None]:
    """Return the folder of checkpoints and the requested step. `folder` may be one checkpoint. `flag` sets the step."""
    own = step_of(folder.absolute().name)
    if own is None or not (folder / MANIFEST_NAME).exists():
        return folder, step
    if step not in (None, own):
        raise ConversionError(f"{folder} is the checkpoint of step {own}, and {flag} is {step}; leave out {flag}")
    return folder.absolute().parent, own


def _open(folder: Path, step: int | None) -> Checkpoint:
    folder, step = chosen_step(folder, step, "--step")
    steps = sorted({candidate.step for candidate in candidates(folder, step)})
    try:
        world = Group.solo("world")
        return find_checkpoint(folder, step=steps[-1], world=world, log=lambda line: None)
    except CheckpointError as error:
        older = f"; --step {steps[-2]} takes the previous one" if len(steps) > 1 else ""
        raise CheckpointError(f"{error}{older}") from None


def saved_config(checkpoint: Checkpoint) -> RunConfig:
    """Return a checkpoint's settings of model, sequence length and tokenizer, validated."""
    source = f"{checkpoint.path}/{MANIFEST_NAME}"
    wanted = {"model": None, "training": ("seq_length",), "data": TOKENIZER_SETTINGS}
    tree = {}
    for section, names in wanted.items():
        values = checkpoint.manifest.config.get(section)
        if not isinstance(values, dict):
            raise ConversionError(f"{source}: config has no section {section}")
        tree[section] = values if names is None else {name: values[name] for name in names if name in values}
    return validate(merge([level_from_text(json.dumps(tree), source)]).config, 1)


def write_native(
    weights: Weights,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    advance: Advance = silent,
    log: Log = silent,
) -> Path:
    """Write a folder of checkpoints that contains one, and return the folder. The checkpoint has step 0 and only
    weights, unless `weights` were opened with their `training`. Beside it are `config.yaml` (the model's settings, for
    `--config`) and `tokenizer/`."""
    folder = Path(local_path(str(folder))).resolve()
    training: Training | None = getattr(innermost(weights), "training", None)
    model, shapes = weights.model, parameter_shapes(weights.model)
    dtypes = {weight_key(name): dtype or weights.dtype(name) for name in shapes}
    if training is not None:
        weights = _WithStates(weights, training)
        buffers = {shape.name for shape in buffer_shapes(model, 0, model.num_layers)}
        trained = [name for name in shapes if name not in buffers]
        dtypes |= {optimizer_key(state, name): torch.float32 for name in trained for state in training.states}
    keys = {file_key(key): key for key in dtypes}
    targets = []
    for name, key in keys.items():
        shape = shapes[key.partition(":")[2]].shape
        targets.append(Target(WeightPiece(name, name, shape, first_rows(shape[0])), dtypes[key]))
    files = weights.tokenizer_files
    named = named_tokenizer_files(files) if has_tokenizer(files) else {}
    data = tokenizer_settings(named, weights.tokenizer_hints, folder / TOKENIZER_FOLDER)
    config = _run_config(weights, targets, data, training)
    fingerprint = _fitting_tokenizer(weights)
    options = {"dtype": dtype, "max_file_bytes": max_file_bytes, "states": sorted(training.states) if training else []}
    identity = identity_of(weights, writer="native", folder=folder, **options)
    at = training.step if training else 0
    parts, step, kept = split_files(targets, max_file_bytes), step_name(at), LastRead(weights)
    names = [f"weights-{number:05d}.safetensors" for number in range(len(parts))]
    output = Output(folder, identity=identity, files=[f"{step}/{name}" for name in names], log=log)
    entries: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    for name, part in zip(names, parts, strict=True):
        entries[name] = write_file(output, f"{step}/{name}", part, kept, advance, digest=True)
        for target in part:
            key, shape = keys[target.key], target.piece.shape
            whole = Part(name, tuple((0, size) for size in shape))
            tensors[key] = TensorEntry(key.partition(":")[2], DTYPE_NAMES[target.dtype], shape, (whole,))
    for name, path in named.items():
        output.write(f"{TOKENIZER_FOLDER}/{name}", path.read_bytes())
    if weights.generation and GENERATION not in named:
        text = json.dumps(dict(weights.generation), indent=2, ensure_ascii=False)
        output.write(f"{TOKENIZER_FOLDER}/{GENERATION}", text.encode())
    manifest = Manifest(
        step=at,
        files=entries,
        tensors=tensors,
        counters=dict(training.counters) if training else _INITIAL_COUNTERS,
        config=_sections(config, training),
        layout=asdict(ParallelLayout()),
        megalite_version=__version__,
        code=code_version(),
        tokenizer=fingerprint,
    )
    output.write(f"{step}/{MANIFEST_NAME}", manifest.to_json().encode())
    output.write(LATEST_NAME, f"{step}\n".encode())
    output.write(CONFIG_NAME, _model_yaml(config).encode())
    return output.commit()


_INITIAL_COUNTERS = {"step": 0, "consumed_samples": 0, "optimizer_updates": 0, "loss_scaler": {}}


class _WithStates(Wrapped):
    """Weights that also read optimizer states, by their keys in a safetensors file."""

    def __init__(self, inner: Weights, training: Training) -> None:
        super().__init__(inner)
        self._states = training.states

    def read(self, name: str) -> torch.Tensor:
        state, slash, parameter = name.partition("/")
        return self._states[state](parameter) if slash else self.inner.read(name)


def _sections(config: RunConfig, training: Training | None) -> dict[str, Any]:
    """Return the manifest's settings: those of the model, and the known ones of the run."""
    sections = asdict(config)
    for name, values in (training.config if training else {}).items():
        sections[name] = sections[name] | values
    return sections


def _run_config(
    weights: Weights, targets: Sequence[Target], data: DataConfig, run: Training | None = None
) -> RunConfig:
    """Return the config of a run of this model. Its precision is the run's or, without a run, that of most elements."""
    elements = dict.fromkeys(PRECISIONS, 0)
    for target in targets:
        if target.dtype not in elements:
            known = ", ".join(PRECISIONS.values())
            raise ConversionError(f"{weights.path}: {target.key} is {target.dtype}; give --dtype, one of {known}")
        elements[target.dtype] += target.record.nbytes // target.dtype.itemsize
    precision = PRECISIONS[max(elements, key=lambda kind: elements[kind])]
    if run is not None:
        precision = run.config["training"]["precision"]
    training = TrainingConfig(seq_length=weights.seq_length, precision=precision)
    return validate(RunConfig(model=weights.model, training=training, data=data), 1)


def _fitting_tokenizer(weights: Weights) -> str | None:
    """Return the tokenizer's fingerprint, or None without a tokenizer. Reject ids beyond the vocabulary."""
    try:
        tokenizer = tokenizer_of(weights)
    except ConfigError as error:
        raise ConversionError(f"{error}; or leave the tokenizer out with --without-tokenizer") from None
    if tokenizer is None:
        return None
    size = weights.model.vocab_size
    assert size is not None
    if tokenizer.vocab_size > size:
        shown = weights.tokenizer_files[0] if weights.tokenizer_files else tokenizer.name
        raise ConversionError(f"{shown} has {tokenizer.vocab_size} ids, the model {size}; use --without-tokenizer")
    return tokenizer.fingerprint()


def _model_yaml(config: RunConfig) -> str:
    """Return the config file for training from these weights in any layout."""
    defaults, data = asdict(DataConfig()), asdict(config.data)
    training = {"seq_length": config.training.seq_length, "precision": config.training.precision}
    tree = {"model": asdict(config.model), "training": training}
    changed = {name: value for name, value in data.items() if value != defaults[name]}
    return yaml.safe_dump({**tree, **({"data": changed} if changed else {})}, sort_keys=False)
