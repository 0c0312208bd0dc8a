"""What every format is turned into: a model's settings and its tensors under megalite's names and shapes.

A tensor of another format is a piece of exactly one of ours. One table of pieces serves both directions, so that import
and export cannot disagree. Elements are copied in blocks: beside one tensor of ours, whole, a conversion holds a few.
torch is not imported here: a dry run reads config.json by the same tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.config.model import ModelConfig
from megalite.models.shapes import ParameterShape, buffer_shapes, stage_shapes

if TYPE_CHECKING:
    import torch

Format = Literal["native", "huggingface", "megatron"]
FORMATS: tuple[Format, ...] = ("native", "huggingface", "megatron")
TRANSFORMER_IMPLEMENTATIONS = ("transformer_engine", "local")
"""Megatron-LM's `--transformer-impl`: with the first a norm has the name of the linear layer after it."""

BLOCK = 4 << 20  # bytes that are read, converted, hashed or written at once

View = Callable[["torch.Tensor"], "torch.Tensor"]
"""From one of our tensors, whole, to the view of it that is their tensor. A view, never a copy: importing writes
through it. Indexing, `view`, `unflatten`, `transpose` and `narrow` give views."""

Read = Callable[[int, int, "torch.Tensor | None"], "torch.Tensor"]
"""(start, count, room) -> elements of a stored tensor, flat: in the room if there is some of their type, else in new memory."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Theirs is ours."""
    return tensor


def first_rows(rows: int, first: int = 0) -> View:
    """Rows [first, first + rows), or as many of them as there are."""
    return lambda tensor: tensor[first : first + rows]


def part_at(*index: int) -> View:
    return lambda tensor: tensor[index]


@dataclass(frozen=True)
class Piece:
    """One tensor of theirs, of `shape`: a `view` of the tensor of ours named `ours`, in the same order of elements.
    Elements of theirs beyond the view's pad the vocabulary: zeros when written, not read."""

    theirs: str
    ours: str
    shape: tuple[int, ...]
    view: View = whole
    rest: tuple[View, ...] = ()  # what comes behind `view` in their tensor, where the whole is not one view of ours

    def places(self, ours: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Each view, behind the number of elements that come before it in their tensor."""
        first = 0
        for view in (self.view, *self.rest):
            place = view(ours)
            yield first, place
            first += place.numel()


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


def fill(place: torch.Tensor, read: Read, wanted: range | None = None, start: int = 0) -> None:
    """Copy elements of a stored tensor, from the `start`-th on, into a view of one of ours, converting their type to ours.
    `wanted`: elements of ours, as they lie in memory; blocks without any of them are neither read nor touched."""
    for block in blocks(place):
        first = block.storage_offset()
        last = first + sum((size - 1) * step for size, step in zip(block.shape, block.stride(), strict=True))
        if wanted is None or (first < wanted.stop and last >= wanted.start):
            room = block.view(-1) if block.is_contiguous() else None
            values = read(start, block.numel(), room)
            if values is not room:
                block.copy_(values.view(block.shape))
        start += block.numel()


def parts_within(place: torch.Tensor, start: int, stop: int, before: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """The parts of a view of one of ours that lie in its elements [start, stop), each behind the number of the view's
    elements, in its order, that come before it (and `before` it)."""
    low = place.storage_offset()
    high = low + sum((size - 1) * step for size, step in zip(place.shape, place.stride(), strict=True)) + 1
    if place.numel() == 0 or high <= start or low >= stop:
        return
    if start <= low and high <= stop:
        yield before, place
        return
    rows, step = place.shape[0], place.stride(0)
    row, span = place.numel() // rows, high - low - (rows - 1) * step
    touched = range(max(0, (start - span - low) // step + 1), min(rows, -((low - stop) // step)))
    first = max(0, -((low - start) // step))
    last = max(first, min(rows, (stop - span - low) // step + 1))  # rows [first, last) lie in it whole
    for index in range(touched.start, min(first, touched.stop)):
        yield from parts_within(place[index], start, stop, before + index * row)
    if first < last:
        yield before + first * row, place[first:last]
    for index in range(max(last, touched.start), touched.stop):
        yield from parts_within(place[index], start, stop, before + index * row)


class ConversionError(ConfigError):
    """Weights cannot be converted; the message names the file or the field, and what would work. Every function of this
    package may raise it."""


ReadWhole = Callable[[str], "torch.Tensor"]  # a tensor of ours by its name, whole


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a checkpoint of a run has beside weights, and a run that continues needs."""

    step: int
    counters: Mapping[str, Any]  # as a manifest has them
    config: Mapping[str, Mapping[str, Any]]  # sections of settings, as far as the checkpoint says them
    states: Mapping[str, ReadWhole]  # of the optimizer, in fp32: exp_avg, ...


class Weights:
    """A model on disk, whatever its format, open for reading. Nothing is read before it is asked for. Subclasses give
    each tensor of `parameter_shapes(model)` under its name, whole and unsharded, on the CPU. Rows of the word embedding
    and of the head beyond `model.vocab_size` are padding: a writer makes as many as the target has."""

    path: Path
    format: str  # `megalite`, `huggingface` or `megatron`
    kind: str = "trained"  # or `ema`: their moving average
    model: ModelConfig  # with vocab_size and (for learned positions) max_position_embeddings resolved
    seq_length: int
    tokenizer_files: Sequence[Path]
    tokenizer_hints: DataConfig  # a tokenizer_type that has no files, and tiktoken_pattern
    generation: Mapping[str, Any]  # of generation_config.json, as far as it is known
    # `training: Training` is there as well, where it was asked for.

    def dtype(self, name: str) -> torch.dtype:
        raise NotImplementedError

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in its stored type; the caller may change it."""
        raise NotImplementedError

    def elements(self, piece: Piece) -> tuple[tuple[int, ...], Read] | None:
        """The shape of the tensor that `piece` is of, and what reads the elements of the piece in order; None: it is read whole."""
        return None


def parameter_shapes(model: ModelConfig) -> dict[str, ParameterShape]:
    """Every tensor of the whole model by name, in the order of the forward pass."""
    buffers = buffer_shapes(model, 0, model.num_layers)
    return {shape.name: shape for shape in (*stage_shapes(model, 0, model.num_layers, True, True), *buffers)}


class Wrapped(Weights):
    """The weights `inner`, unchanged; subclasses change one thing."""

    def __init__(self, inner: Weights) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:  # the attributes of Weights, when they are asked for
        return getattr(self.inner, name)

    def dtype(self, name: str) -> torch.dtype:
        return self.inner.dtype(name)

    def read(self, name: str) -> torch.Tensor:
        return self.inner.read(name)

    def elements(self, piece: Piece) -> tuple[tuple[int, ...], Read] | None:
        """Those of `inner`, unless a subclass changes what is read."""
        return self.inner.elements(piece) if type(self).read is Wrapped.read else None


def innermost(weights: Weights) -> Weights:
    """The weights as they were opened, out of everything that they are wrapped in."""
    while isinstance(weights, Wrapped):
        weights = weights.inner
    return weights


class LastRead(Wrapped):
    """Keeps the tensor read last, which must not be changed: several of theirs are often pieces of one of ours."""

    def __init__(self, inner: Weights) -> None:
        super().__init__(inner)
        self._last: tuple[str, torch.Tensor] | None = None

    def read(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one takes its room
            self._last = name, self.inner.read(name)
        return self._last[1]

    def elements(self, piece: Piece) -> tuple[tuple[int, ...], Read] | None:
        return self.inner.elements(piece)


class Repadded(Wrapped):
    """The vocabulary's rows padded to another multiple: who writes adds rows of zeros, or leaves out padding."""

    def __init__(self, inner: Weights, divisible_by: int) -> None:
        super().__init__(inner)
        self.model = replace(inner.model, make_vocab_size_divisible_by=divisible_by)


class WithTokenizer(Wrapped):
    """Another tokenizer's files, or none, in place of the source's own. Ids of another tokenizer are others; of the
    hints only the pattern stays, which a tiktoken file may need."""

    def __init__(self, inner: Weights, files: Sequence[Path]) -> None:
        super().__init__(inner)
        self.tokenizer_files = tuple(files)
        if files:
            self.generation = {}
        self.tokenizer_hints = DataConfig(tiktoken_pattern=inner.tokenizer_hints.tiktoken_pattern)
