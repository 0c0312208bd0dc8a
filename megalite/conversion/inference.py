"""A trained model, of a checkpoint or a Hugging Face folder, on the ranks of a topology; nothing is converted on disk."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from megalite.checkpoint.load import find_checkpoint
from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.config.model import ModelConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.run import RunConfig
from megalite.config.training import TrainingConfig
from megalite.config.validate import validate
from megalite.conversion.huggingface.config_json import read_json
from megalite.conversion.huggingface.weights import HuggingFaceWeights, token_id
from megalite.conversion.native import NativeWeights, chosen_step
from megalite.conversion.open import detect_format
from megalite.conversion.tokenizer_files import GENERATION, tokenizer_of
from megalite.conversion.weights import ConversionError
from megalite.models.gpt import GPTStage
from megalite.partition.stages import cut_stages
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.build import build_tokenizer, is_tiktoken_model
from megalite.topology.topology import Topology

T = TypeVar("T")
Source = NativeWeights | HuggingFaceWeights  # of which a rank reads its slices
_WORD = "embedding.word.weight"


def tokenizer_for(weights: Source, choice: DataConfig) -> Tokenizer:
    """The tokenizer of the choice, or else the model's own. Raises ConfigError: there is none, it is not the one that a
    checkpoint was trained with, or it has ids beyond the vocabulary."""
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


def end_ids(weights: Source, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Tokens that end a text: the tokenizer's end of document; and where transformers generates, the eos_token_id of
    generation_config.json, else that of config.json."""
    own = frozenset(() if tokenizer is None else (tokenizer.eod,))
    if not isinstance(weights, HuggingFaceWeights):
        return own
    generation = read_json(weights.path, GENERATION) or {}
    where, named = weights.path / "config.json", weights.token_ids.get("eos_token_id")
    if generation.get("eos_token_id") is not None:
        where, named = weights.path / GENERATION, generation["eos_token_id"]
    ids = token_id(named, "eos_token_id", where)
    return own | frozenset([] if ids is None else ids if isinstance(ids, list) else [ids])


@dataclass(frozen=True, kw_only=True, eq=False)
class InferenceModel:
    """One rank's part of a model that is not trained any more, and what its text is made of."""

    path: Path  # the checkpoint or folder that it was read from
    model: ModelConfig
    seq_length: int  # longest sequence that it was made for
    stage: GPTStage
    tokenizer: Tokenizer | None
    tokenizer_sha256: str | None  # of the one that it was trained with, where a checkpoint says it
    end_ids: frozenset[int]  # tokens that end a text
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
    """Find the weights in `folder`, and check what can be checked before they are read; the same on every rank. `folder`:
    of checkpoints (the newest that verifies is taken, or that of `step`), one checkpoint, or a Hugging Face model. `dtype`:
    what they are wanted in: main parameters (of bf16, fp16) have more digits. `ema`: their moving average. `log`: as in
    `find_checkpoint`.

    Collectives: gathers over the world."""

    def look() -> HuggingFaceWeights | None:
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
        return HuggingFaceWeights(folder)

    weights = _agreed(look, folder, topology)
    if weights is not None:
        return weights
    folder, step = chosen_step(folder, step, "--ckpt-step")
    found = find_checkpoint(folder, step=step, world=topology.world, log=log)
    native = NativeWeights(found, main=False, ema=ema)
    return native if dtype in (None, native.dtype(_WORD)) else NativeWeights(found, ema=ema)


def _agreed(work: Callable[[], T], folder: Path, topology: Topology) -> T:
    """What `work` returns; what it raises on some rank is raised on all."""
    with topology.world.errors_on_all_ranks():
        try:
            return work()
        except OSError as error:
            raise ConversionError(f"cannot read {folder}: {error}") from None


def run_of(model: ModelConfig, seq_length: int, *, tp: int = 1, pp: int = 1) -> RunConfig:
    """The run that would train a model in a layout; layers that predict further tokens have no part in it."""
    training, parallel = TrainingConfig(seq_length=seq_length), ParallelConfig(tp=tp, pp=pp)
    return RunConfig(model=replace(model, mtp_num_layers=0), training=training, parallel=parallel)


def build_stage(model: ModelConfig, seq_length: int, topology: Topology, dtype: torch.dtype) -> GPTStage:
    """The layers of this rank, cut as training cuts them, without values."""
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
    """A model on the ranks of `topology`, which has neither cp nor ep: each rank reads what it holds. `folder, step,
    ema, log`: see `open_model`. `dtype`: of parameters and activations; None: the type that the weights are stored in.
    `tokenizer`: says another than its own. `needs_tokenizer`: False: leave the tokenizer alone; nothing ends a text then.

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
        stage = build_stage(weights.model, weights.seq_length, topology, dtype or weights.dtype(_WORD))
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
        end_ids=end_ids(weights, found) if needs_tokenizer else frozenset(),
        is_huggingface=weights.format == "huggingface",
    )
