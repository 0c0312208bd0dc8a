"""Read Megatron-LM checkpoints in the `torch` format, and join the ranks' slices to whole tensors."""

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.folders import TRACKER_NAME
from megalite.config.data import DataConfig
from megalite.conversion.megatron.arguments import Arguments, read_model
from megalite.conversion.megatron.layout import (
    HEAD,
    WORD,
    Named,
    Shard,
    Stage,
    old_order,
    stage_pieces,
    tensors_of,
    vocabulary_piece,
)
from megalite.conversion.megatron.torch_file import TorchFile, require_readable
from megalite.conversion.weights import (
    BLOCK,
    ConversionError,
    Read,
    WeightPiece,
    Weights,
    fill,
    parameter_shapes,
    parts_within,
)
from megalite.models.shapes import WORD as WORD_OURS
from megalite.models.shapes import ParameterShape

RELEASE = "release"
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
Place = tuple[int, int, int]  # tensor-, pipeline- and expert-parallel rank
_STEP = re.compile(r"iter_(\d{7,})$")
_RANK = re.compile(r"mp_rank_(\d{2,})((?:_\d{3,})*)$")


@dataclass(frozen=True)
class Grid:
    """The parallel sizes and the rank files of a `torch` checkpoint."""

    tp: int
    pp: int
    ep: int
    files: dict[Place, Path]


class MegatronModel(Weights):
    """Base class of both Megatron-LM formats: no tokenizer files, and `args` that describe the model."""

    format = "megatron"
    tokenizer_files: Sequence[Path] = ()
    tokenizer_hints = DataConfig()
    generation: Mapping[str, Any] = {}

    def describe(self, args: Arguments, *, padded_vocabulary: int, tp: int) -> None:
        """Set the model config, sequence length and tensor shapes from the args."""
        self.model = read_model(args, padded_vocabulary=padded_vocabulary, tp=tp)
        self.seq_length = args.integer("seq_length", args.integer("max_position_embeddings"))
        self.shapes = parameter_shapes(self.model)


def refuse_unknown(path: Path, unknown: Collection[str]) -> None:
    """Raise if there are tensors that the conversion would drop."""
    if unknown:
        raise ConversionError(f"{path} has tensors that its args do not describe: {', '.join(sorted(unknown)[:4])}")


def is_step(folder: Path) -> bool:
    return folder.is_dir() and (is_dist(folder) or any(folder.glob("mp_rank_*")))


def is_dist(step: Path) -> bool:
    return (step / ".metadata").is_file()


def step_folder(folder: Path, iteration: int | None = None) -> Path:
    """Return the folder of one iteration: `folder` itself, or its subfolder in the tracker file or of `iteration`."""
    if iteration is None and is_step(folder):
        return folder
    if iteration is not None:
        found = folder / f"iter_{iteration:07d}"
        if folder.name == found.name and is_step(folder):
            return folder
        if not is_step(found):
            raise ConversionError(f"{folder} has no iteration {iteration}; it has {_known(folder)}")
        return found
    tracker = folder / TRACKER_NAME
    if not tracker.is_file():
        raise ConversionError(f"{folder} is not a Megatron-LM checkpoint: no {TRACKER_NAME}; it has {_known(folder)}")
    text = tracker.read_text(errors="replace")[:100].strip()
    if text != RELEASE and not re.fullmatch(r"\d{1,18}", text):
        raise ConversionError(f"{tracker} contains {text!r}; it must be a number or {RELEASE}")
    found = folder / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not is_step(found):
        raise ConversionError(f"{tracker} names {found.name}, which does not exist; {folder} has {_known(folder)}")
    return found


def _known(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*") if path.name == RELEASE or _STEP.match(path.name))
    return ", ".join(names[:10]) + (" ..." if len(names) > 10 else "") if names else "no iteration"


def rank_files(step: Path, *, expert_parallel: int = 1) -> Grid:
    """Return the model files of a `torch` step. Every rank of the grid must have one. In `mp_rank_TT_NNN`, NNN is the
    pipeline rank or, with a single pipeline stage, the expert-parallel rank. Only the args in a file distinguish the
    two."""
    found: dict[tuple[int, int, int], Path] = {}
    for path in sorted(step.glob("mp_rank_*")):
        match = _RANK.fullmatch(path.name)
        if not match or not path.is_dir():
            continue
        others = [int(part) for part in match[2].split("_")[1:]]
        if len(others) > 2:
            raise ConversionError(f"{path}: the name has more than tensor, pipeline and expert ranks")
        if len(others) == 1 and expert_parallel > 1:
            others = [0, *others]
        pipeline, expert = (*others, 0, 0)[:2]
        file = next((path / name for name in MODEL_FILES if (path / name).is_file()), None)
        if file is None:
            raise ConversionError(f"{path / MODEL_FILES[0]} is missing: the folder has no weights")
        found[int(match[1]), pipeline, expert] = file
    if not found:
        raise ConversionError(f"{step} has no mp_rank_*/{MODEL_FILES[0]}")
    tp, pp, ep = (max(place[axis] for place in found) + 1 for axis in range(3))
    for place in itertools.product(range(tp), range(pp), range(ep)):
        if place not in found:
            raise ConversionError(
                f"{step / rank_folder(*place, pp=pp, ep=ep) / MODEL_FILES[0]} is missing; {step} has {tp} x {pp} x {ep} ranks"
            )
    return Grid(tp, pp, ep, found)


def rank_folder(tensor: int, pipeline: int, expert: int = 0, *, pp: int, ep: int = 1) -> str:
    """Return the folder name of a rank. It has the pipeline rank if pp > 1 and the expert rank if ep > 1."""
    name = f"mp_rank_{tensor:02d}"
    name += f"_{pipeline:03d}" if pp > 1 else ""
    return name + (f"_{expert:03d}" if ep > 1 else "")


class RankFile:
    """The metadata of one rank's file: args, version and the tensors of its model chunks, without elements."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = TorchFile(path)
        content, self.file.content = self.file.content, None  # lets the optimizer's part be freed
        self.args = Arguments.of(content, path)
        self.version = content.get("checkpoint_version", 0)
        if not isinstance(self.version, int | float) or not 0 <= self.version < 4:
            raise ConversionError(f"{path}: checkpoint_version is {self.version!r}; supported: 0 to 3.0")
        self.chunks = list(_chunks(path, content))


def _chunks(path: Path, content: Mapping[Any, Any]) -> Iterator[Named]:
    """Yield the tensors of `model`, or of `model0`, `model1`, ... of a virtual pipeline."""
    names = ["model"]
    if "model" not in content:
        names = [f"model{index}" for index in range(sum(f"model{index}" in content for index in range(len(content))))]
    if not names or not all(name in content for name in names):
        raise ConversionError(f"{path} has neither model nor model0, model1, ...")
    for chunk in (content[name] for name in names):
        if not isinstance(chunk, Mapping):
            raise ConversionError(f"{path}: its model is a {type(chunk).__name__}, not a dict of tensors")
        try:
            yield tensors_of(chunk)
        except ConversionError as error:
            raise ConversionError(f"{path}: {error}") from None


@dataclass(frozen=True)
class _Source:
    file: TorchFile
    tensor: torch.Tensor
    piece: WeightPiece


class MegatronWeights(MegatronModel):
    """A `torch` checkpoint of a GPT, from megatron.core or older, with any tensor, pipeline and expert sizes."""

    def __init__(self, step: Path) -> None:
        self.path = step
        self._grid, files = _open_grid(step)
        first = files[0, 0, 0]
        embedding = first.chunks[0].get(WORD)
        if embedding is None or embedding.dim() != 2:
            raise ConversionError(f"{first.path} has no {WORD}: it is not the first stage of a GPT")
        self._vocabulary = embedding.shape[0] * self._grid.tp
        self._stages = _stages(self._grid, files)  # also checks the number of layers in the args
        self.describe(first.args, padded_vocabulary=self._vocabulary, tp=self._grid.tp)
        heads, tp = self.model.num_attention_heads, self._grid.tp
        if heads % tp:
            raise ConversionError(f"{first.path}: args.num_attention_heads is {heads}, not divisible by its tp {tp}")
        self._sources: dict[str, list[_Source]] = {name: [] for name in self.shapes}
        self._copies: dict[str, list[tuple[_Source, _Source]]] = {name: [] for name in self.shapes}
        self._index(files)

    def dtype(self, name: str) -> torch.dtype:
        return self._sources[name][0].tensor.dtype

    def read(self, name: str) -> torch.Tensor:
        shape = self.shapes[name].shape
        return self._reader(name)(0, math.prod(shape), None).view(shape)

    def elements(self, piece: WeightPiece) -> tuple[tuple[int, ...], Read] | None:
        """See `Weights`. Supported for a piece that is the whole tensor, because a checksum covers all elements."""
        shape = self.shapes[piece.parameter].shape
        wanted = sum(place.numel() for _, place in piece.places(torch.empty(shape, device="meta")))
        return (shape, self._reader(piece.parameter)) if wanted == math.prod(shape) else None

    def _reader(self, name: str) -> Read:
        for source, copy in self._copies[name]:
            self._compare(source, copy)
        shape, dtype = self.shapes[name].shape, self.dtype(name)
        ours, readers = torch.empty(shape, device="meta"), list[tuple[torch.Tensor, Read]]()
        for source in self._sources[name]:
            place = source.piece.view(ours)
            readers.append((place, source.file.reader(source.tensor, place.numel())))

        def read(start: int, count: int, room: torch.Tensor | None) -> torch.Tensor:
            output = room if room is not None and room.dtype == dtype else torch.empty(count, dtype=dtype)
            for place, elements in readers:
                for before, part in parts_within(place, start, start + count):
                    target = output.as_strided(part.shape, part.stride(), part.storage_offset() - start)
                    fill(target, elements, start=before)
            return output

        return read

    def _compare(self, source: _Source, copy: _Source) -> None:
        """Raise if two copies of a tensor differ. Padding of the vocabulary is not compared."""
        count = source.tensor.numel()
        if source.piece.name in (WORD, HEAD):
            assert self.model.vocab_size is not None
            whole = torch.empty(self.model.vocab_size, self.model.hidden_size, device="meta")
            count = source.piece.view(whole).numel()
        step = BLOCK // source.tensor.element_size()
        for start in range(0, count, step):
            length = min(step, count - start)
            one, other = (each.file.read(each.tensor, start, length) for each in (source, copy))
            # Compare unequal blocks as bytes, because NaN is not equal to itself.
            if not torch.equal(one, other) and not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                names = [f"{each.piece.name} of {each.file.name}" for each in (source, copy)]
                raise ConversionError(f"{names[0]} and {names[1]} differ")

    def _index(self, files: Mapping[Place, RankFile]) -> None:
        """Find the pieces of each of our tensors and their replicas. Raise for tensors that are neither."""
        firsts: dict[Any, _Source] = {}
        for (tensor, pipeline, rank), file in files.items():
            shard = Shard(self._grid.tp, tensor, self._grid.ep, rank)
            for chunk, tensors in enumerate(file.chunks):
                unknown = set(tensors)
                for piece in self._pieces(file, chunk, self._stages[pipeline, chunk], shard):
                    unknown.discard(piece.name)
                    source = _Source(file.file, _checked(file.path, tensors, piece), piece)
                    shape = self.shapes[piece.parameter]
                    expert = (shard.e, piece.name) if shape.expert else None
                    which = piece.parameter, shard.r if shape.shard_dim is not None else 0, expert
                    if is_first_copy(piece, shape, shard):
                        self._sources[piece.parameter].append(source)
                        firsts[which] = source
                    else:
                        self._copies[piece.parameter].append((firsts[which], source))
                refuse_unknown(file.path, unknown)
        for name, sources in self._sources.items():
            types = {source.tensor.dtype for source in (*sources, *(copy for _, copy in self._copies[name]))}
            if len(types) != 1:
                raise ConversionError(f"{self.path}: the slices of {name} have the types {sorted(map(str, types))}")
            elements, expected = sum(math.prod(s.piece.shape) for s in sources), math.prod(self.shapes[name].shape)
            if elements != expected:
                raise ConversionError(f"{self.path}: the slices of {name} have {elements} of {expected} elements")

    def _pieces(self, file: RankFile, chunk: int, stage: Stage, shard: Shard) -> Iterator[WeightPiece]:
        """Yield the tensors that a chunk of a file must contain, with the file's order of qkv rows."""
        tensors = file.chunks[chunk]
        if tensors.old_qkv and file.version < 2.0 and self.model.query_groups != self.model.num_attention_heads:
            raise ConversionError(f"{file.path}: checkpoint_version {file.version} has no args.num_query_groups")
        grouped = any(name.endswith(".mlp.experts.weight1") for name in tensors)
        for piece in stage_pieces(self.model, stage, shard, vocabulary=self._vocabulary, grouped=grouped):
            old = file.version < 2.0 and piece.name in tensors.old_qkv
            yield old_order(piece, self.model, file.version) if old else piece
        if self.model.tie_embeddings and HEAD in tensors and stage.has_embedding:
            yield vocabulary_piece(HEAD, WORD_OURS, self._vocabulary, self.model.hidden_size, shard)


def _open_grid(step: Path) -> tuple[Grid, dict[Place, RankFile]]:
    """Read the metadata of every file, and check that all belong to one run."""
    grid = rank_files(step)
    first = RankFile(grid.files[0, 0, 0])
    experts = first.args.integer("expert_model_parallel_size", 1)
    if experts > 1:
        grid = rank_files(step, expert_parallel=experts)
    for name, old, size, default in (
        ("tensor_model_parallel_size", "model_parallel_size", grid.tp, grid.tp),
        ("pipeline_model_parallel_size", None, grid.pp, grid.pp),
        ("expert_model_parallel_size", None, grid.ep, 1),
    ):
        stated = first.args.integer(name, first.args.integer(old, default) if old else default)
        if stated != size:
            raise ConversionError(f"{first.path}: args.{name} is {stated}, but {step} has the files of {size}")
    files = {place: first if place == (0, 0, 0) else RankFile(path) for place, path in sorted(grid.files.items())}
    for file in files.values():
        different = [] if file is first else first.args.differences(file.args)
        if different or file.version != first.version:
            raise ConversionError(f"{first.path} and {file.path} differ: {'; '.join(different) or 'version'}")
    return grid, files


def _stages(grid: Grid, files: Mapping[Place, RankFile]) -> dict[tuple[int, int], Stage]:
    """Return the layers of each (pipeline rank, chunk), as found in the files. Chunk v of all ranks precedes chunk v + 1."""
    first = files[0, 0, 0]
    chunks, layers = len(first.chunks), first.args.integer("num_layers")
    for place, file in files.items():
        if len(file.chunks) != chunks:
            raise ConversionError(f"{file.path} has {len(file.chunks)} model chunks; rank 0 has {chunks} ({place})")
    found: dict[tuple[int, int], Stage] = {}
    next_layer = 0
    for chunk in range(chunks):
        for pipeline in range(grid.pp):
            tensors = files[0, pipeline, 0].chunks[chunk]
            count = len({name.split(".")[2] for name in tensors if name.startswith("decoder.layers.")})
            found[pipeline, chunk] = Stage(
                next_layer,
                next_layer + count,
                has_embedding=chunk == pipeline == 0,
                has_head=(chunk, pipeline) == (chunks - 1, grid.pp - 1),
            )
            next_layer += count
    if next_layer != layers:
        raise ConversionError(f"{first.path}: args.num_layers is {layers}, but the files have {next_layer} layers")
    return found


def _checked(path: Path, tensors: Mapping[str, torch.Tensor], piece: WeightPiece) -> torch.Tensor:
    tensor = tensors.get(piece.name)
    if tensor is None:
        raise ConversionError(f"{path} lacks {piece.name}, which its args require")
    require_readable(path, piece, tensor.shape, tensor.dtype)
    return tensor


def is_first_copy(piece: WeightPiece, shape: ParameterShape, shard: Shard) -> bool:
    """Return whether a slice is read from this file: replicas are read from rank 0, a tied head from the embedding."""
    if piece.name == HEAD and shape.name == WORD_OURS:
        return False
    return (shape.expert or shard.e == 0) and (shape.shard_dim is not None or shard.r == 0)
