"""Open a model on disk in any supported format, or load it onto the ranks of a topology without converting it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from megalite.checkpoint.folders import TRACKER_NAME, candidates, step_of
from megalite.checkpoint.load import find_checkpoint
from megalite.checkpoint.manifest import MANIFEST_NAME, CheckpointMissing
from megalite.config.data import DataConfig
from megalite.config.errors import CheckpointError, ConfigError
from megalite.config.model import ModelConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.run import RunConfig
from megalite.config.training import TrainingConfig
from megalite.config.validate import validate
from megalite.conversion.huggingface.config_json import read_json
from megalite.conversion.huggingface.weights import HuggingFaceWeights, token_id
from megalite.conversion.megatron.dist import MegatronDistWeights
from megalite.conversion.megatron.read import MegatronWeights, is_dist, step_folder
from megalite.conversion.megatron.run import MegatronRun
from megalite.conversion.model_folder import GENERATION, tokenizer_of
from megalite.conversion.native import NativeWeights, chosen_step
from megalite.conversion.weights import ConversionError, Format, Weights
from megalite.models.gpt import GPTStage
from megalite.models.shapes import WORD
from megalite.partition.stages import cut_stages
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.build import build_tokenizer, is_tiktoken_model
from megalite.topology.topology import Topology

T = TypeVar("T")
Source = NativeWeights | HuggingFaceWeights  # formats that can be read slice by slice, per rank


def open_weights(
    path: Path,
    *,
    format: Format | None = None,
    step: int | None = None,
    with_optimizer: bool = False,
    ema: bool = False,
) -> Weights:
    """Open the model at `path`. `with_optimizer`: also its training state. `ema`: the moving average of the weights."""
    format = format or detect_format(path)
    if ema and format != "native":
        raise ConversionError(f"--weights ema has no effect on {path}, a {format} folder, which has one set of weights")
    if with_optimizer:
        folder = step_folder(path, step) if format == "megatron" else None
        if folder is None or not is_dist(folder):
            what = "in the torch format" if folder else f"a {format} folder"
            raise ConversionError(
                f"--with-optimizer reads Megatron-LM's torch_dist format, and {folder or path} is {what}; leave it out, or "
                "save with --ckpt-format torch_dist"
            )
        return MegatronRun(folder)
    if format == "native":
        return NativeWeights(path, step=step, ema=ema)
    if format == "megatron":
        return open_megatron(path, iteration=step)
    if step is not None:
        raise ConversionError(f"--step {step} has no effect on {path}: a Hugging Face folder contains one model")
    return HuggingFaceWeights(path)


def open_megatron(folder: Path, *, iteration: int | None = None) -> Weights:
    step = step_folder(folder, iteration)
    return MegatronDistWeights(step) if is_dist(step) else MegatronWeights(step)


def detect_format(path: Path) -> Format:
    if not path.is_dir():
        what = "is a file; give its folder" if path.exists() else "does not exist"
        raise ConversionError(f"{path} {what}")
    names = {entry.name for entry in path.iterdir()}
    fitting: list[Format] = []
    if MANIFEST_NAME in names or any(step_of(name) is not None for name in names):
        fitting.append("native")
    # A native folder may contain tokenizer files, but not these.
    if "config.json" in names or any(name.endswith(".safetensors.index.json") for name in names):
        fitting.append("huggingface")
    if names & {TRACKER_NAME, ".metadata", "common.pt"} or any(n.startswith(("iter_", "mp_rank_")) for n in names):
        fitting.append("megatron")
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ConversionError(f"{path} could be of {' or '.join(fitting)}; choose one with --from {fitting[0]}")
    try:
        candidates(path)
    except CheckpointMissing:
        pass
    except CheckpointError as error:  # for example: the checkpoints are one level below
        raise ConversionError(str(error)) from None
    shown = ", ".join(sorted(names)[:5]) or "nothing"
    raise ConversionError(
        f"{path} is no model of a known format: there is no step-* folder or {MANIFEST_NAME} (native), no config.json "
        f"(huggingface), no {TRACKER_NAME}, iter_* or mp_rank_* (megatron); it contains {shown}"
    )


def tokenizer_for(weights: Source, choice: DataConfig) -> Tokenizer:
    """Return the tokenizer of the settings `choice`, or else the model's own. Raises ConfigError: there is none, it
    differs from the checkpoint's, or it has ids beyond the vocabulary."""
    native, size = weights if isinstance(weights, NativeWeights) else None, weights.model.vocab_size
    if choice.tokenizer_model is not None:
        pattern, hint = choice.tiktoken_pattern, weights.tokenizer_hints.tiktoken_pattern
        if pattern is None and hint is not None and is_tiktoken_model(choice.tokenizer_model):
            pattern = hint
        found = build_tokenizer(replace(choice, tiktoken_pattern=pattern), size)
    elif native is not None and native.missing_tokenizer is not None:
        raise ConfigError(f"the tokenizer of {native.path} {native.missing_tokenizer}; give --tokenizer-model FILE")
    else:
        found = tokenizer_of(weights)
    if found is None:
        what = "was trained without a tokenizer" if native is not None else "has no tokenizer"
        raise ConfigError(f"{weights.path} {what}; give one with --tokenizer-model")
    if native is not None and native.recorded_tokenizer not in (None, found.fingerprint()):
        raise ConfigError(
            f"{choice.tokenizer_model} is not the tokenizer that {weights.path} was trained with; give that one with "
            "--tokenizer-model"
        )
    if size is not None and found.vocab_size > size:
        raise ConfigError(
            f"the tokenizer ({found.name}) has {found.vocab_size} ids, but the vocab_size of {weights.path} is {size}; "
            "give the model's own with --tokenizer-model"
        )
    return found


def stop_token_ids(weights: Source, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the tokens that end a text: the tokenizer's end of document and, for a Hugging Face model, the eos_token_id
    of generation_config.json or else of config.json, as in transformers."""
    eod = frozenset(() if tokenizer is None else (tokenizer.eod,))
    if not isinstance(weights, HuggingFaceWeights):
        return eod
    generation = read_json(weights.path, GENERATION) or {}
    where, named = weights.path / "config.json", weights.token_ids.get("eos_token_id")
    if generation.get("eos_token_id") is not None:
        where, named = weights.path / GENERATION, generation["eos_token_id"]
    ids = token_id(named, "eos_token_id", where)
    return eod | frozenset([] if ids is None else ids if isinstance(ids, list) else [ids])


@dataclass(frozen=True, kw_only=True, eq=False)
class InferenceModel:
    """One rank's part of a model for inference, and its tokenizer."""

    path: Path  # source checkpoint or folder
    model: ModelConfig
    seq_length: int  # maximum sequence length of the model
    stage: GPTStage
    tokenizer: Tokenizer | None
    tokenizer_sha256: str | None  # of the training tokenizer, if the checkpoint records it
    stop_token_ids: frozenset[int]  # tokens that end a text
    is_huggingface: bool


def open_model(
    folder: Path,
    *,
    step: int | None,
    dtype: torch.dtype | None,
    ema: bool = False,
    topology: Topology,
    log: Callable[[str], None],
) -> Source:
    """Open the weights in `folder` and check them without reading tensors. All ranks return or raise the same.
    `folder`: a folder of checkpoints (opens the newest that verifies, or that of `step`), one checkpoint, or a Hugging
    Face model. `dtype`: the caller's dtype; unless None or the weights', main parameters are read. `ema`: read the
    moving average. `log`: see `find_checkpoint`.

    Collectives: gathers over the world."""

    def open_huggingface() -> HuggingFaceWeights | None:
        # The checkpoint reader's error for a missing folder suggests similar names.
        kind = detect_format(folder) if folder.is_dir() else "native"
        if kind == "megatron":
            raise ConversionError(
                f"{folder} is a Megatron-LM checkpoint; run megalite convert {folder} NEW --to native"
            )
        if kind == "native":
            return None
        if step is not None:
            raise ConversionError(f"--ckpt-step {step} has no effect on {folder}, a Hugging Face folder; leave it out")
        if ema:
            raise ConversionError(f"--weights ema has no effect on {folder}, a Hugging Face folder; leave it out")
        return HuggingFaceWeights(folder)

    weights = _agreed(open_huggingface, folder, topology)
    if weights is not None:
        return weights
    folder, step = chosen_step(folder, step, "--ckpt-step")
    found = find_checkpoint(folder, step=step, world=topology.world, log=log)
    native = NativeWeights(found, main=False, ema=ema)
    return native if dtype in (None, native.dtype(WORD)) else NativeWeights(found, ema=ema)


def _agreed(work: Callable[[], T], folder: Path, topology: Topology) -> T:
    """Return the result of `work`. An error on any rank is raised on all."""
    with topology.world.errors_on_all_ranks():
        try:
            return work()
        except OSError as error:
            raise ConversionError(f"cannot read {folder}: {error}") from None


def run_of(model: ModelConfig, seq_length: int, *, tp: int = 1, pp: int = 1) -> RunConfig:
    """Return the config of a run with this model and layout, without its MTP layers."""
    training, parallel = TrainingConfig(seq_length=seq_length), ParallelConfig(tp=tp, pp=pp)
    return RunConfig(model=replace(model, mtp_num_layers=0), training=training, parallel=parallel)


def build_stage(model: ModelConfig, seq_length: int, topology: Topology, dtype: torch.dtype) -> GPTStage:
    """Build this rank's layers, with uninitialized parameters. The stages are those of training."""
    config = run_of(model, seq_length)
    part = cut_stages(config, range(topology.pp.size))[topology.pp.rank]
    factory = ParameterFactory(
        tp=topology.tp,
        tp_cp=topology.tp_cp,
        ep=topology.ep,
        expert_tp=topology.expert_tp,
        seed=0,
        dtype=dtype,
        device=topology.device,
        blank=True,
    )
    return GPTStage(config.model, part, factory=factory, seq_length=seq_length)


def load_model(
    folder: Path | str,
    topology: Topology,
    *,
    step: int | None = None,
    ema: bool = False,
    dtype: torch.dtype | None = None,
    tokenizer: DataConfig | None = None,
    needs_tokenizer: bool = True,
    log: Callable[[str], None],
) -> InferenceModel:
    """Load a model onto the ranks of `topology`, which has cp 1 and ep 1. Each rank reads only its slices. `folder,
    step, ema, log`: see `open_model`. `dtype`: dtype of parameters and activations; None: the stored one. `tokenizer`:
    settings of a tokenizer to use instead of the model's own. `needs_tokenizer`: if False, load no tokenizer; then no
    token ends a text.

    Collectives: gathers over the world."""
    folder, layout = Path(folder), topology.layout
    assert (layout.cp, layout.ep) == (1, 1), layout
    choice = tokenizer or DataConfig()
    if choice.tiktoken_pattern is not None and choice.tokenizer_model is None:
        raise ConfigError(f"--tiktoken-pattern {choice.tiktoken_pattern} has no effect without --tokenizer-model")
    weights = open_model(folder, step=step, dtype=dtype, ema=ema, topology=topology, log=log)
    try:
        validate(run_of(weights.model, weights.seq_length, tp=layout.tp, pp=layout.pp), layout.tp * layout.pp)
    except ConfigError as error:
        raise ConfigError(f"tp {layout.tp}, pp {layout.pp} is no layout for {weights.path}: {error}") from None

    def read() -> tuple[GPTStage, Tokenizer | None]:
        found = tokenizer_for(weights, choice) if needs_tokenizer else None
        stage = build_stage(weights.model, weights.seq_length, topology, dtype or weights.dtype(WORD))
        for parameter in stage.requires_grad_(False).parameters():
            assert isinstance(parameter, ShardedParameter)
            parameter.data.copy_(weights.read(parameter.info.spec.name, parameter.info.spec.slice))
        return stage, found

    stage, found = _agreed(read, folder, topology)
    return InferenceModel(
        path=weights.path,
        model=weights.model,
        seq_length=weights.seq_length,
        stage=stage.eval(),
        tokenizer=found,
        tokenizer_sha256=weights.recorded_tokenizer if isinstance(weights, NativeWeights) else None,
        stop_token_ids=stop_token_ids(weights, found) if needs_tokenizer else frozenset(),
        is_huggingface=weights.format == "huggingface",
    )
