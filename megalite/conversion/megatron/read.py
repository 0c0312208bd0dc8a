"""Megatron-LM's `torch` format, read: one file a rank, whole tensors put together from the ranks' slices."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.config.model import ModelConfig
from megalite.conversion.megatron.folders import Grid, rank_files, step_folder
from megalite.conversion.megatron.given_args import Arguments
from megalite.conversion.megatron.layout import HEAD, WORD, Shard, Stage, stage_pieces
from megalite.conversion.megatron.names import tensors_of
from megalite.conversion.megatron.settings import read_model
from megalite.conversion.megatron.torch_file import TorchFile
from megalite.conversion.pieces import Piece
from megalite.conversion.weights import ConversionError, parameter_shapes
from megalite.models.shapes import ParameterShape

Place = tuple[int, int, int]
"""Tensor-, pipeline- and expert-parallel rank."""


@dataclass(frozen=True)
class _Source:
    """Where one piece of a tensor of ours is."""

    file: TorchFile
    tensor: torch.Tensor
    piece: Piece


class _RankFile:
    """What is known of one file without its elements: arguments, version and the chunks' tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = TorchFile(path)
        content, self.file.content = self.file.content, None  # the optimizer's part of it may go
        if not isinstance(content, dict) or not isinstance(content.get("args"), Namespace):
            raise ConversionError(f"{path} has no args, which say what the model is")
        self.args = Arguments(vars(content["args"]), path)
        self.version = content.get("checkpoint_version", 0)
        if not isinstance(self.version, int | float) or not 0 <= self.version < 4:
            raise ConversionError(f"{path}: checkpoint_version is {self.version!r}; 0 to 3.0 are known")
        self.chunks = [_tensors(path, chunk) for chunk in _chunks(path, content)]


def _chunks(path: Path, content: Mapping[Any, Any]) -> list[Any]:
    """The `model`, or `model0`, `model1`, ... of a virtual pipeline."""
    if "model" in content:
        return [content["model"]]
    count = sum(f"model{index}" in content for index in range(len(content)))
    if not count or any(f"model{index}" not in content for index in range(count)):
        raise ConversionError(f"{path} has neither model nor model0, model1, ...")
    return [content[f"model{index}"] for index in range(count)]


def _tensors(path: Path, chunk: Any) -> dict[str, torch.Tensor]:
    if not isinstance(chunk, Mapping):
        raise ConversionError(f"{path}: its model is a {type(chunk).__name__}, not a dict of tensors")
    try:
        return tensors_of(chunk)
    except ConversionError as error:
        raise ConversionError(f"{path}: {error}") from None
    except RecursionError:
        raise ConversionError(f"{path}: its model is a dict in a dict without end") from None


class MegatronWeights:
    """A `torch` checkpoint of a GPT: megatron.core's or an older one, of any tensor, pipeline and expert sizes.

    Args:
        folder: with the tracker file, or of one iteration.
        iteration: which one; default that of the tracker file.

    Raises:
        ConversionError: no such checkpoint, a file is missing or damaged, files disagree, or a model that is none of
            ours.
    """

    format = "megatron"

    def __init__(self, folder: Path, *, iteration: int | None = None) -> None:
        self._path = step_folder(folder, iteration)
        self._grid, files = _open_grid(self._path)
        first = files[0, 0, 0]
        embedding = first.chunks[0].get(WORD)
        if embedding is None or embedding.dim() != 2:
            raise ConversionError(f"{first.path} has no {WORD}: it is no GPT's first stage")
        self._vocabulary = embedding.shape[0] * self._grid.tp
        self._model = read_model(first.args, padded_vocabulary=self._vocabulary, tp=self._grid.tp)
        self._seq_length = first.args.whole("seq_length", first.args.whole("max_position_embeddings"))
        self._shapes = parameter_shapes(self._model)
        self._check_divisible(first)
        self._sources = self._index(files)

    @property
    def path(self) -> Path:
        """The folder of the iteration."""
        return self._path

    @property
    def model(self) -> ModelConfig:
        """The network that `args` describe."""
        return self._model

    @property
    def seq_length(self) -> int:
        """`args.seq_length`."""
        return self._seq_length

    @property
    def tokenizer_files(self) -> Sequence[Path]:
        """None: Megatron-LM keeps them elsewhere."""
        return ()

    def dtype(self, name: str) -> torch.dtype:
        """Type that a tensor is stored in."""
        return self._sources[name][0].tensor.dtype

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, put together from the ranks' files.

        Raises:
            ConversionError: a file has changed since it was opened, or is damaged.
        """
        output = torch.zeros(self._shapes[name].shape, dtype=self.dtype(name))
        for source in self._sources[name]:
            source.piece.put(source.file.read(source.tensor), output)
        return output

    def _check_divisible(self, first: _RankFile) -> None:
        model, tp, ep = self._model, self._grid.tp, self._grid.ep
        for name, value in (
            ("num_attention_heads", model.num_attention_heads),
            ("num_query_groups", model.query_groups),
            ("ffn_hidden_size", model.ffn_size),
        ):
            if value % tp:
                raise ConversionError(
                    f"{first.path}: args.{name} is {value}, which {tp} tensor ranks cannot share"
                )
        if ep > 1 and (model.num_experts or 0) % ep:
            raise ConversionError(
                f"{first.path}: args.num_experts is {model.num_experts}, which {ep} ranks cannot share"
            )

    def _index(self, files: Mapping[Place, _RankFile]) -> dict[str, list[_Source]]:
        """For each tensor of ours the pieces of it; every tensor of every file must be one."""
        found: dict[str, list[_Source]] = {name: [] for name in self._shapes}
        stages = _stages(self._grid, files, self._model)
        for (tensor, pipeline, expert), file in files.items():
            shard = Shard(self._grid.tp, tensor, self._grid.ep, expert)
            for chunk, held in enumerate(file.chunks):
                unknown = set(held)
                pieces = stage_pieces(
                    self._model,
                    stages[pipeline, chunk],
                    shard,
                    vocabulary=self._vocabulary,
                    grouped=any(name.endswith(".mlp.experts.weight1") for name in held),
                    version=file.version,
                )
                for piece in pieces:
                    unknown.discard(piece.theirs)
                    source = _Source(file.file, _checked(file.path, held, piece), piece)
                    if _is_first_copy(piece, self._shapes[piece.ours], shard):
                        found[piece.ours].append(source)
                unknown -= {HEAD} if self._model.tie_embeddings else set()
                if unknown:
                    raise ConversionError(
                        f"{file.path} has tensors that a GPT of its args has not: {', '.join(sorted(unknown)[:4])}"
                    )
        for name, sources in found.items():
            types = {source.tensor.dtype for source in sources}
            if len(types) != 1:
                raise ConversionError(
                    f"{self._path}: the slices of {name} have the types {sorted(map(str, types))}"
                )
        return found


def _open_grid(step: Path) -> tuple[Grid, dict[Place, _RankFile]]:
    """Every file's contents without elements; all must be of one run."""
    grid = rank_files(step)
    first = _RankFile(grid.files[0, 0, 0])
    experts = first.args.whole("expert_model_parallel_size", 1)
    if experts > 1:
        grid = rank_files(step, expert_parallel=experts)
    for name, old, size, default in (
        ("tensor_model_parallel_size", "model_parallel_size", grid.tp, grid.tp),
        ("pipeline_model_parallel_size", None, grid.pp, grid.pp),
        ("expert_model_parallel_size", None, grid.ep, 1),
    ):
        stated = first.args.whole(name, first.args.whole(old, default) if old else default)
        if stated != size:
            raise ConversionError(
                f"{first.path}: args.{name} is {stated}, but {step} has the files of {size}; files are missing or of "
                "another run"
            )
    files = {(0, 0, 0): first}
    for place, path in sorted(grid.files.items()):
        if place != (0, 0, 0):
            files[place] = _RankFile(path)
    for file in files.values():
        different = first.args.differences(file.args)
        if different or file.version != first.version:
            raise ConversionError(
                f"{first.path} and {file.path} are not of one checkpoint: {'; '.join(different) or 'checkpoint_version'}"
            )
    return grid, files


def _stages(grid: Grid, files: Mapping[Place, _RankFile], model: ModelConfig) -> dict[tuple[int, int], Stage]:
    """The layers of each (pipeline rank, chunk) as found: chunk v of every rank comes before chunk v + 1 of any."""
    chunks = len(files[0, 0, 0].chunks)
    found: dict[tuple[int, int], Stage] = {}
    next_layer = 0
    for chunk in range(chunks):
        for pipeline in range(grid.pp):
            file = files[0, pipeline, 0]
            if len(file.chunks) != chunks:
                raise ConversionError(
                    f"{file.path} has {len(file.chunks)} model chunks, {files[0, 0, 0].path} has {chunks}"
                )
            count = _layer_count(file.chunks[chunk])
            last = chunk == chunks - 1 and pipeline == grid.pp - 1
            found[pipeline, chunk] = Stage(
                next_layer, next_layer + count, has_embedding=chunk == 0 and pipeline == 0, has_head=last
            )
            next_layer += count
            if next_layer > model.num_layers:
                break
    if next_layer != model.num_layers:
        raise ConversionError(
            f"{files[0, 0, 0].path}: args.num_layers is {model.num_layers}, but the files have {next_layer} layers"
        )
    for place, file in files.items():
        if len(file.chunks) != chunks:
            raise ConversionError(
                f"{file.path} has {len(file.chunks)} model chunks; rank 0 has {chunks} ({place})"
            )
    return found


def _layer_count(held: Mapping[str, torch.Tensor]) -> int:
    numbers = {name.split(".")[2] for name in held if name.startswith("decoder.layers.")}
    return len(numbers)


def _checked(path: Path, held: Mapping[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    tensor = held.get(piece.theirs)
    if tensor is None:
        raise ConversionError(f"{path} lacks {piece.theirs}, which its args ask for")
    if tuple(tensor.shape) != piece.shape:
        raise ConversionError(
            f"{path}: {piece.theirs} is {list(tensor.shape)}; its args and the number of files make it {list(piece.shape)}"
        )
    if not tensor.dtype.is_floating_point:
        raise ConversionError(
            f"{path}: {piece.theirs} is of the type {tensor.dtype}, not of floating-point numbers"
        )
    return tensor


def _is_first_copy(piece: Piece, shape: ParameterShape, shard: Shard) -> bool:
    """No other file has this slice: replicated tensors are taken from rank 0, a tied head from the embedding."""
    if piece.theirs == HEAD and shape.name == "embedding.word.weight":
        return False
    if shape.expert:
        return True
    return shard.e == 0 and (shape.shard_dim is not None or shard.r == 0)
