"""From `Weights` to a folder that transformers loads as it is."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.safetensors_header import FORMAT_PT
from megalite.conversion.huggingface.families import Family, choose_family
from megalite.conversion.huggingface.read import TOKEN_IDS, HuggingFaceWeights
from megalite.conversion.huggingface.shards import INDEX, SINGLE
from megalite.conversion.huggingface.tokenizer import GENERATION, Exported, export_tokenizer
from megalite.conversion.output import Advance, Log, Output, identity_of, silent
from megalite.conversion.stream import Target, split_files, write_file
from megalite.conversion.weights import Weights
from megalite.conversion.wrapped import LastRead


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
    if family is None and isinstance(weights, HuggingFaceWeights):
        family = weights.family.name
    chosen = choose_family(weights.model, weights.seq_length, family)
    tokenizer = export_tokenizer(weights.tokenizer_files, weights.seq_length, chosen.name)
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
    token_ids = _token_ids(weights, tokenizer)
    _write_json(output, "config.json", _config(chosen, weights, targets, token_ids))
    known = {name: value for name, value in token_ids.items() if value is not None}
    _write_json(output, GENERATION, {**known, **tokenizer.generation})
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


def _token_ids(weights: Weights, tokenizer: Exported) -> dict[str, Any]:
    """bos, eos and pad: as the Hugging Face folder that the weights come from has them, else as the tokenizer does."""
    if isinstance(weights, HuggingFaceWeights):
        return weights.token_ids
    return {name: tokenizer.token_ids.get(name) for name in TOKEN_IDS}


def _write_json(output: Output, name: str, value: Mapping[str, Any]) -> None:
    output.write(name, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
