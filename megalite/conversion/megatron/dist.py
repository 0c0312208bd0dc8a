"""Read Megatron-LM's `torch_dist` format: tensors of the whole model in blocks, with one or more files for each rank.

The layers of a homogeneous model are one tensor with the layer as its first dimension; so are experts. `.metadata` is a
pickle, and torch.distributed.checkpoint would run code in it. This module disassembles it with `pickletools` and imports,
calls or creates nothing: a class becomes a `Name`, which must be in a list, and a call of it a `CallRecord` with its arguments.
(torch's own restricted unpickler reads only protocol 2; these files have protocol 4.)"""

import math
import pickletools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megalite.conversion.megatron.arguments import Arguments
from megalite.conversion.megatron.layout import WORD, Shard, Stage, common_name, stage_pieces
from megalite.conversion.megatron.read import MegatronModel, refuse_unknown
from megalite.conversion.megatron.torch_file import TorchFile, refusal, require_readable
from megalite.conversion.weights import ConversionError, WeightPiece, fill


class PickleError(ValueError):
    """The bytes are not a pickle, or a pickle with a name that is not in the list."""


@dataclass(frozen=True)
class Name:
    """The name of a class, function or constant in a module. It is never imported."""

    name: str


@dataclass(eq=False)
class CallRecord:
    """An unexecuted call of `name` with `arguments`, and the state and items that the result would receive."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def get(self, attribute: str) -> Any:
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
# Number of values that an opcode takes from the stack; None: all above the last mark.
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None}
_ITEMS = {"APPEND": 1, "SETITEM": 2, "APPENDS": None, "ADDITEMS": None, "SETITEMS": None}


def describe(data: bytes, allowed: Collection[str]) -> Any:
    """Return the value of a pickle: dicts, lists, tuples, numbers, strings, `Name` (only `allowed` ones) and `CallRecord`.
    Raises PickleError: it has another name, or the bytes are not a pickle of plain data."""
    try:
        (value,) = _stack(data, allowed)
    except PickleError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PickleError(f"it is not a pickle ({error})") from None
    return value


def _stack(data: bytes, allowed: Collection[str]) -> list[Any]:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop(count: int | None) -> list[Any]:
        place = marks.pop() if count is None else len(stack) - count
        items = stack[place:]
        del stack[place:]
        return items

    operations: Iterator[tuple[Any, Any, Any]] = pickletools.genops(data)
    for opcode, argument, _ in operations:
        code = opcode.name
        if code in _VALUES:
            stack.append(argument)
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _EMPTY:
            stack.append(_EMPTY[code]())
        elif code == "MARK":
            marks.append(len(stack))
        elif code in _TUPLES:
            stack.append(tuple(pop(_TUPLES[code])))
        elif code in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if code == "MEMOIZE" else argument] = stack[-1]
        elif code in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif code in _ITEMS:
            items = pop(_ITEMS[code])
            _add(stack[-1], items, in_pairs=code.startswith("SETITEM"))
        elif code in ("GLOBAL", "STACK_GLOBAL"):
            module, name = argument.split(" ") if code == "GLOBAL" else pop(2)
            if f"{module}.{name}" not in allowed:
                raise PickleError(f"GLOBAL {module}.{name}")
            stack.append(Name(f"{module}.{name}"))
        elif code in ("REDUCE", "NEWOBJ"):
            called, arguments = pop(2)
            if not isinstance(called, Name) or not isinstance(arguments, tuple):
                raise PickleError("it calls something that is not a class")
            stack.append(CallRecord(called.name, arguments))
        elif code == "BUILD":
            (state,) = pop(1)
            if not isinstance(stack[-1], CallRecord):
                raise PickleError("it sets the state of something that is not an object")
            stack[-1].state = state
        elif code not in ("PROTO", "FRAME", "STOP"):
            raise PickleError(f"it has the opcode {code}, which plain data do not need")
    return stack


def _add(target: Any, items: list[Any], *, in_pairs: bool) -> None:
    if isinstance(target, CallRecord):
        target.items.extend(items)
    elif in_pairs:
        target.update(zip(map(_key, items[::2]), items[1::2], strict=True))
    elif isinstance(target, set):
        target.update(map(_key, items))
    else:
        target.extend(items)


def _key(value: Any) -> Any:
    """Check a dict key or set item. Deeply nested tuples are rejected, because hashing them overflows the C stack."""
    if not isinstance(value, str | bytes | int | float | Name | CallRecord | None):
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
"""Names that the file may contain. None of them is imported or called."""


@dataclass(frozen=True)
class StoredPiece:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...]


Place = tuple[str, int, int]  # bytes of a file in the folder: (name, start, length)


def read_metadata(path: Path) -> tuple[dict[str, StoredTensor], dict[str, Place]]:
    """Return the tensors of a folder, and the locations of other objects in its files."""
    try:
        described = describe(path.read_bytes(), ALLOWED)
    except PickleError as error:
        raise ConversionError(f"{refusal(str(path), str(error))}; or use --ckpt-format torch") from None
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error}") from None
    try:
        places = {
            (_only(str, index.get("fqn")), _whole(index.get("offset"))): _place(info)
            for index, info in described.get("storage_data").items()
        }
        tensors = {
            name: _tensor(name, stored, places)
            for name, stored in described.get("state_dict_metadata").items()
            if stored.name.endswith(".TensorStorageMetadata")
        }
        return tensors, {name: place for (name, _), place in places.items() if name not in tensors}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConversionError(f"{path} is not what this torch writes ({error!r}); use --ckpt-format torch") from None


def _tensor(name: str, stored: CallRecord, places: dict[Any, Place]) -> StoredTensor:
    shape = _whole(stored.get("size"))
    pieces = []
    for chunk in stored.get("chunks"):
        offsets, sizes = _whole(chunk.get("offsets")), _whole(chunk.get("sizes"))
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"{name} has pieces with another number of dimensions")
        if any(at + size > end for at, size, end in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"{name} has a piece outside of its shape")
        pieces.append(StoredPiece(offsets, sizes, *places[name, offsets]))
    return StoredTensor(shape, _dtype(stored.get("properties")), tuple(pieces))


def _dtype(properties: CallRecord) -> torch.dtype:
    found = properties.get("dtype")
    if found is None:
        found = properties.state[0]
    if not isinstance(found, Name) or found.name not in _DTYPES:
        raise ValueError(f"a {type(found).__name__} is no dtype")
    return _DTYPES[found.name]


def _place(info: CallRecord) -> Place:
    """Return the location of a tensor. Its file must be in the folder."""
    name, start, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    if _only(str, name) != Path(name).name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no file of the folder")
    if info.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed")
    if not (isinstance(start, int) and isinstance(length, int)) or min(start, length) < 0:
        raise ValueError(f"{name} has no valid offset and length for a tensor")
    return name, start, length


def _whole(size: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size; empty for None, which entries of other objects have."""
    if size is None:
        return ()
    numbers = tuple(size.arguments[0])
    if not all(_only(int, number) >= 0 for number in numbers):
        raise ValueError(f"{numbers} is no size")
    return numbers


def _only(kind: type, value: Any) -> Any:
    """Return the value if it has the type. Other values are not hashed, compared or printed: they may be recursive."""
    if not isinstance(value, kind):
        raise ValueError(f"found a {type(value).__name__} instead of a {kind.__name__}")
    return value


_LAYERS = "decoder.layers."
_EXPERTS = ".mlp.experts.experts."
_MODEL = ("embedding.", "decoder.", "encoder.", "output_layer.", "mtp.")


@dataclass(frozen=True)
class _Source:
    """A piece in a stored tensor. `index`: its position along the stored tensor's first dimensions (layer, expert)."""

    stored: StoredTensor
    index: tuple[int, ...]
    piece: WeightPiece


ByName = Mapping[str, tuple[StoredTensor, tuple[int, ...]]]
"""A stored tensor and the index of a part of it, by that part's name in the local layers."""
Sources = Mapping[str, Sequence[_Source]]


class MegatronDistWeights(MegatronModel):
    """A `torch_dist` checkpoint of a GPT, saved in any layout. `whole_vocabulary`: treat padding rows of the vocabulary
    as tokens, as Megatron-LM's softmax does."""

    def __init__(self, step: Path, *, whole_vocabulary: bool = False) -> None:
        self.path = step
        path = step / "common.pt"
        if not path.is_file():
            raise ConversionError(f"{path} is missing, which contains the args; save with --ckpt-format torch")
        self.common = TorchFile(path)
        self.args = args = Arguments.of(self.common.content, path)
        if whole_vocabulary:
            args = args.without("vocab_size")
        self.stored, self.objects = read_metadata(step / ".metadata")
        by_name = _by_common_name(step, self.stored, args)
        word = by_name.get(WORD)
        if word is None or len(word[0].shape) != 2:
            raise ConversionError(f"{step} has no {WORD}: it is not a GPT")
        self.vocabulary = word[0].shape[0]
        self.describe(args, padded_vocabulary=self.vocabulary, tp=args.integer("tensor_model_parallel_size", 1))
        self._files: dict[StoredPiece, TorchFile] = {}
        self._sources = self._of_whole_tensors(by_name)

    def whole_tensors(self, stored: dict[str, StoredTensor]) -> Sources:
        """Return the sources of each of our tensors among stored ones with the names and shapes of the model."""
        return self._of_whole_tensors(_by_common_name(self.path, stored, self.args))

    def _of_whole_tensors(self, by_name: ByName) -> Sources:
        sources: dict[str, list[_Source]] = {name: [] for name in self.shapes}
        whole = Stage(0, self.model.num_layers, has_embedding=True, has_head=True)
        unknown = set(by_name)
        for piece in stage_pieces(self.model, whole, Shard(1, 0), vocabulary=self.vocabulary):
            unknown.discard(piece.name)
            sources[piece.parameter].append(self._source(piece, by_name))
        refuse_unknown(self.path, unknown)
        return sources

    def dtype(self, name: str) -> torch.dtype:
        return self._sources[name][0].stored.dtype

    def read(self, name: str) -> torch.Tensor:
        return self.read_from(self._sources, name)

    def read_from(self, sources: Sources, name: str) -> torch.Tensor:
        output = torch.zeros(self.shapes[name].shape, dtype=sources[name][0].stored.dtype)
        for source in sources[name]:
            place = source.piece.view(output).view(source.piece.shape)
            filled = sum(self._fill(place, source, block) for block in source.stored.pieces)
            if filled != place.numel():
                raise ConversionError(f"{self.path}: {source.piece.name} has {filled} of {place.numel()} elements")
        return output

    def open_block(self, block: StoredPiece, dtype: torch.dtype, name: str) -> TorchFile:
        """Open the file of a block. Its `content` is a tensor with the block's sizes."""
        file = self._files.get(block)
        if file is None:
            file = self._files[block] = self.open_bytes((block.file, block.start, block.length))
        tensor = file.content
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != block.sizes:
            raise ConversionError(f"{file.name} is not the block {list(block.sizes)} of {name}")
        if tensor.dtype != dtype:
            raise ConversionError(f"{file.name} has dtype {tensor.dtype}, not {dtype}")
        return file

    def open_bytes(self, place: Place) -> TorchFile:
        path = self.path / place[0]
        if path.exists() and not path.is_file():
            raise ConversionError(f"{path} is a pipe, folder or device, not a file")
        return TorchFile(path, *place[1:])

    def _fill(self, place: torch.Tensor, source: _Source, block: StoredPiece) -> int:
        """Copy a block's part of a tensor into `place`, and return the number of elements."""
        leading = len(source.index)
        within = zip(source.index, block.offsets[:leading], block.sizes[:leading], strict=True)
        if not all(first <= index < first + size for index, first, size in within):
            return 0
        file = self.open_block(block, source.stored.dtype, source.piece.name)
        tensor: torch.Tensor = file.content
        for index, first in zip(source.index, block.offsets, strict=False):
            tensor = tensor[index - first]
        spans = zip(block.offsets[leading:], block.sizes[leading:], strict=True)
        fill(place[tuple(slice(first, first + size) for first, size in spans)], file.reader(tensor, tensor.numel()))
        return tensor.numel()

    def _source(self, piece: WeightPiece, by_name: ByName) -> _Source:
        found = by_name.get(piece.name)
        if found is None:
            raise ConversionError(f"{self.path} lacks {piece.name}, which its args require")
        stored, index = found
        require_readable(self.path, piece, stored.shape[len(index) :], stored.dtype)
        return _Source(stored, index, piece)


def _by_common_name(
    step: Path, stored: dict[str, StoredTensor], args: Arguments
) -> dict[str, tuple[StoredTensor, tuple[int, ...]]]:
    """Return the model's tensors and their indices, by the names of megatron.core's local layers."""
    layers = args.integer("num_layers")
    files = {step / piece.file for tensor in stored.values() for piece in tensor.pieces}
    room = sum(path.stat().st_size for path in files if path.is_file())
    numbers: set[str] = set()
    found: dict[str, tuple[StoredTensor, tuple[int, ...]]] = {}
    for key, tensor in stored.items():
        name = key.removeprefix("model.")
        if not name.startswith(_MODEL) or common_name(name) is None:
            continue
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        if size > room:  # check before creating a name for each layer and expert
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
    """Split a stack of experts into its experts. Return other tensors unchanged."""
    stacked = len(index) + (2 if name.endswith(".bias") else 3)
    if _EXPERTS not in name or len(tensor.shape) != stacked:
        return [(name, index)]
    before, after = name.split(_EXPERTS)
    return [
        (f"{before}.mlp.experts.local_experts.{expert}.{after}", (*index, expert))
        for expert in range(tensor.shape[len(index)])
    ]
