"""What every format is turned into on the way: a model's settings and its tensors under megalite's names and shapes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.config.model import ModelConfig
from megalite.models.shapes import ParameterShape, stage_shapes


class ConversionError(ConfigError):
    """Weights cannot be converted; the message names the file or the field, and what would work."""


class Weights(Protocol):
    """A model on disk, whatever its format, open for reading. Nothing is read before it is asked for.

    Every implementation gives each tensor of `parameter_shapes(model)` under its name, whole and unsharded, on the
    CPU. Rows of the word embedding and of the head beyond `model.vocab_size` are padding; where a format has none they
    are zeros.
    """

    @property
    def path(self) -> Path:
        """Where it is, for messages."""

    @property
    def format(self) -> str:
        """`megalite`, `huggingface` or `megatron`."""

    @property
    def model(self) -> ModelConfig:
        """The network, with vocab_size and (for learned positions) max_position_embeddings resolved."""

    @property
    def seq_length(self) -> int:
        """Longest sequence that it was made for."""

    @property
    def tokenizer_files(self) -> Sequence[Path]:
        """Files of its tokenizer, if it has any."""

    @property
    def tokenizer_hints(self) -> DataConfig:
        """What these files do not tell of it: the tokenizer_type of one that has none, and tiktoken_pattern."""

    def dtype(self, name: str) -> torch.dtype:
        """Type that a tensor is stored in."""

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in its stored type; the caller may change it.

        Raises:
            ConversionError: the file lacks it, or has another shape.
        """


def parameter_shapes(model: ModelConfig) -> dict[str, ParameterShape]:
    """Every tensor of the whole model by name, in the order of the forward pass."""
    return {shape.name: shape for shape in stage_shapes(model, 0, model.num_layers, True, True)}
