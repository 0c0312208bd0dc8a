"""Megatron-LM's `torch_dist` format, read: tensors of the whole model in blocks, one file or more a rank.

The layers of a homogeneous model are one tensor with the layer as its first dimension, experts likewise.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megalite.config.data import DataConfig
from megalite.conversion.megatron.dist_metadata import StoredPiece, StoredTensor, read_metadata
from megalite.conversion.megatron.folders import step_folder
from megalite.conversion.megatron.given_args import Arguments
from megalite.conversion.megatron.layout import WORD, Shard, Stage, stage_pieces
from megalite.conversion.megatron.names import common_name
from megalite.conversion.megatron.settings import read_model
from megalite.conversion.megatron.torch_file import TorchFile
from megalite.conversion.megatron.types import require_readable
from megalite.conversion.pieces import Piece
from megalite.conversion.weights import ConversionError, parameter_shapes

_LAYERS = "decoder.layers."
_EXPERTS = ".mlp.experts.experts."
_MODEL = ("embedding.", "decoder.", "encoder.", "output_layer.", "mtp.")


@dataclass(frozen=True)
class _Source:
    """One tensor of theirs: an element of a stored one, by its first indices."""

    stored: StoredTensor
    index: tuple[int, ...]
    piece: Piece


class MegatronDistWeights:
    """A `torch_dist` checkpoint of a GPT, whatever the layout that saved it; optimizer and random states are not read.

    Args:
        folder: with the tracker file, or of one iteration.
        iteration: which one; default that of the tracker file.

    Raises:
        ConversionError: no such checkpoint, a file with something else in it than tensors and settings, or a model that
            is none of ours.
    """

    format = "megatron"
    tokenizer_files: Sequence[Path] = ()  # Megatron-LM keeps them elsewhere
    tokenizer_hints = DataConfig()

    def __init__(self, folder: Path, *, iteration: int | None = None) -> None:
        self.path = step_folder(folder, iteration)
        args = _arguments(self.path)
        stored = read_metadata(self.path / ".metadata")
        by_name = _by_common_name(self.path, stored, args)
        word = by_name.get(WORD)
        if word is None or len(word[0].shape) != 2:
            raise ConversionError(f"{self.path} has no {WORD}: it holds no GPT")
        vocabulary = word[0].shape[0]
        tp = args.whole("tensor_model_parallel_size", 1)
        self.model = read_model(args, padded_vocabulary=vocabulary, tp=tp)
        self.seq_length = args.whole("seq_length", args.whole("max_position_embeddings"))
        self._shapes = parameter_shapes(self.model)
        self._sources: dict[str, list[_Source]] = {name: [] for name in self._shapes}
        whole = Stage(0, self.model.num_layers, has_embedding=True, has_head=True)
        unknown = set(by_name)
        for piece in stage_pieces(self.model, whole, Shard(1, 0), vocabulary=vocabulary):
            unknown.discard(piece.theirs)
            self._sources[piece.ours].append(self._source(piece, by_name))
        if unknown:
            raise ConversionError(
                f"{self.path} has tensors that a GPT of its args has not: {', '.join(sorted(unknown)[:4])}"
            )

    def dtype(self, name: str) -> torch.dtype:
        """Type that a tensor is stored in."""
        return self._sources[name][0].stored.dtype

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, put together from the blocks of all ranks.

        Raises:
            ConversionError: a file is missing or damaged, or blocks leave a gap.
        """
        output = torch.zeros(self._shapes[name].shape, dtype=self.dtype(name))
        for source in self._sources[name]:
            place = source.piece.view(output).view(source.piece.shape)
            filled = sum(self._fill(place, source, block) for block in source.stored.pieces)
            if filled != place.numel():
                raise ConversionError(
                    f"{self.path}: the blocks of {source.piece.theirs} have {filled} of {place.numel()} elements"
                )
        return output

    def _fill(self, place: torch.Tensor, source: _Source, block: StoredPiece) -> int:
        """Copy the block's part of a tensor; the number of its elements."""
        leading = len(source.index)
        within = zip(source.index, block.offsets[:leading], block.sizes[:leading], strict=True)
        if not all(first <= index < first + size for index, first, size in within):
            return 0
        path = self.path / block.file
        file = TorchFile(path, block.start, block.length)
        tensor = file.content
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != block.sizes:
            raise ConversionError(
                f"{file.name} is not the block {list(block.sizes)} of {source.piece.theirs}"
            )
        if tensor.dtype != source.stored.dtype:
            raise ConversionError(f"{file.name} is of the type {tensor.dtype}, not {source.stored.dtype}")
        values = file.read(tensor)
        for index, first in zip(source.index, block.offsets, strict=False):
            values = values[index - first]
        spans = zip(block.offsets[leading:], block.sizes[leading:], strict=True)
        place[tuple(slice(first, first + size) for first, size in spans)].copy_(values)
        return values.numel()

    def _source(self, piece: Piece, by_name: dict[str, tuple[StoredTensor, tuple[int, ...]]]) -> _Source:
        found = by_name.get(piece.theirs)
        if found is None:
            raise ConversionError(f"{self.path} lacks {piece.theirs}, which its args ask for")
        stored, index = found
        if stored.shape[len(index) :] != piece.shape:
            raise ConversionError(
                f"{self.path}: {piece.theirs} is {list(stored.shape[len(index) :])}; its args make it {list(piece.shape)}"
            )
        require_readable(self.path, piece.theirs, stored.dtype)
        return _Source(stored, index, piece)


def _arguments(step: Path) -> Arguments:
    path = step / "common.pt"
    if not path.is_file():
        raise ConversionError(
            f"{path} is missing, which says what the model is; save the checkpoint with --ckpt-format torch"
        )
    content = TorchFile(path).content
    if not isinstance(content, dict) or not isinstance(content.get("args"), Namespace):
        raise ConversionError(f"{path} has no args, which say what the model is")
    return Arguments(vars(content["args"]), path)


def _by_common_name(
    step: Path, stored: dict[str, StoredTensor], args: Arguments
) -> dict[str, tuple[StoredTensor, tuple[int, ...]]]:
    """The model's tensors by the names of megatron.core's local layers, each with the indices that lead to it."""
    layers = args.whole("num_layers")
    files = {step / piece.file for tensor in stored.values() for piece in tensor.pieces}
    room = sum(path.stat().st_size for path in files if path.is_file())
    numbers: set[str] = set()
    found: dict[str, tuple[StoredTensor, tuple[int, ...]]] = {}
    for key, tensor in stored.items():
        name = key.removeprefix("model.")
        if not name.startswith(_MODEL) or common_name(name) is None:
            continue
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        if size > room:  # before a name is made for each of its layers and experts
            raise ConversionError(f"{step}: {key} takes {size} bytes, but all files together have {room}")
        names: list[tuple[str, tuple[int, ...]]] = [(name, ())]
        rest = name.removeprefix(_LAYERS)
        if rest != name and not rest.split(".")[0].isdigit():
            if not tensor.shape or tensor.shape[0] != layers:
                raise ConversionError(
                    f"{args.path}: args.num_layers is {layers}, but {key} is {list(tensor.shape)}"
                )
            names = [(f"{_LAYERS}{layer}.{rest}", (layer,)) for layer in range(layers)]
        elif rest != name:
            numbers.add(rest.split(".")[0])
        for theirs, index in names:
            for expanded, whole_index in _experts(theirs, index, tensor):
                common = common_name(expanded)
                assert common is not None
                found[common] = tensor, whole_index
    if numbers and len(numbers) != layers:
        raise ConversionError(
            f"{args.path}: args.num_layers is {layers}, but the files have {len(numbers)} layers"
        )
    return found


def _experts(name: str, index: tuple[int, ...], tensor: StoredTensor) -> list[tuple[str, tuple[int, ...]]]:
    """Each expert of a stack; anything else as it is."""
    if _EXPERTS not in name or len(tensor.shape) != len(index) + 3:
        return [(name, index)]
    before, after = name.split(_EXPERTS)
    return [
        (f"{before}.mlp.experts.local_experts.{expert}.{after}", (*index, expert))
        for expert in range(tensor.shape[len(index)])
    ]
