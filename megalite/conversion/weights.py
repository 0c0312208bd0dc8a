"""Define the common interface of all formats: a model's settings, and its tensors under megalite's names and shapes.

Throughout the package `ours` is a tensor of megalite, and `theirs` one of the other format. Each of their tensors is a
piece of exactly one of ours. Import and export use the same table of pieces, so they cannot disagree. Elements are
copied in blocks: a conversion holds one whole tensor of ours and a few blocks.
Imports no torch, because a dry run reads config.json with the same tables."""

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
"""Values of Megatron-LM's `--transformer-impl`. The first names a norm after the linear layer that follows it."""

BLOCK = 4 << 20  # bytes that are read, converted, hashed or written at once

View = Callable[["torch.Tensor"], "torch.Tensor"]
"""Maps a whole tensor of ours to the view of it that is their tensor. It must not copy, because importing writes through
the view. Indexing, `view`, `unflatten`, `transpose` and `narrow` return views."""

Read = Callable[[int, int, "torch.Tensor | None"], "torch.Tensor"]
"""(start, count, room) -> `count` elements of a stored tensor, flat, in `room` if it has their dtype, else in new memory."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor: both formats store the same elements."""
    return tensor


def first_rows(rows: int, first: int = 0) -> View:
    """Return a view of rows [first, first + rows), clipped to the tensor's rows."""
    return lambda tensor: tensor[first : first + rows]


def part_at(*index: int) -> View:
    return lambda tensor: tensor[index]


@dataclass(frozen=True)
class WeightPiece:
    """A tensor of the other format with its `name` and `shape`. It is a `view` of our `parameter`, in the same element order. Its
    elements beyond the view's are padding of the vocabulary: written as zeros, and not read."""

    name: str
    parameter: str
    shape: tuple[int, ...]
    view: View = whole
    rest: tuple[View, ...] = ()  # views that follow `view` in their tensor, if it is not a single view of ours

    def places(self, ours: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each view of `ours` with the number of elements before it in their tensor."""
        first = 0
        for view in (self.view, *self.rest):
            place = view(ours)
            yield first, place
            first += place.numel()


def blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split a tensor into views of at most `BLOCK` bytes, in row-major order."""
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
    """Copy elements of a stored tensor, from index `start`, into the view `place` of our tensor, converting the dtype.
    `wanted`: range of memory offsets in our tensor. Blocks outside of it are neither read nor written."""
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
    """Yield the parts of the view `place` with memory offsets in [start, stop) of our tensor, each with the number of the
    view's elements before it, plus `before`."""
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
    last = max(first, min(rows, (stop - span - low) // step + 1))  # rows [first, last) are completely inside
    for index in range(touched.start, min(first, touched.stop)):
        yield from parts_within(place[index], start, stop, before + index * row)
    if first < last:
        yield before + first * row, place[first:last]
    for index in range(max(last, touched.start), touched.stop):
        yield from parts_within(place[index], start, stop, before + index * row)


class ConversionError(ConfigError):
    """Weights cannot be converted. The message names the file or the field, and what would work. Every function of this
    package may raise it."""


ReadWhole = Callable[[str], "torch.Tensor"]  # reads a whole tensor by our name


@dataclass(frozen=True, kw_only=True)
class Training:
    """State beside the weights that a run needs to continue."""

    step: int
    counters: Mapping[str, Any]  # see `Manifest.counters`
    config: Mapping[str, Mapping[str, Any]]  # known settings, by section
    states: Mapping[str, ReadWhole]  # fp32 optimizer states by name: exp_avg, ...


class Weights:
    """A model on disk in any format, open for reading. Tensors are read on demand. Subclasses return each tensor of
    `parameter_shapes(model)` by name, whole and unsharded, on the CPU. Rows of the word embedding and head beyond
    `model.vocab_size` are padding; a writer writes as many as the target format has. Weights that were opened with
    optimizer states also have an attribute `training: Training`."""

    path: Path
    format: str  # `megalite`, `huggingface` or `megatron`
    kind: str = "trained"  # or `ema`: the moving average
    model: ModelConfig  # with vocab_size and (for learned positions) max_position_embeddings resolved
    seq_length: int
    tokenizer_files: Sequence[Path]
    tokenizer_hints: DataConfig  # tokenizer_type, if it needs no files, and tiktoken_pattern
    generation: Mapping[str, Any]  # known values of generation_config.json

    def dtype(self, name: str) -> torch.dtype:
        raise NotImplementedError

    def read(self, name: str) -> torch.Tensor:
        """Return the whole tensor in its stored dtype. The caller may modify it."""
        raise NotImplementedError

    def elements(self, piece: WeightPiece) -> tuple[tuple[int, ...], Read] | None:
        """Return our tensor's shape and a reader of the piece's elements in order, or None if it must be read whole."""
        return None


def parameter_shapes(model: ModelConfig) -> dict[str, ParameterShape]:
    """Return the shape of every tensor of the model by name, in the order of the forward pass."""
    buffers = buffer_shapes(model, 0, model.num_layers)
    return {shape.name: shape for shape in (*stage_shapes(model, 0, model.num_layers, True, True), *buffers)}


class Wrapped(Weights):
    """Delegate everything to the weights `inner`. Subclasses override one aspect."""

    def __init__(self, inner: Weights) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def dtype(self, name: str) -> torch.dtype:
        return self.inner.dtype(name)

    def read(self, name: str) -> torch.Tensor:
        return self.inner.read(name)

    def elements(self, piece: WeightPiece) -> tuple[tuple[int, ...], Read] | None:
        """Return `inner`'s, unless a subclass overrides `read`."""
        return self.inner.elements(piece) if type(self).read is Wrapped.read else None


def innermost(weights: Weights) -> Weights:
    """Return the weights inside all wrappers."""
    while isinstance(weights, Wrapped):
        weights = weights.inner
    return weights


class LastRead(Wrapped):
    """Cache the last tensor, because consecutive pieces often belong to it. The caller must not modify it."""

    def __init__(self, inner: Weights) -> None:
        super().__init__(inner)
        self._last: tuple[str, torch.Tensor] | None = None

    def read(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # free the memory before the next read
            self._last = name, self.inner.read(name)
        return self._last[1]

    def elements(self, piece: WeightPiece) -> tuple[tuple[int, ...], Read] | None:
        return self.inner.elements(piece)


class Repadded(Wrapped):
    """Pad the vocabulary to another multiple. The writer adds rows of zeros or drops padding rows."""

    def __init__(self, inner: Weights, divisible_by: int) -> None:
        super().__init__(inner)
        self.model = replace(inner.model, make_vocab_size_divisible_by=divisible_by)


class WithTokenizer(Wrapped):
    """Replace the source's tokenizer files by others, or by none. Token ids of the source's generation settings are
    dropped, because another tokenizer has other ids. Only the pattern of the hints is kept, which a tiktoken file may
    need."""

    def __init__(self, inner: Weights, files: Sequence[Path]) -> None:
        super().__init__(inner)
        self.tokenizer_files = tuple(files)
        if files:
            self.generation = {}
        self.tokenizer_hints = DataConfig(tiktoken_pattern=inner.tokenizer_hints.tiktoken_pattern)
