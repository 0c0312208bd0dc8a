"""What every format is turned into: a model's settings and its tensors under megalite's names and shapes.

A tensor of another format is a piece of exactly one of ours. One table of pieces serves both directions, so that import
and export cannot disagree. Elements are copied in blocks: beside one tensor of ours, whole, a conversion holds a few.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.config.model import ModelConfig
from megalite.models.shapes import ParameterShape, stage_shapes

BLOCK = 4 << 20
"""Bytes that are read, converted, hashed or written at once."""

View = Callable[[torch.Tensor], torch.Tensor]
"""From one of our tensors, whole, to the view of it that is their tensor. A view, never a copy: importing writes
through it. Indexing, `view`, `unflatten`, `transpose` and `narrow` give views."""

Read = Callable[[int, int], torch.Tensor]
"""`read(start, count)`: that many elements of a stored tensor, flat, from the `start`-th on."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Theirs is ours."""
    return tensor


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Theirs is [in, out] where ours is [out, in]."""
    return tensor.t()


def first_rows(rows: int, first: int = 0) -> View:
    """Rows [first, first + rows), or as many of them as there are."""
    return lambda tensor: tensor[first : first + rows]


@dataclass(frozen=True)
class Piece:
    """One tensor of theirs.

    Args:
        theirs: its name there.
        ours: the name of the tensor of ours that it is a piece of.
        view: from ours to what theirs holds, element for element and in the same order, whatever the two shapes. If
            theirs has more elements, these are padding of the vocabulary at its end: zeros when written, not read.
        shape: of theirs.
    """

    theirs: str
    ours: str
    shape: tuple[int, ...]
    view: View = whole


def blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of at most `BLOCK` bytes that make up the tensor, in the order of its elements (row by row)."""
    size = tensor.numel() * tensor.element_size()
    if size <= BLOCK:
        if size:
            yield tensor
    elif size // tensor.shape[0] <= BLOCK:
        yield from tensor.split(BLOCK // (size // tensor.shape[0]))
    else:
        for part in tensor:
            yield from blocks(part)


def fill(place: torch.Tensor, read: Read) -> None:
    """Copy the first elements of a stored tensor into a view of one of ours, converting their type to ours."""
    start = 0
    for block in blocks(place):
        block.copy_(read(start, block.numel()).view(block.shape))
        start += block.numel()


class ConversionError(ConfigError):
    """Weights cannot be converted; the message names the file or the field, and what would work."""


class Weights(Protocol):
    """A model on disk, whatever its format, open for reading. Nothing is read before it is asked for.

    Every implementation gives each tensor of `parameter_shapes(model)` under its name, whole and unsharded, on the
    CPU. Rows of the word embedding and of the head beyond `model.vocab_size` are padding: whoever writes them makes as
    many as the target has, whatever their number here.
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

    @property
    def generation(self) -> Mapping[str, Any]:
        """What generation_config.json would say of it: bos_token_id, eos_token_id, ..., as far as it is known."""

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
        return self._weights.path

    @property
    def format(self) -> str:
        return self._weights.format

    @property
    def model(self) -> ModelConfig:
        return self._weights.model

    @property
    def seq_length(self) -> int:
        return self._weights.seq_length

    @property
    def tokenizer_files(self) -> Sequence[Path]:
        return self._weights.tokenizer_files

    @property
    def tokenizer_hints(self) -> DataConfig:
        return self._weights.tokenizer_hints

    @property
    def generation(self) -> Mapping[str, Any]:
        return self._weights.generation

    def dtype(self, name: str) -> torch.dtype:
        return self._weights.dtype(name)

    def read(self, name: str) -> torch.Tensor:
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
        if self._tensor is None or self._name != name:
            self._tensor = None  # before the next one takes its room
            self._tensor = self._weights.read(name)
            self._name = name
        return self._tensor


class Repadded(Wrapped):
    """The vocabulary's rows padded to another multiple: who writes adds rows of zeros, or leaves out padding."""

    def __init__(self, weights: Weights, divisible_by: int) -> None:
        super().__init__(weights)
        self._model = replace(weights.model, make_vocab_size_divisible_by=divisible_by)

    @property
    def model(self) -> ModelConfig:
        """With the new multiple."""
        return self._model


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
    def generation(self) -> Mapping[str, Any]:
        """The source's where its tokenizer is left out; ids of another tokenizer are others."""
        return {} if self._files else self._weights.generation

    @property
    def tokenizer_hints(self) -> DataConfig:
        """The source's pattern, which a tiktoken file may need; not its kind."""
        return DataConfig(tiktoken_pattern=self._weights.tokenizer_hints.tiktoken_pattern)
