"""What a run takes from what it loads, where its settings leave that open: the model, the longest sequence, the tokenizer.
Without torch: a dry run asks for it too."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalite.checkpoint.files import read_text
from megalite.checkpoint.folders import candidates
from megalite.checkpoint.manifest import MANIFEST_NAME, CheckpointMissing, Manifest
from megalite.config.data import DataConfig, is_address
from megalite.config.errors import CheckpointError
from megalite.config.model import TRAINING_FIELDS
from megalite.config.registry import imported
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
    if is_address(load):  # its files are fetched when the ranks have met
        return _of_checkpoint(imported("megalite.data.remote:manifests_at")(load, step), Path())
    folder = hugging_face_folder(load)
    if folder is None:
        with contextlib.suppress(CheckpointMissing):
            files = [Path(load, found.name, MANIFEST_NAME) for found in candidates(Path(load), step)]
            return _of_checkpoint(((str(file), file) for file in files), Path(load))
        return None
    if not folder.is_dir():
        raise ConversionError(
            f"{load}: there is no folder {folder}; give one on disk, as {HUGGING_FACE}models/llama. A run that began from it and "
            "has saved since resumes with --load and its checkpoints' folder"
        )
    config = read_config(folder)
    files = [folder / name for name in TOKENIZER_FILES if find_file(folder, name) is not None]
    tokenizer = {"tokenizer_model": str(folder)} if has_tokenizer(files) else {}
    return {**_shape(asdict(config.model)), "seq_length": config.seq_length, **tokenizer}


def _of_checkpoint(manifests: Iterable[tuple[str, Path | str]], home: Path) -> Mapping[str, Any] | None:
    """Of the first that can be read of manifests, given as files or texts by name; None: there is none. `home`: the folder of
    the checkpoints, or where the run is started; their tokenizer is looked for from there."""
    faults = []
    for name, given in manifests:
        try:
            text = read_text(given) if isinstance(given, Path) else given
            config = Manifest.from_json(text, source=name).config
        except CheckpointError as error:
            faults.append(error)
            continue
        model, training, data = (
            section if isinstance(section := config.get(name), dict) else {} for name in ("model", "training", "data")
        )
        length = {name: training[name] for name in ("seq_length",) if name in training}
        return {**_shape(model), **length, **_tokenizer(data, home)}
    if faults:
        raise faults[0]
    return None


def _shape(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name not in TRAINING_FIELDS}


def _tokenizer(data: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """The settings of the checkpoint's tokenizer, where its files are there."""
    saved = DataConfig(**{name: data[name] for name in TOKENIZER_SETTINGS if name in data})
    if missing_tokenizer(saved, home) is not None:
        return {}
    now = asdict(tokenizer_as_it_is_now(saved, home))
    return {name: now[name] for name in TOKENIZER_SETTINGS if now[name] is not None}
