"""A tokenizer's files under the names that everybody looks for, and the settings that go with them."""

from collections.abc import Sequence
from pathlib import Path

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.conversion.huggingface.tokenizer import SETTINGS, TOKENIZER_FILES
from megalite.conversion.weights import ConversionError, Weights
from megalite.data.tokenizers.base import Tokenizer, read_tokenizer_file
from megalite.data.tokenizers.build import WITHOUT_FILES, build_tokenizer, look_into
from megalite.data.tokenizers.kind import TIKTOKEN, is_tiktoken

MODEL_JSON, MODEL_SENTENCEPIECE, VOCAB, MERGES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_KNOWN = (MODEL_JSON, MODEL_SENTENCEPIECE, VOCAB, MERGES)
_COMPANIONS = tuple(name for name in TOKENIZER_FILES if name not in _KNOWN)
"""Settings that go along with a tokenizer and do not make one."""
_NO_HINTS = DataConfig()


def tokenizer_folder_files(path: Path, kind: str | None = None) -> list[Path]:
    """The tokenizer's files that `path`, a file or a folder of Hugging Face's, Meta's or OpenAI's kind, stands for.

    Args:
        kind: the tokenizer_type, which says which of several in a folder is meant.

    Raises:
        ConversionError: there are none, or nothing tells which of several is meant.
    """
    if path.is_file():
        beside = path.with_name(SETTINGS)  # it names the end of document
        return [path, beside] if path.name == MODEL_JSON and beside.is_file() else [path]
    if path.is_dir():
        found = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
        names = {file.name for file in found}
        if kind is None and not names.isdisjoint(_KNOWN):
            return found
        if names.isdisjoint(_KNOWN) and not any(path.glob("*.tiktoken")):
            raise ConversionError(
                f"{path} has no tokenizer: none of {', '.join(_KNOWN)} and no .tiktoken file is there"
            )
        try:
            model, vocab_file, merge_file = look_into(path, kind)
        except ConfigError as error:
            raise ConversionError(str(error)) from None
        chosen = [Path(file) for file in (model, vocab_file, merge_file) if file is not None]
        return found if chosen[0].name == MODEL_JSON else chosen
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
    return [file for path in places for file in tokenizer_folder_files(path, data.tokenizer_type)]


def missing_tokenizer(data: DataConfig, home: Path) -> str | None:
    """That a file of the tokenizer that a checkpoint was trained with is gone: its place on record, and those looked at.

    Args:
        home: as in `saved_tokenizer_files`.
    """
    own = _own_folder(home)
    for text in _recorded(data):
        if _place(text, own) is None:
            looked = dict.fromkeys(str(folder) for folder in (Path(text).absolute().parent, own))
            return f"is not there (recorded as {text}, looked in {' and '.join(looked)})"
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

    tiktoken's is called tokenizer.model, as Meta calls Llama 3's.

    Raises:
        ConversionError: several files, none of them of a known name, that are no pair of vocabulary and merges.
    """
    beside = {path.name: path for path in files if path.name in _COMPANIONS}
    models = [path for path in files if path.name not in _COMPANIONS]
    named = {path.name: path for path in models}
    if len(models) == 1 and is_tiktoken(read_tokenizer_file(models[0])):
        return {MODEL_SENTENCEPIECE: models[0], **beside}
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


def tokenizer_settings(
    named: dict[str, Path], hints: DataConfig = _NO_HINTS, folder: Path | None = None
) -> DataConfig:
    """The settings of the tokenizer that these files make, read from `folder` (default: from where they are).

    Args:
        hints: `Weights.tokenizer_hints`; what has no effect on these files is left out.
    """
    if not named and hints.tokenizer_type in WITHOUT_FILES:
        return DataConfig(tokenizer_type=hints.tokenizer_type)
    place = {name: str(path if folder is None else folder / name) for name, path in named.items()}
    if MODEL_JSON in place:
        return DataConfig(tokenizer_model=place[MODEL_JSON])
    if MODEL_SENTENCEPIECE in place:
        takes_pattern = hints.tokenizer_type == TIKTOKEN or (
            hints.tiktoken_pattern is not None
            and is_tiktoken(read_tokenizer_file(named[MODEL_SENTENCEPIECE]))
        )
        pattern = hints.tiktoken_pattern if takes_pattern else None
        return DataConfig(tokenizer_model=place[MODEL_SENTENCEPIECE], tiktoken_pattern=pattern)
    return DataConfig(vocab_file=place.get(VOCAB), merge_file=place.get(MERGES))


def open_tokenizer(
    files: Sequence[Path], hints: DataConfig = _NO_HINTS, vocab_size: int | None = None
) -> Tokenizer | None:
    """The tokenizer that the files make, or None of none.

    Args:
        hints: see `tokenizer_settings`.
        vocab_size: of the model; read by NullTokenizer and by a tiktoken file in JSON.

    Raises:
        ConfigError: they are garbled, incomplete, or need a package that is not installed.
    """
    return build_tokenizer(tokenizer_settings(named_tokenizer_files(files), hints), vocab_size)


def tokenizer_of(weights: Weights) -> Tokenizer | None:
    """The tokenizer of a model, or None if it has none; raises as `open_tokenizer`."""
    return open_tokenizer(weights.tokenizer_files, weights.tokenizer_hints, weights.model.vocab_size)


def _is_json(path: Path) -> bool:
    return read_tokenizer_file(path).lstrip()[:1] == b"{"
