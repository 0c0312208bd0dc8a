"""Read and write the weights of Hugging Face folders.

Safetensors files are opened with the checkpoint reader, which rejects links out of the folder and reads only parts of a
file into memory. The safetensors library maps the whole file."""

import dataclasses
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.manifest import Slice, TensorEntry, weight_key
from megalite.checkpoint.safetensors_file import DTYPE_NAMES, TORCH_DTYPES, SafetensorsReader
from megalite.checkpoint.safetensors_header import Record
from megalite.config.data import DataConfig
from megalite.config.errors import CheckpointError, ConfigError
from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.choose import choose_family
from megalite.conversion.huggingface.config_json import ModelFile, find_file, read_json, refuse_code
from megalite.conversion.huggingface.families import TOKEN_IDS, Family, read_config
from megalite.conversion.huggingface.quantized import quantized_kinds
from megalite.conversion.huggingface.tokenizer import export_tokenizer
from megalite.conversion.model_folder import GENERATION, TOKENIZER_FILES, has_tokenizer, tokenizer_of
from megalite.conversion.native import NativeWeights
from megalite.conversion.output import (
    DEFAULT_FILE_BYTES,
    Advance,
    Log,
    Output,
    Target,
    identity_of,
    silent,
    split_files,
    write_file,
)
from megalite.conversion.weights import (
    BLOCK,
    ConversionError,
    LastRead,
    Read,
    WeightPiece,
    Weights,
    fill,
    innermost,
    parameter_shapes,
)
from megalite.models.shapes import VOCABULARY, WORD

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class Shards:
    """The safetensors files of a folder: one, or several with an index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: dict[str, SafetensorsReader] = {}
        self._file_of: dict[str, str] = {}
        self.records: dict[str, Record] = {}
        if find_file(folder, SINGLE) is not None:
            self._add(SINGLE)
        elif (index := read_json(folder, INDEX)) is not None:
            self._open_indexed(index)
        else:
            raise _no_weights(folder)

    def read_elements(self, name: str, start: int, count: int, room: torch.Tensor | None = None) -> torch.Tensor:
        """Read elements [start, start + count) of a tensor, flat, in the stored dtype; into `room` if it has that dtype."""
        try:
            return self._readers[self._file_of[name]].read_elements(name, start, count, room)
        except CheckpointError as error:
            raise ConversionError(str(error)) from None

    def path_of(self, name: str) -> Path:
        return self._folder / self._file_of[name]

    def _add(self, file: str) -> None:
        path = find_file(self._folder, file)
        if path is None:
            raise ConversionError(f"{self._folder}: {file}, which {INDEX} names, is missing")
        try:
            reader = SafetensorsReader(path)
        except CheckpointError as error:
            raise ConversionError(str(error)) from None
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
            raise ConversionError(f"{where}: weight_map must map each tensor to the name of its file")
        for file in sorted(set(places.values())):
            if not file.endswith(".safetensors"):
                raise ConversionError(f"{where}: names {file[:200]!r}, which is no safetensors file")
            self._add(file)
        for name, file in places.items():
            if self._file_of.get(name) != file:
                found = self._file_of.get(name, "no file")
                raise ConversionError(f"{where}: weight_map says that {name[:200]} is in {file}; it is in {found}")
        unlisted = [name for name in self._file_of if name not in places]
        if unlisted:
            raise ConversionError(f"{self.path_of(unlisted[0])}: contains {unlisted[0]}, which {INDEX} does not name")


def _no_weights(folder: Path) -> ConversionError:
    pickled = [name for name in _PICKLED if (folder / name).exists()]
    if pickled:
        return ConversionError(f"{folder} has {pickled[0]}, a pickle, which can run code; save it as safetensors")
    if (folder / "adapter_config.json").exists():
        return ConversionError(f"{folder} contains an adapter, not a model; merge it into its base model first")
    return ConversionError(f"{folder} has no {SINGLE} and no {INDEX}; give the folder of a model")


HEAD = "lm_head.weight"
_COPIES = ("embed_tokens", "shared_head.head")
"""Names of an MTP layer's copies of the word embedding and the head."""
_LEFT_OUT = re.compile(r"(mtp|model\.mtp_\w+|(?:model\.)?(?:visual|vision_tower|multi_modal_projector))\..+")
"""Tensors that are no part of the text model: vision, and multi-token prediction of Qwen, EXAONE and Ernie."""


def _text_name(name: str) -> str:
    """Return a tensor's name in the text model alone. Multimodal folders have a prefix of their version of transformers."""
    return re.sub(r"^(model\.)?language_model\.", r"\1", name)


class HuggingFaceWeights(Weights):
    """A model saved by transformers, open for reading. No code in the folder is run.

    Opening checks all names, shapes and dtypes against config.json. It reads no values, except to check that a tied head
    that is stored beside the word embedding equals it.

    `token_ids` has the values of `TOKEN_IDS` in config.json; for missing ones transformers uses the family's defaults."""

    format = "huggingface"
    tokenizer_hints = DataConfig()

    def __init__(self, folder: str | Path, *, divisible_by: int | None = None) -> None:
        self.path = Path(folder)
        self.family, self.model, self.seq_length, values = read_config(self.path)
        if divisible_by is not None:  # the folder does not define the padding of the vocabulary
            self.model = dataclasses.replace(self.model, make_vocab_size_divisible_by=divisible_by)
        where = self.path / "config.json"
        self.token_ids = {name: token_id(values.get(name), name, where) for name in TOKEN_IDS if name in values}
        self._quantized = quantized_kinds(ModelFile(values, where))
        self._shards = Shards(self.path)
        if self.family.mtp and values.get("num_nextn_predict_layers") != 0:
            most, first = ModelFile(values, where).integer("num_nextn_predict_layers", 1), self.model.num_layers
            # Count the MTP layers in the files, because transformers does not save them but writes their number.
            stored = (f"model.layers.{first + k}.eh_proj.weight" in self._shards.records for k in range(most))
            self.model = dataclasses.replace(self.model, mtp_num_layers=sum(itertools.takewhile(bool, stored)))
        self._pieces = self._find_pieces()
        self.tokenizer_files: Sequence[Path] = [
            self.path / name for name in TOKENIZER_FILES if find_file(self.path, name) is not None
        ]

    @cached_property
    def generation(self) -> Mapping[str, Any]:  # type: ignore[override]
        """See `Weights`. generation_config.json takes precedence over the ids in config.json."""
        values = read_json(self.path, GENERATION) or {}
        refuse_code(values, self.path / GENERATION)
        return {name: i for name, i in {**self.token_ids, **values}.items() if i is not None}

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype. If the pieces of our tensor differ, return the dtype that represents all their values."""
        read_as = TORCH_DTYPES | {dtype: getattr(torch, kind.read_as) for dtype, kind in self._quantized.items()}
        types = (self._shards.records[piece.name].dtype for piece in self._pieces[name])
        return reduce(torch.promote_types, (read_as[dtype] for dtype in types))

    @property
    def quantization(self) -> str | None:
        """Describe the quantized weights and the dtype in which they are read; None if there are none."""
        dtypes = {self._shards.records[piece.name].dtype for pieces in self._pieces.values() for piece in pieces}
        return next((kind.description for dtype, kind in self._quantized.items() if dtype in dtypes), None)

    @property
    def remarks(self) -> str:
        """Continue a log line on the folder with its quantized weights and the tensors that were left out."""
        read_as = "" if self.quantization is None else f", of which {self.quantization}"
        return f"{read_as}{self._left_out}"

    def read(self, name: str, part: Slice | None = None) -> torch.Tensor:
        """See `Weights`. `part`: slice to return, as a view of the whole tensor; None for all. Blocks outside of the
        slice are not read, and their memory, never written, is not allocated by the system. So a rank reads and uses
        little more than its slice."""
        bounds = tuple((0, size) for size in self._shapes[name]) if part is None else part
        ours = torch.empty(self._shapes[name], dtype=self.dtype(name))
        first = sum(start * step for (start, _), step in zip(bounds, ours.stride(), strict=True))
        last = sum((stop - 1) * step for (_, stop), step in zip(bounds, ours.stride(), strict=True))
        for piece in self._pieces[name]:
            read = self._elements(piece.name)
            for offset, place in piece.places(ours):
                fill(place, read, range(first, last + 1), offset)
        if name in VOCABULARY:
            ours[self.model.vocab_size :] = 0.0  # padding rows, which the files do not contain
        return ours[tuple(slice(*bound) for bound in bounds)]

    def elements(self, piece: WeightPiece) -> tuple[tuple[int, ...], Read] | None:
        """See `Weights`. Supported for tensors that are stored with our order of elements."""
        shape, (theirs, *others) = self._shapes[piece.parameter], self._pieces[piece.parameter]
        ours = torch.empty(shape, device="meta")
        place = theirs.view(ours)
        if others or theirs.rest or place.numel() < ours.numel() or not place.is_contiguous():
            return None
        return shape, self._elements(theirs.name)

    def _elements(self, theirs: str) -> Read:
        record = self._shards.records[theirs]
        kind = self._quantized.get(record.dtype)
        read = self._shards.read_elements
        return partial(read, theirs) if kind is None else partial(kind.read, read, record)

    def _find_pieces(self) -> dict[str, list[WeightPiece]]:
        """Return the checked pieces of each of our tensors."""
        records, config = self._shards.records, self.path / "config.json"
        if self.model.num_layers > len(records):  # check before allocating anything per layer
            raise ConversionError(f"{config} has {self.model.num_layers} layers, the files have {len(records)} tensors")
        found: dict[str, list[WeightPiece]] = {}
        used = set()
        stored = {_text_name(name): name for name in records}
        for text_piece in self.family.pieces(self.model, stored.keys()):
            piece = dataclasses.replace(text_piece, name=stored.get(text_piece.name, text_piece.name))
            self._check(piece)
            found.setdefault(piece.parameter, []).append(piece)
            used.add(piece.name)
            if (kind := self._quantized.get(records[piece.name].dtype)) is not None:
                used.add(kind.scales_of(piece.name))
        used |= {f"model.layers.{i}.{name}.weight" for i in self.model.mtp_layers for name in _COPIES}
        others = [name for name in records if name not in used and not self.family.buffers.fullmatch(_text_name(name))]
        parts = {name: part.group(1) for name in others if (part := _LEFT_OUT.fullmatch(name))}
        unknown = [name for name in others if name not in parts]
        if (head := stored.get(HEAD, HEAD)) in unknown and self.model.tie_embeddings:
            self._check_tied(head, found[WORD][0].name)
            unknown.remove(head)
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise ConversionError(f"{self._shards.path_of(unknown[0])}: {self.family.name} has no {unknown[0]}{more}")
        size, kinds = sum(records[name].nbytes for name in parts), ", ".join(sorted(set(parts.values())))
        self._left_out = f"; left out: {len(parts)} tensors of {kinds} ({size:,} bytes)" if parts else ""
        self._shapes = {name: shape.shape for name, shape in parameter_shapes(self.model).items()}
        assert found.keys() == self._shapes.keys(), "the pieces do not match our parameters"
        return found

    def _check(self, piece: WeightPiece) -> None:
        record = self._shards.records.get(piece.name)
        if record is None:
            raise ConversionError(f"{self.path}: {piece.name} is missing, which its config.json requires")
        where = f"{self._shards.path_of(piece.name)}: {piece.name}"
        if record.shape != piece.shape:
            raise ConversionError(f"{where} is {list(record.shape)}; config.json requires {list(piece.shape)}")
        if (kind := self._quantized.get(record.dtype)) is not None:
            if fault := kind.fault(record, self._shards.records.get(kind.scales_of(record.key))):
                raise ConversionError(f"{where} {fault}")
        elif record.dtype == "F8_E4M3":
            raise ConversionError(f"{where} is {record.dtype} and config.json has no quantization_config")
        elif record.dtype not in TORCH_DTYPES or not TORCH_DTYPES[record.dtype].is_floating_point:
            raise ConversionError(f"{where} is {record.dtype}; weights must be BF16, F16, F32 or F64")

    def _check_tied(self, stored: str, word: str) -> None:
        """Require that a tied head that is `stored` equals the word embedding bit for bit."""
        head, embedding = self._shards.records[stored], self._shards.records[word]
        same = head.shape == embedding.shape and head.dtype == embedding.dtype
        count, step = math.prod(head.shape), BLOCK // 8
        for start in range(0, count, step) if same else ():
            parts = (self._shards.read_elements(name, start, min(step, count - start)) for name in (stored, word))
            ours, theirs = (part.view(torch.uint8) for part in parts)
            same = same and torch.equal(ours, theirs)
        if not same:
            raise ConversionError(f"{self.path}/config.json: tie_word_embeddings must be false: {stored} is not {word}")


def token_id(value: Any, name: str, where: Path) -> int | list[int] | None:
    """Check and return the token id or ids in key `name` of the file `where`."""
    ids = value if isinstance(value, list) else [value]
    if value is not None and not all(type(i) is int for i in ids):
        raise ConversionError(f"{where}: {name} is {str(value)[:60]!r}; it must be a number, several, or null")
    return value


def write_huggingface(
    weights: Weights,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    family: str | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    advance: Advance = silent,
    log: Log = silent,
) -> Path:
    """Write a model that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    Padding rows of the vocabulary are left out. After an interruption, another call continues at the unfinished file.

    `family`: a key of `FAMILIES`; None: the family of a Hugging Face source, else the first that expresses the model."""
    opened = innermost(weights)
    theirs = opened if isinstance(opened, HuggingFaceWeights) else None
    if family is None and theirs is not None:
        family = theirs.family.name
    chosen = choose_family(weights.model, weights.seq_length, family)
    tokenizer = export_tokenizer(weights.tokenizer_files, weights.seq_length, chosen.name)
    token_ids: Mapping[str, Any]
    generation: Mapping[str, Any] | None
    # Token ids stay valid if the source's own tokenizer or none is written.
    files_to_write = [path.resolve() for path in weights.tokenizer_files]
    if theirs is not None and files_to_write in ([], [path.resolve() for path in theirs.tokenizer_files]):
        token_ids, generation = theirs.token_ids, read_json(theirs.path, GENERATION)
        refuse_code(generation or {}, theirs.path / GENERATION)
    else:
        before = weights.generation
        token_ids = {name: tokenizer.token_ids.get(name, before.get(name)) for name in TOKEN_IDS}
        if token_ids["eos_token_id"] is None:
            token_ids["eos_token_id"] = _end_of_document(weights, log)
        known = {name: value for name, value in token_ids.items() if value is not None}
        generation = {**before, **known, **tokenizer.generation}
    if weights.model.mtp_num_layers and not chosen.mtp:
        log(f"{chosen.name} has no layers for multi-token prediction: {weights.model.mtp_num_layers} left out")
    targets = [Target(piece, dtype or weights.dtype(piece.parameter)) for piece in chosen.pieces(weights.model, None)]
    files = split_files(targets, max_file_bytes)
    identity = identity_of(weights, dtype=dtype, family=chosen.name, max_file_bytes=max_file_bytes)
    count = len(files)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    output = Output(folder, identity=identity, files=names, log=log)
    source = LastRead(weights)
    for name, part in zip(names, files):
        write_file(output, name, part, source, advance, digest=False)
    if len(files) > 1:
        total = sum(target.record.nbytes for target in targets)
        places = {target.key: name for name, part in zip(names, files) for target in part}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        _write_json(output, INDEX, index)
    _write_json(output, "config.json", _config(chosen, weights, targets, token_ids))
    if generation is not None:
        _write_json(output, GENERATION, generation)
    for name, content in tokenizer.files.items():
        output.write(name, content)
    return output.commit()


def _config(family: Family, weights: Weights, targets: list[Target], token_ids: Mapping[str, Any]) -> dict[str, Any]:
    sizes: Counter[torch.dtype] = Counter()
    for target in targets:
        sizes[target.dtype] += target.record.nbytes
    # transformers loads the model in this dtype. All its versions read the old key torch_dtype.
    (dtype, _), *_ = sizes.most_common(1)
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **family.write(weights.model, weights.seq_length),
        **token_ids,
    }


def _end_of_document(weights: Weights, log: Log) -> int | None:
    """Return the end of document of the tokenizer that is written or else of the model's training tokenizer."""
    try:
        tokenizer = tokenizer_of(weights if has_tokenizer(weights.tokenizer_files) else innermost(weights))
    except ConfigError as error:
        log(f"no eos_token_id: the tokenizer cannot be opened: {error}")
        return None
    return None if tokenizer is None else tokenizer.eod


def _write_json(output: Output, name: str, value: Mapping[str, Any]) -> None:
    output.write(name, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


class HuggingFaceSource:
    """A Hugging Face folder as a source for training: each rank reads slices, by the keys of a checkpoint. `model`:
    must be the folder's model, except for the padding of the vocabulary, which it defines."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        self._weights = HuggingFaceWeights(folder, divisible_by=model.make_vocab_size_divisible_by)
        self.path, self.model, self.remarks = folder, self._weights.model, self._weights.remarks
        self._entries = {
            weight_key(name): TensorEntry(name, DTYPE_NAMES[self._weights.dtype(name)], shape.shape, ())
            for name, shape in parameter_shapes(self.model).items()
        }

    def has(self, key: str) -> bool:
        return key in self._entries

    def entry(self, key: str) -> TensorEntry:
        return self._entries[key]

    def read_into(self, output: torch.Tensor, key: str, slice: Slice) -> None:
        output.copy_(self._weights.read(self._entries[key].name, slice))


def export_checkpoint(checkpoints: Path, step: int, target: Path, advance: Advance, log: Log, ema: bool) -> Path:
    """Write a checkpoint as a Hugging Face folder, with the same bytes as `megalite convert`."""
    weights = NativeWeights(checkpoints, step=step, ema=ema)
    if weights.missing_tokenizer is not None:
        log(f"warning: {target} gets no tokenizer: that of the run {weights.missing_tokenizer}")
    return write_huggingface(weights, target, advance=advance)
