"""What a run takes from what it loads, where its settings leave that open: the model, the longest sequence, the tokenizer.
Without torch: a dry run asks for it too."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalite.checkpoint.files import read_text
from megalite.checkpoint.folders import candidates
from megalite.checkpoint.manifest import MANIFEST_NAME, CheckpointMissing, Manifest
from megalite.config.data import DataConfig, is_address
from megalite.config.errors import CheckpointError
from megalite.config.model import TRAINING_FIELDS
from megalite.config.run import HUGGING_FACE, hugging_face_folder
from megalite.conversion.huggingface.config_json import find_file
from megalite.conversion.huggingface.families import read_config
from megalite.conversion.tokenizer_files import (
    TOKENIZER_FILES,
    TOKENIZER_SETTINGS,
    has_tokenizer,
    missing_tokenizer,
    tokenizer_as_it_is_now,
)
from megalite.conversion.weights import ConversionError


def settings_in(load: str, step: int | None) -> Mapping[str, Any] | None:
    """Settings by name, of a Hugging Face folder (`hf:FOLDER`), or of the newest checkpoint with a readable manifest, or that
    of `step`. None: there is no checkpoint. How it was trained (dropout, auxiliary losses) is not among them."""
    if is_address(load):  # it is fetched when the ranks have met
        return None
    folder = hugging_face_folder(load)
    if folder is None:
        return _of_checkpoint(Path(load), step)
    if not folder.is_dir():
        raise ConversionError(
            f"{load}: there is no folder {folder}; give one on disk, as {HUGGING_FACE}models/llama. A run that began from it and "
            "has saved since resumes with --load and its checkpoints' folder"
        )
    config = read_config(folder)
    files = [folder / name for name in TOKENIZER_FILES if find_file(folder, name) is not None]
    tokenizer = {"tokenizer_model": str(folder)} if has_tokenizer(files) else {}
    return {**_shape(asdict(config.model)), "seq_length": config.seq_length, **tokenizer}


def _of_checkpoint(folder: Path, step: int | None) -> Mapping[str, Any] | None:
    try:
        found = candidates(folder, step)
    except CheckpointMissing:
        return None
    faults = []
    for candidate in found:
        file = folder / candidate.name / MANIFEST_NAME
        try:
            config = Manifest.from_json(read_text(file), source=str(file)).config
        except CheckpointError as error:
            faults.append(error)
            continue
        model, training, data = (
            section if isinstance(section := config.get(name), dict) else {} for name in ("model", "training", "data")
        )
        length = {name: training[name] for name in ("seq_length",) if name in training}
        return {**_shape(model), **length, **_tokenizer(data, folder)}
    raise faults[0]


def _shape(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name not in TRAINING_FIELDS}


def _tokenizer(data: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """The settings of the checkpoint's tokenizer, where its files are there."""
    try:
        saved = DataConfig(**{name: data[name] for name in TOKENIZER_SETTINGS if name in data})
        if missing_tokenizer(saved, home) is not None:
            return {}
        now = asdict(tokenizer_as_it_is_now(saved, home))
    except TypeError:  # not what this program writes
        return {}
    return {name: now[name] for name in TOKENIZER_SETTINGS if now[name] is not None}
