"""From `Weights` to a folder that transformers loads as it is."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.safetensors_header import FORMAT_PT
from megalite.config.errors import ConfigError
from megalite.conversion.huggingface.families import Family, choose_family
from megalite.conversion.huggingface.folder import read_json, refuse_code
from megalite.conversion.huggingface.read import TOKEN_IDS, HuggingFaceWeights
from megalite.conversion.huggingface.shards import INDEX, SINGLE
from megalite.conversion.huggingface.tokenizer import GENERATION, export_tokenizer
from megalite.conversion.output import Advance, Log, Output, identity_of, silent
from megalite.conversion.stream import Target, split_files, write_file
from megalite.conversion.tokenizer_files import has_tokenizer, tokenizer_of
from megalite.conversion.weights import Weights
from megalite.conversion.wrapped import LastRead, innermost

_END = "eos_token_id"


def write_huggingface(
    weights: Weights,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    family: str | None,
    max_file_bytes: int,
    advance: Advance,
    log: Log = silent,
) -> Path:
    """Write a model so that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load it.

    Rows that pad the vocabulary are left out. What is interrupted goes on, when called again, at the file that it was at.

    Args:
        weights: the model.
        folder: must not exist yet, or be empty.
        dtype: of the tensors; None: as they are stored.
        family: a name of `FAMILIES`; None: that of the source if it is a Hugging Face folder, else the first that
            expresses the model.
        max_file_bytes: where the next safetensors file begins; a larger tensor has one of its own.
        advance: called with the bytes of each tensor that was written.
        log: see `Output`.

    Raises:
        ConversionError: no family, or not the named one, expresses the model; the target is there already; the
            tokenizer cannot be expressed.
        OSError: disk full, no permission, ...
    """
    opened = innermost(weights)
    theirs = opened if isinstance(opened, HuggingFaceWeights) else None
    if family is None and theirs is not None:
        family = theirs.family.name
    chosen = choose_family(weights.model, weights.seq_length, family)
    tokenizer = export_tokenizer(weights.tokenizer_files, weights.seq_length, chosen.name)
    token_ids: Mapping[str, Any]
    generation: Mapping[str, Any] | None
    if theirs is not None and _keeps_tokens(weights, theirs):
        token_ids, generation = theirs.token_ids, _generation(theirs)
    else:
        token_ids = {name: tokenizer.token_ids.get(name) for name in TOKEN_IDS}
        if token_ids[_END] is None:
            token_ids[_END] = _end_of_document(weights, log)
        known = {name: value for name, value in token_ids.items() if value is not None}
        generation = {**known, **tokenizer.generation}
    targets = [
        Target(piece.theirs, piece, dtype or weights.dtype(piece.ours))
        for piece in chosen.pieces(weights.model, None)
    ]
    files = split_files(targets, max_file_bytes)
    identity = identity_of(weights, dtype=dtype, family=chosen.name, max_file_bytes=max_file_bytes)
    names = [SINGLE] if len(files) == 1 else [_shard_name(i, len(files)) for i in range(len(files))]
    output = Output(folder, identity=identity, files=names, log=log)
    source = LastRead(weights)
    for name, part in zip(names, files):
        write_file(output, name, part, source, advance, digest=False, metadata=FORMAT_PT)
    if len(files) > 1:
        _write_json(output, INDEX, _index(names, files))
    _write_json(output, "config.json", _config(chosen, weights, targets, token_ids))
    if generation is not None:
        _write_json(output, GENERATION, generation)
    for name, content in tokenizer.files.items():
        output.write(name, content)
    return output.commit()


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _index(names: list[str], files: list[list[Target]]) -> dict[str, Any]:
    """Which tensor is in which file."""
    total = sum(target.record.nbytes for part in files for target in part)
    places = {target.key: name for name, part in zip(names, files) for target in part}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


def _config(
    family: Family, weights: Weights, targets: list[Target], token_ids: Mapping[str, Any]
) -> dict[str, Any]:
    sizes: Counter[torch.dtype] = Counter()
    for target in targets:
        sizes[target.dtype] += target.record.nbytes
    # Which type transformers loads the model in; the old key, which all its versions read.
    (dtype, _), *_ = sizes.most_common(1)
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **family.write(weights.model, weights.seq_length),
        **token_ids,
    }


def _keeps_tokens(weights: Weights, theirs: HuggingFaceWeights) -> bool:
    """The ids of tokens still mean what they did: the folder's own tokenizer goes along, or none."""
    files, own = ([path.resolve() for path in source.tokenizer_files] for source in (weights, theirs))
    return files in ([], own)


def _end_of_document(weights: Weights, log: Log) -> int | None:
    """What ends a document, by the tokenizer that goes along or else by the one that the model was trained with."""
    try:
        tokenizer = tokenizer_of(weights if has_tokenizer(weights.tokenizer_files) else innermost(weights))
    except ConfigError as error:
        log(f"no eos_token_id: the tokenizer cannot be opened: {error}")
        return None
    return None if tokenizer is None else tokenizer.eod


def _generation(theirs: HuggingFaceWeights) -> dict[str, Any] | None:
    """What a folder says in generation_config.json; without it transformers goes by config.json and its class."""
    values = read_json(theirs.path, GENERATION)
    if values is not None:
        refuse_code(values, theirs.path / GENERATION)
    return values


def _write_json(output: Output, name: str, value: Mapping[str, Any]) -> None:
    output.write(name, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
