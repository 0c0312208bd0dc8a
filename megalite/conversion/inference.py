"""A trained model, of a checkpoint or a Hugging Face folder, on the ranks of a topology; nothing is converted on disk."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from megalite.checkpoint.folders import step_of
from megalite.checkpoint.load import Checkpoint, find_checkpoint
from megalite.checkpoint.manifest import MANIFEST_NAME, weight_key
from megalite.checkpoint.safetensors_file import TORCH_DTYPES
from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.config.model import ModelConfig
from megalite.config.rules.rule import shares_of_heads, whole_shares
from megalite.config.run import RunConfig
from megalite.config.training import TrainingConfig
from megalite.conversion.huggingface.config_json import read_json
from megalite.conversion.huggingface.weights import HuggingFaceWeights
from megalite.conversion.native import key_of, saved_config
from megalite.conversion.open import detect_format
from megalite.conversion.tokenizer_files import GENERATION, missing_tokenizer, tokenizer_as_it_is_now, tokenizer_of
from megalite.conversion.weights import ConversionError
from megalite.models.gpt import GPTStage
from megalite.partition.stages import cut_stages
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.build import build_tokenizer, is_tiktoken_model
from megalite.topology.topology import Topology

T = TypeVar("T")


@dataclass(frozen=True)
class TokenizerChoice:
    """What the user says of the tokenizer."""

    model: str | None = None  # its file or folder; None: the model's own
    tiktoken_pattern: str | None = None  # how that one, of tiktoken, cuts words

    def __post_init__(self) -> None:
        if self.tiktoken_pattern is not None and self.model is None:
            raise ConfigError(f"--tiktoken-pattern {self.tiktoken_pattern} has no effect without --tokenizer-model")


def checkpoint_tokenizer(checkpoint: Checkpoint, choice: TokenizerChoice) -> Tokenizer | None:
    home = checkpoint.path.parent
    data = DataConfig(**checkpoint.manifest.config["data"])
    if choice.model is not None:
        pattern = choice.tiktoken_pattern
        if pattern is None and data.tiktoken_pattern is not None and is_tiktoken_model(choice.model):
            pattern = data.tiktoken_pattern
        data = DataConfig(tokenizer_model=choice.model, tiktoken_pattern=pattern)
    else:
        missing = missing_tokenizer(data, home)
        if missing is not None:
            raise ConfigError(f"the tokenizer of {checkpoint.path} {missing}; give --tokenizer-model FILE")
        data = tokenizer_as_it_is_now(data, home)
    tokenizer = build_tokenizer(data, checkpoint.manifest.config["model"]["vocab_size"])
    if tokenizer is None:
        raise ConfigError(f"{checkpoint.path} was trained without a tokenizer; give one with --tokenizer-model")
    if checkpoint.manifest.tokenizer not in (None, tokenizer.fingerprint()):
        raise ConfigError(
            f"{data.tokenizer_model or data.vocab_file} is not the tokenizer that {checkpoint.path} was trained with; "
            "give that one with --tokenizer-model"
        )
    return tokenizer


def folder_tokenizer(weights: HuggingFaceWeights, choice: TokenizerChoice) -> Tokenizer | None:
    if choice.model is None:
        return tokenizer_of(weights)
    data = DataConfig(tokenizer_model=choice.model, tiktoken_pattern=choice.tiktoken_pattern)
    return build_tokenizer(data, weights.model.vocab_size)


def folder_end_ids(weights: HuggingFaceWeights, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Tokens that end a text where transformers generates: the eos_token_id of generation_config.json, else that of
    config.json; and the tokenizer's end of document."""
    generation = read_json(weights.path, GENERATION) or {}
    where, named = weights.path / "config.json", weights.token_ids.get("eos_token_id")
    if generation.get("eos_token_id") is not None:
        where, named = weights.path / GENERATION, generation["eos_token_id"]
    ids = [] if named is None else named if isinstance(named, list) else [named]
    if not all(type(token) is int for token in ids):
        raise ConversionError(f"{where}: eos_token_id is {str(named)[:60]!r}; it must be a number, several, or null")
    return frozenset([*ids, *(() if tokenizer is None else (tokenizer.eod,))])


@dataclass(frozen=True, kw_only=True, eq=False)
class InferenceModel:
    """One rank's part of a model that is not trained any more, and what its text is made of."""

    path: Path  # the checkpoint or folder that it was read from
    model: ModelConfig
    seq_length: int  # longest sequence that it was made for
    stage: GPTStage
    tokenizer: Tokenizer | None
    end_ids: frozenset[int]  # tokens that end a text
    is_huggingface: bool


class _FromCheckpoint:
    """A checkpoint of ours, written by any layout. Only the bytes of the rank's slices are read."""

    def __init__(self, checkpoint: Checkpoint, *, ema: bool) -> None:
        config = saved_config(checkpoint)
        self._checkpoint, self._ema = checkpoint, ema
        self.path, self.model, self.seq_length = checkpoint.path, config.model, config.training.seq_length
        self.dtype = TORCH_DTYPES[checkpoint.entry(weight_key("embedding.word.weight")).dtype]

    def fill(self, parameter: ShardedParameter) -> None:
        """Read this rank's slice, rounded to the parameter's type; main parameters (of bf16, fp16) have more digits."""
        spec = parameter.info.spec
        entry = self._checkpoint.entry(key := weight_key(spec.name))
        if entry.global_shape != spec.global_shape:
            raise ConversionError(f"{self.path}: {spec.name} is {entry.global_shape}, not {spec.global_shape}")
        if self._ema or TORCH_DTYPES[entry.dtype] != parameter.dtype:
            key = key_of(self._checkpoint, spec.name, ema=self._ema)
        self._checkpoint.read_into(parameter.data, key, spec.slice)

    def tokenizer(self, choice: TokenizerChoice) -> Tokenizer | None:
        return checkpoint_tokenizer(self._checkpoint, choice)

    def end_ids(self, tokenizer: Tokenizer | None) -> frozenset[int]:
        return frozenset(() if tokenizer is None else (tokenizer.eod,))


class _FromFolder:
    """A Hugging Face folder. Each rank reads whole tensors, one at a time, and keeps its slices."""

    def __init__(self, weights: HuggingFaceWeights) -> None:
        self._weights = weights
        self.path, self.model, self.seq_length = weights.path, weights.model, weights.seq_length
        self.dtype = weights.dtype("embedding.word.weight")

    def fill(self, parameter: ShardedParameter) -> None:
        spec = parameter.info.spec
        whole = self._weights.read(spec.name)
        parameter.data.copy_(whole[tuple(slice(*bounds) for bounds in spec.slice)])

    def tokenizer(self, choice: TokenizerChoice) -> Tokenizer | None:
        return folder_tokenizer(self._weights, choice)

    def end_ids(self, tokenizer: Tokenizer | None) -> frozenset[int]:
        return folder_end_ids(self._weights, tokenizer)


Source = _FromCheckpoint | _FromFolder  # where the weights come from; the same on every rank


def open_source(
    folder: Path, *, step: int | None, ema: bool = False, topology: Topology, log: Callable[[str], None]
) -> Source:
    """Find the weights in `folder`, and check what can be checked before they are read. `folder`: of checkpoints (the
    newest that verifies is taken, or that of `step`), one checkpoint, or a Hugging Face model. `ema`: the
    moving average of the weights. `log`: as in `find_checkpoint`.

    Collectives: gathers over the world."""

    def look() -> _FromFolder | None:
        # Of a folder that is not there the checkpoints' reader says what is there instead.
        kind = detect_format(folder) if folder.is_dir() else "native"
        if kind == "megatron":
            raise ConversionError(f"{folder} is Megatron-LM's; run megalite convert {folder} NEW --to native")
        if kind == "native":
            return None
        if step is not None:
            raise ConversionError(f"--ckpt-step {step} has no effect on {folder} of Hugging Face; leave it out")
        if ema:
            raise ConversionError(f"--weights ema has no effect on {folder} of Hugging Face; leave it out")
        return _FromFolder(HuggingFaceWeights(folder))

    source = _agreed(look, folder, topology)
    if source is not None:
        return source
    own = step_of(folder.absolute().name)
    if own is not None and (folder / MANIFEST_NAME).exists():
        if step not in (None, own):
            raise ConversionError(f"--ckpt-step {step} contradicts {folder}; leave it out")
        folder, step = folder.absolute().parent, own
    found_one = find_checkpoint(folder, step=step, world=topology.world, device=topology.device, log=log)
    return _FromCheckpoint(found_one, ema=ema)


def _agreed(work: Callable[[], T], folder: Path, topology: Topology) -> T:
    """What `work` returns; what it raises on some rank is raised on all."""
    found: list[T] = []
    error: ConfigError | None = None
    try:
        found.append(work())
    except (ConfigError, OSError) as fault:
        error = fault if isinstance(fault, ConfigError) else ConversionError(f"cannot read {folder}: {fault}")
    topology.world.agree(error, topology.device)
    return found[0]


def check_layout(model: ModelConfig, *, tp: int, pp: int) -> None:
    """tp must divide what it splits, and every pipeline stage needs a layer."""
    widths = {"num_attention_heads": model.num_attention_heads, "the padded vocabulary": model.padded_vocab_size}
    layers = [model.is_moe_layer(index) for index in range(model.num_layers)]
    if not all(layers):
        widths["ffn_hidden_size"] = model.ffn_size
    if any(layers):
        widths["the width of an expert"] = model.expert_ffn_size
        if model.moe_shared_expert_intermediate_size is not None:
            widths["the width of the shared expert"] = model.moe_shared_expert_intermediate_size
    works = shares_of_heads(model.query_groups, *widths.values())
    for name, size in widths.items():
        if size % tp:
            raise ConfigError(f"{name} {size} is not divisible by tp {tp}; use tp {works}")
    if not whole_shares(model.query_groups, tp):
        raise ConfigError(
            f"num_query_groups {model.query_groups} is neither a multiple nor a divisor of tp {tp}; use tp {works}"
        )
    if 2 * model.query_groups * model.head_size % tp:
        raise ConfigError(f"the keys and values are not divisible by tp {tp}; use tp {model.query_groups}")
    if pp > model.num_layers:
        raise ConfigError(f"pp {pp} is more than the model's layers; use --pp up to {model.num_layers}")


def build_stage(source: Source, topology: Topology, dtype: torch.dtype) -> GPTStage:
    """The layers of this rank, cut as training cuts them, without values; those that predict further tokens have no part in
    it."""
    model = replace(source.model, mtp_num_layers=0)
    config = RunConfig(model=model, training=TrainingConfig(seq_length=source.seq_length))
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
    return GPTStage(
        model,
        first_layer=part.first_layer,
        last_layer=part.last_layer,
        has_embedding=part.has_embedding,
        has_head=part.has_head,
        factory=factory,
        seq_length=source.seq_length,
    )


def load_model(
    folder: Path,
    topology: Topology,
    *,
    step: int | None = None,
    ema: bool = False,
    dtype: torch.dtype | None = None,
    tokenizer: TokenizerChoice | None = None,
    needs_tokenizer: bool = True,
    log: Callable[[str], None],
) -> InferenceModel:
    """A model on the ranks of `topology`, which has neither cp nor ep: each rank reads what it holds. `folder, step,
    ema, log`: see `open_source`. `dtype`: of parameters and activations; None: the type that the weights are stored in.
    `tokenizer`: another than its own. `needs_tokenizer`: False: leave the tokenizer alone; nothing ends a text then.

    Collectives: gathers over the world."""
    layout = topology.layout
    assert (layout.cp, layout.ep) == (1, 1), layout
    source = open_source(folder, step=step, ema=ema, topology=topology, log=log)
    check_layout(source.model, tp=layout.tp, pp=layout.pp)

    def read() -> tuple[GPTStage, Tokenizer | None, frozenset[int]]:
        found, end_ids = None, frozenset[int]()
        if needs_tokenizer:
            found = source.tokenizer(tokenizer or TokenizerChoice())
            _check_tokenizer(source, found)
            end_ids = source.end_ids(found)
        stage = build_stage(source, topology, dtype or source.dtype)
        for parameter in stage.requires_grad_(False).parameters():
            assert isinstance(parameter, ShardedParameter)
            source.fill(parameter)
        return stage, found, end_ids

    stage, found, end_ids = _agreed(read, folder, topology)
    return InferenceModel(
        path=source.path,
        model=source.model,
        seq_length=source.seq_length,
        stage=stage.eval(),
        tokenizer=found,
        end_ids=end_ids,
        is_huggingface=isinstance(source, _FromFolder),
    )


def _check_tokenizer(source: Source, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None:
        raise ConfigError(f"{source.path} has no tokenizer; give one with --tokenizer-model")
    size = source.model.vocab_size
    assert size is not None
    if tokenizer.vocab_size > size:
        what = (
            f"the tokenizer ({tokenizer.name}) has {tokenizer.vocab_size} ids, but the vocab_size of {source.path} is"
        )
        raise ConfigError(f"{what} {size}; give the model's own with --tokenizer-model")
