"""Read the model, sequence length and tokenizer of the folder that a run loads, for settings that the user left out, and
`configure` a run from Python.

Imports no torch, except for an address, because a dry run needs them too."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from megalite.checkpoint.files import read_text
from megalite.checkpoint.folders import candidates
from megalite.checkpoint.manifest import MANIFEST_NAME, CheckpointMissing, Manifest
from megalite.config.data import DataConfig, is_address
from megalite.config.errors import CheckpointError, raise_at_end
from megalite.config.files import level_of
from megalite.config.flags import loaded_model
from megalite.config.merge import merge
from megalite.config.model import TRAINING_FIELDS
from megalite.config.registry import imported
from megalite.config.run import HUGGING_FACE, RunConfig, hugging_face_folder
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
    """Return settings by name from a Hugging Face folder (`hf:FOLDER`) or a checkpoint; None if there is none. The
    checkpoint is that of `step`, or the newest with a readable manifest. Settings of training (dropout, auxiliary
    losses) are not included."""
    if is_address(load):  # reads manifests only; the other files are downloaded after the ranks have connected
        return _of_checkpoint(imported("megalite.data.remote:manifests_at")(load, step), Path())
    folder = hugging_face_folder(load)
    if folder is None:
        with contextlib.suppress(CheckpointMissing):
            files = [Path(load, found.name, MANIFEST_NAME) for found in candidates(Path(load), step)]
            return _of_checkpoint(((str(file), file) for file in files), Path(load))
        return None
    if not folder.is_dir():
        raise ConversionError(
            f"{load}: there is no folder {folder}; give one on disk, as {HUGGING_FACE}models/llama. A run that started from "
            "it and has saved checkpoints resumes with --load and their folder"
        )
    config = read_config(folder)
    files = [folder / name for name in TOKENIZER_FILES if find_file(folder, name) is not None]
    tokenizer = {"tokenizer_model": str(folder)} if has_tokenizer(files) else {}
    return {**_architecture(asdict(config.model)), "seq_length": config.seq_length, **tokenizer}


def configure(**settings: Any) -> RunConfig:
    """Build a config from the keys of a config file: `configure(num_layers=4, tp=2, imports=["my_module"])`. The model
    is that in `load` without sizes, and of a Hugging Face folder always. Collectives: an address in `load` is read by
    rank 0, and all ranks call it. Raises ConfigError: a key or value is not legal, or differs from that
    model."""

    def read(load: str, step: int | None) -> Mapping[str, Any] | None:
        work = partial(settings_in, load, step)  # of a remote store, only rank 0 reads
        found: Mapping[str, Any] | None = (
            imported("megalite.topology.topology:run_on_rank_0")(work) if is_address(load) else work()
        )
        return found

    with raise_at_end(None) as problems:
        levels = [level_of({name: _text(value) for name, value in settings.items()}, "configure", problems)]
        with problems.collecting():
            levels += loaded_model(levels, read, overrides=False)
        return merge(levels, problems).config


def _text(value: Any) -> Any:
    """Return a path, or the paths in a list, as text."""
    if isinstance(value, list | tuple):
        return [_text(element) for element in value]
    return str(value) if isinstance(value, PurePath) else value


def _of_checkpoint(manifests: Iterable[tuple[str, Path | str]], home: Path) -> Mapping[str, Any] | None:
    """Return the settings in the first readable manifest; None if there are no manifests. `manifests`: pairs of a name
    and a file or text. `home`: the folder of the checkpoints or the run's working directory, where the tokenizer is
    searched."""
    faults = []
    for name, source in manifests:
        try:
            text = read_text(source) if isinstance(source, Path) else source
            config = Manifest.from_json(text, source=name).config
        except CheckpointError as error:
            faults.append(error)
            continue
        model, training, data = (
            section if isinstance(section := config.get(name), dict) else {} for name in ("model", "training", "data")
        )
        length = {name: training[name] for name in ("seq_length",) if name in training}
        return {**_architecture(model), **length, **_tokenizer(data, home)}
    if faults:
        raise faults[0]
    return None


def _architecture(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name not in TRAINING_FIELDS}


def _tokenizer(data: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """Return the settings of the checkpoint's tokenizer, if its files exist."""
    saved = DataConfig(**{name: data[name] for name in TOKENIZER_SETTINGS if name in data})
    if missing_tokenizer(saved, home) is not None:
        return {}
    now = asdict(tokenizer_as_it_is_now(saved, home))
    return {name: now[name] for name in TOKENIZER_SETTINGS if now[name] is not None}
