"""Weights with something about them changed on the way through."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megalite.config.data import DataConfig
from megalite.config.model import ModelConfig
from megalite.conversion.weights import Weights, parameter_shapes


class Wrapped:
    """The weights inside, unchanged; subclasses change one thing."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @property
    def inner(self) -> Weights:
        """Those that are wrapped."""
        return self._weights

    @property
    def path(self) -> Path:
        """See `Weights`, as for the others."""
        return self._weights.path

    @property
    def format(self) -> str:
        """See `Weights`."""
        return self._weights.format

    @property
    def model(self) -> ModelConfig:
        """See `Weights`."""
        return self._weights.model

    @property
    def seq_length(self) -> int:
        """See `Weights`."""
        return self._weights.seq_length

    @property
    def tokenizer_files(self) -> Sequence[Path]:
        """See `Weights`."""
        return self._weights.tokenizer_files

    @property
    def tokenizer_hints(self) -> DataConfig:
        """See `Weights`."""
        return self._weights.tokenizer_hints

    def dtype(self, name: str) -> torch.dtype:
        """See `Weights`."""
        return self._weights.dtype(name)

    def read(self, name: str) -> torch.Tensor:
        """See `Weights`."""
        return self._weights.read(name)


def innermost(weights: Weights) -> Weights:
    """The weights as they were opened, out of everything that they are wrapped in."""
    while isinstance(weights, Wrapped):
        weights = weights.inner
    return weights


class LastRead(Wrapped):
    """Keeps the tensor read last: several tensors of theirs are often pieces of one of ours.

    The tensor that `read` gives must not be changed.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._name: str | None = None
        self._tensor: torch.Tensor | None = None

    def read(self, name: str) -> torch.Tensor:
        """See `Weights`."""
        if self._tensor is None or self._name != name:
            self._tensor = None  # before the next one takes its room
            self._tensor = self._weights.read(name)
            self._name = name
        return self._tensor


class Repadded(Wrapped):
    """The vocabulary's rows padded to another multiple: with zeros, or cut, of padding alone."""

    def __init__(self, weights: Weights, divisible_by: int) -> None:
        super().__init__(weights)
        self._model = replace(weights.model, make_vocab_size_divisible_by=divisible_by)
        self._shapes = {name: shape.shape for name, shape in parameter_shapes(self._model).items()}

    @property
    def model(self) -> ModelConfig:
        """With the new multiple."""
        return self._model

    def read(self, name: str) -> torch.Tensor:
        """See `Weights`."""
        tensor = self._weights.read(name)
        wanted = self._shapes[name]
        if tensor.shape == wanted:
            return tensor
        rows = min(tensor.shape[0], wanted[0])
        result = tensor.new_zeros(wanted)
        result[:rows] = tensor[:rows]
        return result


class WithTokenizer(Wrapped):
    """Another tokenizer's files, or none, in place of the source's own."""

    def __init__(self, weights: Weights, files: Sequence[Path]) -> None:
        super().__init__(weights)
        self._files = tuple(files)

    @property
    def tokenizer_files(self) -> Sequence[Path]:
        """Those given."""
        return self._files

    @property
    def tokenizer_hints(self) -> DataConfig:
        """The source's pattern, which a tiktoken file may need; not its kind."""
        return DataConfig(tiktoken_pattern=self._weights.tokenizer_hints.tiktoken_pattern)
