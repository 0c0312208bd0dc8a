"""What a model's folder says apart from its weights: the settings of a run that loads it, and the tokenizer's files.

Imports no torch, except for an address, because a dry run needs it too. `configure` builds a config from Python."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from megalite.checkpoint.files import read_text
from megalite.checkpoint.folders import candidates
from megalite.checkpoint.manifest import MANIFEST_NAME, CheckpointMissing, Manifest
from megalite.config.data import DataConfig, is_address
from megalite.config.errors import CheckpointError, ConfigError, raise_at_end
from megalite.config.files import level_of, read_preset
from megalite.config.flags import loaded_model
from megalite.config.merge import merge
from megalite.config.model import TRAINING_FIELDS
from megalite.config.registry import imported
from megalite.config.run import HUGGING_FACE, RunConfig, hugging_face_folder
from megalite.conversion.huggingface.config_json import find_file, parse_json
from megalite.conversion.huggingface.families import read_config
from megalite.conversion.weights import ConversionError, Weights
from megalite.tokenizers.base import SETTINGS_NAME, TEMPLATE_NAME, TOKENIZER_NAME, Tokenizer, read_tokenizer_file
from megalite.tokenizers.build import TIKTOKEN, WITHOUT_FILES, build_tokenizer, find_tokenizer_files, is_tiktoken

MODEL_SENTENCEPIECE, VOCAB, MERGES = "tokenizer.model", "vocab.json", "merges.txt"
_KNOWN = (TOKENIZER_NAME, MODEL_SENTENCEPIECE, VOCAB, MERGES)
GENERATION = "generation_config.json"
_COMPANIONS = (SETTINGS_NAME, "special_tokens_map.json", "added_tokens.json", TEMPLATE_NAME, GENERATION)
"""Files that describe a tokenizer, but are none by themselves."""
TOKENIZER_FILES = (*_KNOWN, *_COMPANIONS)
"""Files beside the weights that a conversion copies."""
TOKENIZER_SETTINGS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern")
"""Settings of section `data` that define the tokenizer."""
_NO_HINTS, _FOLDER = DataConfig(), "tokenizer"


def tokenizer_folder_files(path: Path, kind: str | None = None) -> list[Path]:
    """Return the tokenizer's files at `path`, a file or a folder in the layout of Hugging Face, Meta or OpenAI."""
    if path.is_file():
        # They define the end of document and the chat template.
        beside = (
            [path.with_name(name) for name in (SETTINGS_NAME, TEMPLATE_NAME)] if path.name == TOKENIZER_NAME else []
        )
        return [path, *(file for file in beside if file.is_file())]
    if path.is_dir():
        found = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
        names = {file.name for file in found}
        if kind is None and not names.isdisjoint(_KNOWN):
            return found
        try:
            model, vocab_file, merge_file = find_tokenizer_files(path, kind)
        except ConfigError as error:
            raise ConversionError(str(error)) from None
        chosen = [Path(file) for file in (model, vocab_file, merge_file) if file is not None]
        return found if chosen[0].name == TOKENIZER_NAME else chosen
    raise ConversionError(f"there is no tokenizer {path}; give its file or its folder")


def saved_tokenizer_files(data: DataConfig, home: Path) -> list[Path]:
    """Return the files of a checkpoint's tokenizer, or none if one of them is missing. `home`: the folder of the
    checkpoint's step folders. Files that were moved together with it are in `tokenizer/`."""
    places = [place for place in _places(data, home).values() if place is not None]
    if len(places) < len(_places(data, home)):
        return []
    own = home.resolve() / _FOLDER
    if any(path.parent == own for path in places):
        return tokenizer_folder_files(own)
    return [file for path in places for file in tokenizer_folder_files(path, data.tokenizer_type)]


def missing_tokenizer(data: DataConfig, home: Path) -> str | None:
    """Return a message with the recorded path and the searched folders if a tokenizer file is missing, else None."""
    for name, place in _places(data, home).items():
        if place is None:
            text = getattr(data, name)
            looked = dict.fromkeys(str(folder) for folder in (Path(text).absolute().parent, home.resolve() / _FOLDER))
            above = "" if Path(text).is_absolute() else f", and from the folders above {home.resolve()}"
            return f"is missing (recorded as {text}, looked in {' and '.join(looked)}{above})"
    return None


def tokenizer_as_it_is_now(data: DataConfig, home: Path) -> DataConfig:
    """Return the tokenizer settings with the current paths of the files, which may have moved with the checkpoints."""
    found: dict[str, Any] = {name: str(place) for name, place in _places(data, home).items() if place is not None}
    return replace(data, **found)


def _places(data: DataConfig, home: Path) -> dict[str, Path | None]:
    """Map each file setting to the file's current path, or None if it is missing. Searches the recorded path, then
    `tokenizer/` in `home`. A relative path is relative to the run's working directory, assumed to be a parent of
    `home`, because both may have been moved together."""
    recorded = ("tokenizer_model",) if data.tokenizer_model else ("vocab_file", "merge_file")
    found: dict[str, Path | None] = {}
    for name in recorded:
        if (text := getattr(data, name)) is not None:
            starts = (*home.resolve().parents, Path())
            places = (*(start / text for start in starts), home.resolve() / _FOLDER / Path(text).name)
            found[name] = next((path for path in places if path.exists()), None)
    return found


def named_tokenizer_files(files: Sequence[Path]) -> dict[str, Path]:
    """Map standard names to the files. The content decides the name, whatever the file is called. A tiktoken file is named
    tokenizer.model, as in Meta's Llama 3."""
    contents = {path: read_tokenizer_file(path) for path in files}
    vocabulary = any(_canonical_name(path, content) == VOCAB for path, content in contents.items())
    named: dict[str, Path] = {}
    for path, content in contents.items():
        name = _canonical_name(path, content)
        if name == MODEL_SENTENCEPIECE and path.name != name and vocabulary:
            name = MERGES  # GPT-2's files are called encoder.json and vocab.bpe
        if name in named and contents[named[name]] != content:
            raise ConversionError(f"{path}: a second {name} beside {named[name]}; a model has one tokenizer")
        named[name] = path
    return named


def _canonical_name(path: Path, content: bytes) -> str:
    if path.name in _COMPANIONS:
        return path.name
    if path.suffix != ".txt" and is_tiktoken(content):  # a merges.txt could look like a tiktoken file
        return MODEL_SENTENCEPIECE
    if path.name in TOKENIZER_FILES:
        return path.name
    if content.lstrip()[:1] == b"{":
        # A vocab.json may contain the word "model".
        is_whole = isinstance(parse_json(content, path).get("model"), dict)
        return TOKENIZER_NAME if is_whole else VOCAB
    return MERGES if path.suffix == ".txt" or content.startswith(b"#version") else MODEL_SENTENCEPIECE


def has_tokenizer(files: Sequence[Path]) -> bool:
    """Return whether the files contain a tokenizer, not only settings."""
    return any(path.name not in _COMPANIONS for path in files)


def tokenizer_settings(named: dict[str, Path], hints: DataConfig = _NO_HINTS, folder: Path | None = None) -> DataConfig:
    """Return the settings of the tokenizer in these files. `folder`: their future folder; default: the current paths."""
    if not named and hints.tokenizer_type in WITHOUT_FILES:
        return DataConfig(tokenizer_type=hints.tokenizer_type)
    place = {name: str(path if folder is None else folder / name) for name, path in named.items()}
    if TOKENIZER_NAME in place:
        return DataConfig(tokenizer_model=place[TOKENIZER_NAME])
    if MODEL_SENTENCEPIECE in place:
        takes_pattern = hints.tokenizer_type == TIKTOKEN or (
            hints.tiktoken_pattern is not None and is_tiktoken(read_tokenizer_file(named[MODEL_SENTENCEPIECE]))
        )
        pattern = hints.tiktoken_pattern if takes_pattern else None
        return DataConfig(tokenizer_model=place[MODEL_SENTENCEPIECE], tiktoken_pattern=pattern)
    return DataConfig(vocab_file=place.get(VOCAB), merge_file=place.get(MERGES))


def open_tokenizer(
    files: Sequence[Path], hints: DataConfig = _NO_HINTS, vocab_size: int | None = None
) -> Tokenizer | None:
    return build_tokenizer(tokenizer_settings(named_tokenizer_files(files), hints), vocab_size)


def tokenizer_of(weights: Weights) -> Tokenizer | None:
    """Return the tokenizer of a model, or None if it has none."""
    return open_tokenizer(weights.tokenizer_files, weights.tokenizer_hints, weights.model.vocab_size)


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


def settings_on_all_ranks(load: str, step: int | None) -> Mapping[str, Any] | None:
    """Return `settings_in` on every rank; rank 0 alone reads an address, and all ranks call this."""
    read = partial(settings_in, load, step)
    return imported("megalite.topology.topology:run_on_rank_0")(read) if is_address(load) else read()


def configure(*, preset: str | None = None, **settings: Any) -> RunConfig:
    """Build a config from the keys of a config file: `configure(num_layers=4, tp=2, imports=["my_module"])`, over those of
    a preset. The model is that in `load` without sizes, and of a Hugging Face folder always. Collectives: an address in
    `load` is read by rank 0, and all ranks call it. Raises ConfigError: a key or value is not legal, or differs from
    that model."""
    with raise_at_end(None) as problems:
        levels = [] if preset is None else [read_preset(preset, problems)]
        levels += [level_of({name: _text(value) for name, value in settings.items()}, "configure", problems)]
        with problems.collecting():
            levels += loaded_model(levels, settings_on_all_ranks, overrides=False)
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
