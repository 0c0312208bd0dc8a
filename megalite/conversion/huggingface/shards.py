"""The safetensors files of a Hugging Face folder: one, or several with an index; every tensor by name."""

from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.manifest import CheckpointError
from megalite.checkpoint.safetensors_file import SafetensorsReader
from megalite.checkpoint.safetensors_header import Record
from megalite.conversion.huggingface.folder import find_file, read_json
from megalite.conversion.weights import ConversionError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class Shards:
    """All tensors of a folder, open for reading.

    Args:
        folder: with model.safetensors, or model.safetensors.index.json and the files that it names.

    Attributes:
        records: type and shape of every tensor, by name.

    Raises:
        ConversionError: there are none, or the files and the index do not agree.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: dict[str, SafetensorsReader] = {}
        self._file_of: dict[str, str] = {}
        self.records: dict[str, Record] = {}
        index = None if find_file(folder, SINGLE) is not None else read_json(folder, INDEX)
        if index is not None:
            self._open_indexed(index)
        elif find_file(folder, SINGLE) is not None:
            self._add(SINGLE)
        else:
            raise _no_weights(folder)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in its stored type."""
        return self.read_rows(name, None)

    def read_rows(self, name: str, rows: slice | None) -> torch.Tensor:
        """Some rows of a tensor (all with None), in its stored type."""
        index = None
        if rows is not None:
            shape = self.records[name].shape
            index = (rows, *(slice(0, size) for size in shape[1:]))
        try:
            return self._readers[self._file_of[name]].read(name, index)
        except CheckpointError as error:
            raise ConversionError(str(error)) from None

    def path_of(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""
        return self._folder / self._file_of[name]

    def _add(self, file: str) -> None:
        path = find_file(self._folder, file)
        if path is None:
            raise ConversionError(f"{self._folder}: {file}, which {INDEX} names, is missing")
        try:
            reader = SafetensorsReader(path)
        except CheckpointError as error:
            raise ConversionError(f"{self._folder / file}: {error}") from None
        self._readers[file] = reader
        for name, record in reader.records.items():
            if name in self._file_of:
                raise ConversionError(f"{self._folder}: {name} is in {self._file_of[name]} and in {file}")
            self._file_of[name] = file
            self.records[name] = record

    def _open_indexed(self, index: dict[str, Any]) -> None:
        where = self._folder / INDEX
        places = index.get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ConversionError(f"{where}: weight_map must say for each tensor the name of its file")
        for file in sorted(set(places.values())):
            if not file.endswith(".safetensors"):
                raise ConversionError(f"{where}: names {file[:200]!r}, which is no safetensors file")
            self._add(file)
        for name, file in places.items():
            if self._file_of.get(name) != file:
                found = self._file_of.get(name, "no file")
                raise ConversionError(f"{where}: says that {name[:200]} is in {file}; it is in {found}")
        unlisted = [name for name in self._file_of if name not in places]
        if unlisted:
            raise ConversionError(
                f"{self.path_of(unlisted[0])}: holds {unlisted[0]}, which {INDEX} does not name"
            )


def _no_weights(folder: Path) -> ConversionError:
    pickled = [name for name in _PICKLED if (folder / name).exists()]
    if pickled:
        return ConversionError(
            f"{folder} has its weights in {pickled[0]}, a pickle, which is not read because it can run code; if you "
            "trust it, load it with transformers once and write it with save_pretrained, which makes safetensors"
        )
    if (folder / "adapter_config.json").exists():
        return ConversionError(f"{folder} holds an adapter, not a model; merge it into its base model first")
    return ConversionError(f"{folder} has no {SINGLE} and no {INDEX}; give the folder of a model")
