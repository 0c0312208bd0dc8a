"""A tokenizer's files under the names that everybody looks for, and the settings that go with them."""

from collections.abc import Sequence
from pathlib import Path

from megalite.config.data import DataConfig
from megalite.conversion.huggingface.tokenizer import SETTINGS, TOKENIZER_FILES
from megalite.conversion.weights import ConversionError
from megalite.data.tokenizers.base import Tokenizer, read_tokenizer_file
from megalite.data.tokenizers.build import build_tokenizer

MODEL_JSON, MODEL_SENTENCEPIECE, VOCAB, MERGES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_KNOWN = (MODEL_JSON, MODEL_SENTENCEPIECE, VOCAB, MERGES)
_COMPANIONS = tuple(name for name in TOKENIZER_FILES if name not in _KNOWN)
"""Settings that go along with a tokenizer and do not make one."""


def tokenizer_folder_files(path: Path) -> list[Path]:
    """The tokenizer's files that `path`, a file or a folder of Hugging Face's or Meta's kind, stands for.

    Raises:
        ConversionError: there are none.
    """
    if path.is_file():
        beside = path.with_name(SETTINGS)  # it names the end of document
        return [path, beside] if path.name == MODEL_JSON and beside.is_file() else [path]
    if path.is_dir():
        found = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
        if any(file.name in _KNOWN for file in found):
            return found
        raise ConversionError(f"{path} has no tokenizer: none of {', '.join(_KNOWN)} is there")
    raise ConversionError(f"there is no tokenizer {path}; give its file, or the folder that holds it")


def saved_tokenizer_files(data: DataConfig, home: Path) -> list[Path]:
    """The files of the tokenizer that a checkpoint was trained with; none if one of them is gone.

    Args:
        home: the folder of the checkpoint's step folders; files that have moved along with it are in `tokenizer/`.
    """
    own = _own_folder(home)
    recorded = _recorded(data)
    places = [path for path in (_place(text, own) for text in recorded) if path is not None]
    if len(places) < len(recorded):
        return []
    if any(path.parent == own for path in places):
        return tokenizer_folder_files(own)  # with their companions
    return [file for path in places for file in tokenizer_folder_files(path)]


def missing_tokenizer(data: DataConfig, home: Path) -> str | None:
    """Which file of the tokenizer that a checkpoint was trained with is gone, and where it was looked for.

    Args:
        home: as in `saved_tokenizer_files`.
    """
    own = _own_folder(home)
    for text in _recorded(data):
        if _place(text, own) is None:
            looked = dict.fromkeys(str(folder) for folder in (Path(text).absolute().parent, own))
            return f"{text} is not there (looked in {' and '.join(looked)})"
    return None


def _recorded(data: DataConfig) -> list[str]:
    given = [data.tokenizer_model] if data.tokenizer_model else [data.vocab_file, data.merge_file]
    return [text for text in given if text is not None]


def _own_folder(home: Path) -> Path:
    return home.resolve() / "tokenizer"


def _place(text: str, own: Path) -> Path | None:
    return next((path for path in (Path(text), own / Path(text).name) if path.exists()), None)


def named_tokenizer_files(files: Sequence[Path]) -> dict[str, Path]:
    """Each file by the name it is looked for under. The model's own may be called anything: its content tells.

    Raises:
        ConversionError: several files, none of them of a known name, that are no pair of vocabulary and merges.
    """
    beside = {path.name: path for path in files if path.name in _COMPANIONS}
    models = [path for path in files if path.name not in _COMPANIONS]
    named = {path.name: path for path in models}
    if not models or any(name in _KNOWN for name in named):
        return {**named, **beside}
    if len(models) == 1:
        return {MODEL_JSON if _is_json(models[0]) else MODEL_SENTENCEPIECE: models[0], **beside}
    json_files = [path for path in models if _is_json(path)]
    if len(models) == 2 and len(json_files) == 1:
        return {VOCAB: json_files[0], MERGES: next(p for p in models if p not in json_files), **beside}
    raise ConversionError(
        f"these are no tokenizer: {', '.join(map(str, models))}; it has {MODEL_JSON}, {MODEL_SENTENCEPIECE}, or "
        f"{VOCAB} and {MERGES}"
    )


def has_tokenizer(files: Sequence[Path]) -> bool:
    """There are more than companions of a tokenizer."""
    return any(path.name not in _COMPANIONS for path in files)


def tokenizer_settings(named: dict[str, Path], folder: Path | None = None) -> DataConfig:
    """The settings of the tokenizer that these files make, read from `folder` (default: from where they are)."""
    place = {name: str(path if folder is None else folder / name) for name, path in named.items()}
    for name in (MODEL_JSON, MODEL_SENTENCEPIECE):
        if name in place:
            return DataConfig(tokenizer_model=place[name])
    return DataConfig(vocab_file=place.get(VOCAB), merge_file=place.get(MERGES))


def open_tokenizer(files: Sequence[Path]) -> Tokenizer | None:
    """The tokenizer that the files make, or None of none.

    Raises:
        ConfigError: they are garbled, incomplete, or need a package that is not installed.
    """
    return build_tokenizer(tokenizer_settings(named_tokenizer_files(files)), None)


def _is_json(path: Path) -> bool:
    return read_tokenizer_file(path).lstrip()[:1] == b"{"
