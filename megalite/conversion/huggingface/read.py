"""A Hugging Face folder as `Weights`."""

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.safetensors_file import TORCH_DTYPES
from megalite.config.data import DataConfig
from megalite.conversion.huggingface.families import FAMILIES, Family
from megalite.conversion.huggingface.folder import find_file, read_json, refuse_code
from megalite.conversion.huggingface.model_config import ModelFile
from megalite.conversion.huggingface.shards import Shards
from megalite.conversion.huggingface.tokenizer import TOKENIZER_FILES
from megalite.conversion.pieces import Piece, whole
from megalite.conversion.weights import ConversionError, parameter_shapes

HEAD = "lm_head.weight"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ROWS = 1024
"""Rows that are compared at once."""


class HuggingFaceWeights:
    """A model saved by transformers, open for reading; nothing in the folder is run.

    Opening checks all names, shapes and types against config.json; of the values it reads none, but where a tied head
    is stored beside the word embedding: then the two must be equal.

    Args:
        folder: with config.json and safetensors files.

    Attributes:
        family: what config.json calls its model_type.
        token_ids: those of bos_token_id, eos_token_id and pad_token_id that config.json has; for others transformers
            takes what the family's class has.

    Raises:
        ConversionError: there is none, it is of a family or has features that cannot be expressed, or its files do not
            fit its config.json.
    """

    format = "huggingface"
    tokenizer_hints = DataConfig()

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        if not self.path.is_dir():
            raise ConversionError(f"{folder} is not a folder; give the folder that holds config.json")
        values = read_json(self.path, "config.json")
        if values is None:
            raise ConversionError(f"{folder} has no config.json; give the folder that transformers saved")
        where = self.path / "config.json"
        self.family = _family_of(values, where)
        self.model, self.seq_length = self.family.read(ModelFile(values, where))
        self.token_ids = {
            name: _token_id(values.get(name), name, where) for name in TOKEN_IDS if name in values
        }
        self._shards = Shards(self.path)
        self._pieces = self._find_pieces()
        self.tokenizer_files: Sequence[Path] = [
            self.path / name for name in TOKENIZER_FILES if find_file(self.path, name) is not None
        ]

    def dtype(self, name: str) -> torch.dtype:
        """The stored type; of several that make up one tensor of ours the one that holds all their values."""
        return reduce(torch.promote_types, (self._stored(piece) for piece in self._pieces[name]))

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor under our name, in its stored type."""
        pieces, shape = self._pieces[name], self._shapes[name]
        if len(pieces) == 1 and pieces[0].view is whole:
            return self._shards.read(pieces[0].theirs).view(shape)
        # Zeros for the rows that pad the vocabulary, which nothing of theirs is put into.
        ours = torch.zeros(shape, dtype=self.dtype(name))
        for piece in pieces:
            piece.put(self._shards.read(piece.theirs), ours)
        return ours

    def _stored(self, piece: Piece) -> torch.dtype:
        return TORCH_DTYPES[self._shards.records[piece.theirs].dtype]

    def _find_pieces(self) -> dict[str, list[Piece]]:
        """Their tensors by the tensor of ours that they are pieces of, checked."""
        records = self._shards.records
        if self.model.num_layers > len(records):  # before anything is made for every layer
            raise ConversionError(
                f"{self.path / 'config.json'} says {self.model.num_layers} layers, the files hold "
                f"{len(records)} tensors"
            )
        found: dict[str, list[Piece]] = {}
        used = set()
        for piece in self.family.pieces(self.model, records.keys()):
            self._check(piece)
            found.setdefault(piece.ours, []).append(piece)
            used.add(piece.theirs)
        unknown = [name for name in records if name not in used and not self.family.buffers.fullmatch(name)]
        if HEAD in unknown and self.model.tie_embeddings:
            self._check_tied(found["embedding.word.weight"][0].theirs)
            unknown.remove(HEAD)
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise ConversionError(
                f"{self._shards.path_of(unknown[0])}: {unknown[0][:200]}{more}: {self.family.name} as config.json "
                "describes it has no such tensor"
            )
        self._shapes = {name: shape.shape for name, shape in parameter_shapes(self.model).items()}
        assert list(found) == list(self._shapes), "the table of pieces is not that of our parameters"
        return found

    def _check(self, piece: Piece) -> None:
        record = self._shards.records.get(piece.theirs)
        if record is None:
            raise ConversionError(
                f"{self.path}: {piece.theirs} is missing; {self.family.name} as config.json describes it has it"
            )
        where = f"{self._shards.path_of(piece.theirs)}: {piece.theirs}"
        if record.shape != piece.shape:
            raise ConversionError(
                f"{where} has the shape {list(record.shape)}; by config.json it is {list(piece.shape)}"
            )
        if record.dtype not in TORCH_DTYPES or not TORCH_DTYPES[record.dtype].is_floating_point:
            raise ConversionError(
                f"{where} is {record.dtype}; weights must be BF16, F16, F32 or F64 (quantized ones are not read)"
            )

    def _check_tied(self, word: str) -> None:
        """A head that is stored though it is tied must be the word embedding, bit for bit."""
        head, embedding = self._shards.records[HEAD], self._shards.records[word]
        same = head.shape == embedding.shape and head.dtype == embedding.dtype
        for start in range(0, head.shape[0], _ROWS) if same else ():
            rows = slice(start, min(start + _ROWS, head.shape[0]))
            ours, theirs = (self._shards.read_rows(name, rows).view(torch.uint8) for name in (HEAD, word))
            same = same and torch.equal(ours, theirs)
        if not same:
            raise ConversionError(
                f"{self.path / 'config.json'}: tie_word_embeddings is true, but {HEAD} differs from {word}; set it to "
                "false, if the head is one of its own"
            )


def _token_id(value: Any, name: str, where: Path) -> int | list[int] | None:
    ids = value if isinstance(value, list) else [value]
    if value is not None and not all(type(i) is int for i in ids):
        raise ConversionError(
            f"{where}: {name} is {str(value)[:60]!r}; it must be a number, several, or null"
        )
    return value


def _family_of(values: dict[str, Any], where: Path) -> Family:
    refuse_code(values, where)
    quantized = values.get("quantization_config")
    if quantized:
        raise ConversionError(
            f"{where}: quantization_config: the weights are quantized; convert the folder that they were made of"
        )
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConversionError(
            f"{where}: model_type is {str(name)[:60]!r}; what can be read is {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]
