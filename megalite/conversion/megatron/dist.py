"""Megatron-LM's `torch_dist` format, read: tensors of the whole model in blocks, one file or more for each rank.

The layers of a homogeneous model are one tensor with the layer as its first dimension, experts likewise. `.metadata` is
a pickle, which torch.distributed.checkpoint would run. Here the standard library's disassembler gives the opcodes, and
nothing is imported, called or made: a class is a `Name` that must be in a list, a call of it a `Made` that keeps the
arguments. (torch's own restricted unpickler reads protocol 2 alone; these files are of protocol 4.)
"""

import math
import pickletools
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalite.config.data import DataConfig
from megalite.conversion.megatron.arguments import Arguments, read_model
from megalite.conversion.megatron.layout import WORD, Shard, Stage, common_name, stage_pieces
from megalite.conversion.megatron.read import step_folder
from megalite.conversion.megatron.torch_file import TorchFile, refusal, require_readable
from megalite.conversion.weights import ConversionError, Piece, fill, parameter_shapes


class PickleError(ValueError):
    """The bytes are no pickle, or one with something that is not in the list."""


@dataclass(frozen=True)
class Name:
    """A class, function or constant of a module, by name alone."""

    name: str


@dataclass(eq=False)
class Made:
    """What calling `name` with `arguments` would have made, the state that it would have been given, and its items."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def get(self, attribute: str) -> Any:
        """An attribute of its state; None if it has none."""
        state = self.state[1] if isinstance(self.state, tuple) and len(self.state) == 2 else self.state
        return state.get(attribute) if isinstance(state, dict) else None


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {f"EMPTY_{kind.__name__.upper()}": kind for kind in (dict, list, tuple, set)}
_VALUES = frozenset(
    """
    BININT BININT1 BININT2 INT LONG LONG1 LONG4 BINFLOAT FLOAT UNICODE BINUNICODE SHORT_BINUNICODE
    BINUNICODE8 STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8
    """.split()  # noqa: SIM905
)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def describe(data: bytes, allowed: Collection[str]) -> Any:
    """The value that a pickle describes: dicts, lists, tuples, numbers, strings, `Name` and `Made`.

    Args:
        allowed: the dotted names that may occur.

    Raises:
        PickleError: another name occurs, or the bytes are not a pickle of plain data.
    """
    reader = _Reader(allowed)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            reader.step(opcode.name, argument)
        return reader.result()
    except PickleError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PickleError(f"it is not a pickle ({error})") from None


class _Reader:
    """The stack that the opcodes work on."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = allowed
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        """What is left."""
        (value,) = self._stack
        return value

    def step(self, code: str, argument: Any) -> None:
        """One opcode."""
        if code in _VALUES:
            self._stack.append(argument)
        elif code in _CONSTANTS:
            self._stack.append(_CONSTANTS[code])
        elif code in _EMPTY:
            self._stack.append(_EMPTY[code]())
        elif code == "MARK":
            self._marks.append(len(self._stack))
        elif code in _TUPLES:
            self._stack[-_TUPLES[code] :] = [tuple(self._stack[-_TUPLES[code] :])]
        elif code == "TUPLE":
            self._stack.append(tuple(self._pop_marked()))
        elif code in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[len(self._memo) if code == "MEMOIZE" else argument] = self._stack[-1]
        elif code in ("GET", "BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif code in ("APPEND", "APPENDS", "ADDITEMS", "SETITEM", "SETITEMS"):
            self._add(code)
        elif code in ("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"):
            self._object(code, argument)
        elif code not in ("PROTO", "FRAME", "STOP"):
            raise PickleError(f"it has the opcode {code}, which no data need")

    def _object(self, code: str, argument: Any) -> None:
        if code == "BUILD":
            state = self._stack.pop()
            if not isinstance(self._stack[-1], Made):
                raise PickleError("it gives a state to what is not an object")
            self._stack[-1].state = state
            return
        if code == "GLOBAL":
            name = argument.replace(" ", ".")
        else:
            second, first = self._stack.pop(), self._stack.pop()
            if code != "STACK_GLOBAL":
                if not isinstance(first, Name) or not isinstance(second, tuple):
                    raise PickleError("it calls what is not a class")
                self._stack.append(Made(first.name, second))
                return
            name = f"{first}.{second}"
        if name not in self._allowed:
            raise PickleError(f"GLOBAL {name}")
        self._stack.append(Name(name))

    def _add(self, code: str) -> None:
        if code.endswith("S"):
            items = self._pop_marked()
        else:
            count = 2 if code == "SETITEM" else 1
            items = self._stack[-count:]
            del self._stack[-count:]
        target = self._stack[-1]
        if isinstance(target, Made):
            target.items.extend(items)
        elif code.startswith("SETITEM"):
            target.update(zip(map(_key, items[::2]), items[1::2], strict=True))
        elif isinstance(target, set):
            target.update(map(_key, items))
        else:
            target.extend(items)

    def _pop_marked(self) -> list[Any]:
        place = self._marks.pop()
        items = self._stack[place:]
        del self._stack[place:]
        return items


def _key(value: Any) -> Any:
    """Tuples in tuples, 100,000 deep, would overflow the stack of the function that hashes them."""
    if not isinstance(value, str | bytes | int | float | Name | Made | None):
        raise PickleError(f"it has a {type(value).__name__} as a key or in a set")
    return value


_DCP = "torch.distributed.checkpoint"
_DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
ALLOWED = frozenset(
    (
        *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *(f"{_DCP}.metadata.{kind}StorageMetadata" for kind in ("Tensor", "Bytes", "Chunk")),
        f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
        *(f"{_DCP}.planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType")),
        *(f"{_DCP}.planner.{name}" for name in ("TensorWriteData", "BytesIOWriteData")),
        *(f"{_DCP}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
        *("torch.Size", "torch.serialization._get_layout", "torch.memory_format", "torch.strided"),
        *("torch.contiguous_format", "torch.preserve_format"),
        *("collections.OrderedDict", "collections.ChainMap", "pathlib.PosixPath", "builtins.set"),
        *_DTYPES,
    )
)
"""Names that the file may hold. They stay names: nothing of them is imported or called."""


@dataclass(frozen=True)
class StoredPiece:
    """A block of a tensor and the bytes that `torch.save` made of it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor over all ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...]


def read_metadata(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name.

    Raises:
        ConversionError: the file contains another class than those that torch writes there (it is named), or is not
            what torch writes.
    """
    try:
        described = describe(path.read_bytes(), ALLOWED)
    except PickleError as error:
        raise ConversionError(
            f"{refusal(str(path), str(error))}; or save the checkpoint with --ckpt-format torch"
        ) from None
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error}") from None
    try:
        places = {
            (_only(str, index.get("fqn")), _whole(index.get("offset"))): _place(info)
            for index, info in described.get("storage_data").items()
        }
        return {
            name: _tensor(name, stored, places)
            for name, stored in described.get("state_dict_metadata").items()
            if stored.name.endswith(".TensorStorageMetadata")
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConversionError(
            f"{path} is not what this version of torch writes ({error!r}); save the checkpoint with --ckpt-format torch"
        ) from None


def _tensor(name: str, stored: Made, places: dict[Any, tuple[str, int, int]]) -> StoredTensor:
    shape = _whole(stored.get("size"))
    pieces = []
    for chunk in stored.get("chunks"):
        offsets, sizes = _whole(chunk.get("offsets")), _whole(chunk.get("sizes"))
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"{name} has pieces of other dimensions")
        if any(at + size > end for at, size, end in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"{name} has a piece outside of it")
        pieces.append(StoredPiece(offsets, sizes, *places[name, offsets]))
    return StoredTensor(shape, _dtype(stored.get("properties")), tuple(pieces))


def _dtype(properties: Made) -> torch.dtype:
    found = properties.get("dtype")
    if found is None:
        found = properties.state[0]
    if not isinstance(found, Name) or found.name not in _DTYPES:
        raise ValueError(f"a {type(found).__name__} is no dtype")
    dtype: torch.dtype = _DTYPES[found.name]
    return dtype


def _place(info: Made) -> tuple[str, int, int]:
    """(file, start, length); the file is one of the folder."""
    name, start, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    if _only(str, name) != Path(name).name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no file of the folder")
    if info.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed")
    if not (isinstance(start, int) and isinstance(length, int)) or min(start, length) < 0:
        raise ValueError(f"{name} has no place for a tensor")
    return name, start, length


def _whole(size: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size; none of None, as entries that are no tensors have it."""
    if size is None:
        return ()
    numbers = tuple(size.arguments[0])
    if not all(_only(int, number) >= 0 for number in numbers):
        raise ValueError(f"{numbers} is no size")
    return numbers


def _only(kind: type, value: Any) -> Any:
    """The value, if it is of that kind; nothing else of a file is hashed, compared or shown: it may be endless."""
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
    return value


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
    generation: Mapping[str, Any] = {}

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
        self._files: dict[StoredPiece, TorchFile] = {}
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
        if path.exists() and not path.is_file():
            raise ConversionError(f"{path} is a pipe, folder or device, not a file")
        file = self._files.get(block)
        if file is None:
            file = self._files[block] = TorchFile(path, block.start, block.length)
        tensor = file.content
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != block.sizes:
            raise ConversionError(f"{file.name} is not the block {list(block.sizes)} of {source.piece.theirs}")
        if tensor.dtype != source.stored.dtype:
            raise ConversionError(f"{file.name} is of the type {tensor.dtype}, not {source.stored.dtype}")
        for index, first in zip(source.index, block.offsets, strict=False):
            tensor = tensor[index - first]
        spans = zip(block.offsets[leading:], block.sizes[leading:], strict=True)
        fill(place[tuple(slice(first, first + size) for first, size in spans)], partial(file.read, tensor))
        return tensor.numel()

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
                raise ConversionError(f"{args.path}: args.num_layers is {layers}, but {key} is {list(tensor.shape)}")
            names = [(f"{_LAYERS}{layer}.{rest}", (layer,)) for layer in range(layers)]
        elif rest != name:
            numbers.add(rest.split(".")[0])
        for theirs, index in names:
            for expanded, whole_index in _experts(theirs, index, tensor):
                common = common_name(expanded)
                assert common is not None
                found[common] = tensor, whole_index
    if numbers and len(numbers) != layers:
        raise ConversionError(f"{args.path}: args.num_layers is {layers}, but the files have {len(numbers)} layers")
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
