"""The `.metadata` file of a `torch_dist` checkpoint: which tensors there are and where their pieces lie."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.conversion.megatron.pickled import Made, Name, PickleError, describe
from megalite.conversion.megatron.torch_file import refusal
from megalite.conversion.weights import ConversionError

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
        *(
            f"{_DCP}.metadata.{name}"
            for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")
        ),
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
            (index.get("fqn"), _whole(index.get("offset"))): _place(info)
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
        raise ValueError(f"{found} is no dtype")
    dtype: torch.dtype = _DTYPES[found.name]
    return dtype


def _place(info: Made) -> tuple[str, int, int]:
    """(file, start, length); the file is one of the folder."""
    name, start, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
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
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError(f"{numbers} is no size")
    return numbers
