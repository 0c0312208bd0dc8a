"""The tokenizer that goes with a trained model, and the tokens that end a text."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.load import Checkpoint
from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.conversion.huggingface.folder import read_json
from megalite.conversion.huggingface.read import HuggingFaceWeights
from megalite.conversion.huggingface.tokenizer import GENERATION
from megalite.conversion.tokenizer_files import missing_tokenizer, tokenizer_of
from megalite.conversion.weights import ConversionError
from megalite.data.tokenizers.base import Tokenizer
from megalite.data.tokenizers.build import build_tokenizer, is_tiktoken_model


@dataclass(frozen=True)
class TokenizerChoice:
    """What the user says of the tokenizer.

    Args:
        model: its file or folder; None: the model's own.
        tiktoken_pattern: how that one, of tiktoken, cuts words.
    """

    model: str | None = None
    tiktoken_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.tiktoken_pattern is not None and self.model is None:
            raise ConfigError(
                f"--tiktoken-pattern {self.tiktoken_pattern} has no effect without --tokenizer-model; give that too, or "
                "leave it out"
            )


def checkpoint_tokenizer(checkpoint: Checkpoint, choice: TokenizerChoice) -> Tokenizer | None:
    """The tokenizer that a checkpoint was trained with, wherever it is now.

    Raises:
        ConfigError: its files are gone, or it is another.
    """
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
            raise ConfigError(
                f"the tokenizer of {checkpoint.path} {missing}; give --tokenizer-model (a file, or the folder of "
                "vocab.json and merges.txt)"
            )
        data = _as_it_is_now(data, home)
    tokenizer = build_tokenizer(data, checkpoint.manifest.config["model"]["vocab_size"])
    if tokenizer is None:
        raise ConfigError(
            f"{checkpoint.path} was trained without a tokenizer; give one with --tokenizer-model"
        )
    if checkpoint.manifest.tokenizer not in (None, tokenizer.fingerprint()):
        raise ConfigError(
            f"{data.tokenizer_model or data.vocab_file} is not the tokenizer that {checkpoint.path} was trained with; "
            "give that one with --tokenizer-model"
        )
    return tokenizer


def _as_it_is_now(data: DataConfig, home: Path) -> DataConfig:
    """The settings of the tokenizer; of one that lies in the checkpoints' own folder also where that was moved to."""
    files: dict[str, Any] = {}
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        path = getattr(data, name)
        if path is not None:
            own = home / "tokenizer" / Path(path).name
            files[name] = str(own) if own.exists() and not Path(path).exists() else path
    return dataclasses.replace(data, **files)


def folder_tokenizer(weights: HuggingFaceWeights, choice: TokenizerChoice) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder, None if it has none; or the one chosen."""
    if choice.model is None:
        return tokenizer_of(weights)
    data = DataConfig(tokenizer_model=choice.model, tiktoken_pattern=choice.tiktoken_pattern)
    return build_tokenizer(data, weights.model.vocab_size)


def folder_end_ids(weights: HuggingFaceWeights, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Tokens that end a text where transformers generates: the eos_token_id of generation_config.json, else that of
    config.json; and the tokenizer's end of document.

    Raises:
        ConfigError: they are no token ids.
    """
    generation = read_json(weights.path, GENERATION) or {}
    where, named = weights.path / "config.json", weights.token_ids.get("eos_token_id")
    if generation.get("eos_token_id") is not None:
        where, named = weights.path / GENERATION, generation["eos_token_id"]
    ids = [] if named is None else named if isinstance(named, list) else [named]
    if not all(type(token) is int for token in ids):
        raise ConversionError(
            f"{where}: eos_token_id is {str(named)[:60]!r}; it must be a number, several, or null"
        )
    return frozenset([*ids, *(() if tokenizer is None else (tokenizer.eod,))])
