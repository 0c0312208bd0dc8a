"""Build a tokenizer from its settings; the kind of a file is detected from its content."""

import codecs
import json
import re
from pathlib import Path

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.tokenizers.base import ByteLevelTokenizer, NullTokenizer, Tokenizer, read_tokenizer_file
from megalite.tokenizers.subword import GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer
from megalite.tokenizers.tiktoken_tokenizer import TikTokenizer

SENTENCEPIECE, HUGGING_FACE, TIKTOKEN = "SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer"
_GPT2 = "GPT2BPETokenizer"
GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # Hugging Face's names, and OpenAI's
WITHOUT_FILES = ("NullTokenizer", "ByteLevelTokenizer")  # kinds that need no file
_DESCRIPTIONS = {HUGGING_FACE: "a Hugging Face tokenizer.json", TIKTOKEN: "a tiktoken file"}
_EXAMPLES = {SENTENCEPIECE: "tokenizer.model", HUGGING_FACE: "tokenizer.json", TIKTOKEN: "cl100k_base.tiktoken"}
_OBJECT = re.compile(rb'\s*\{\s*["}]')
_MODEL = re.compile(rb'"model"\s*:\s*\{')
_LIST = re.compile(rb"\s*\[\s*[{\]]")
_RANKED = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(\n|\Z)")


def build_tokenizer(data: DataConfig, vocab_size: int | None) -> Tokenizer | None:
    """Build the tokenizer of a config; return None if no tokenizer is set.

    Without tokenizer_type, vocab_file and merge_file mean a GPT-2 BPE, and the content of tokenizer_model determines
    the kind. tokenizer_model may be a folder with tokenizer.json, tokenizer.model, one .tiktoken file, or vocab.json
    and merges.txt (encoder.json and vocab.bpe): the first of them, of tokenizer_type if that is set.

    `data`: tokenizer_type, tokenizer_model, vocab_file, merge_file and tiktoken_pattern are read. `vocab_size`: for
    NullTokenizer and for a tiktoken file in JSON. Raises ConfigError if a file is missing or damaged, or the settings
    contradict each other."""
    model, vocab_file, merge_file = data.tokenizer_model, data.vocab_file, data.merge_file
    if model is not None and (vocab_file is not None or merge_file is not None):
        raise ConfigError(f"tokenizer_model {model} excludes vocab_file {vocab_file} and merge_file {merge_file}")
    if data.tokenizer_type in WITHOUT_FILES:
        files = ("tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern")
        _refuse(data.tokenizer_type, **{name: getattr(data, name) for name in files})
        return NullTokenizer(vocab_size) if data.tokenizer_type == "NullTokenizer" else ByteLevelTokenizer()
    if model is not None and Path(model).is_dir():
        model, vocab_file, merge_file = find_tokenizer_files(Path(model), data.tokenizer_type)
    kind = data.tokenizer_type or _kind_of(model, vocab_file, merge_file)
    if kind is None:
        if data.tiktoken_pattern is not None:
            raise ConfigError(f"tiktoken_pattern ({data.tiktoken_pattern}) needs --tokenizer-model FILE")
        return None
    if kind == SENTENCEPIECE and data.tokenizer_type is None and data.tiktoken_pattern is not None:
        kind = TIKTOKEN  # the content is ambiguous, and only this kind has the setting
    if kind != TIKTOKEN and data.tiktoken_pattern is not None:
        raise ConfigError(f"{kind} ({model or vocab_file}) does not read tiktoken_pattern ({data.tiktoken_pattern})")
    if kind == _GPT2:
        _refuse(kind, tokenizer_model=model)
        if vocab_file is None or merge_file is None:
            raise ConfigError(f"{kind} needs --vocab-file and --merge-file, got {vocab_file} and {merge_file}")
        return GPT2BPETokenizer(vocab_file, merge_file)
    _refuse(kind, vocab_file=vocab_file, merge_file=merge_file)
    if kind not in _EXAMPLES:
        raise ConfigError(f"tokenizer_type {kind} is unknown; use {', '.join((*_EXAMPLES, _GPT2, *WITHOUT_FILES))}")
    if model is None:
        raise ConfigError(f"{kind} needs tokenizer_model, which is not set; give --tokenizer-model {_EXAMPLES[kind]}")
    detected = detect_kind(read_tokenizer_file(model), model)
    if detected != kind and detected in _DESCRIPTIONS:
        raise ConfigError(f"tokenizer_model {model} is {_DESCRIPTIONS[detected]}; use --tokenizer-type {detected}")
    if kind == TIKTOKEN:
        return TikTokenizer(model, data.tiktoken_pattern, vocab_size)
    return SentencePieceTokenizer(model) if kind == SENTENCEPIECE else HuggingFaceTokenizer(model)


def find_tokenizer_files(folder: Path, wanted: str | None) -> tuple[str | None, str | None, str | None]:
    """Return (model, vocab_file, merge_file) of a folder in the layout of Hugging Face, Meta or OpenAI. `wanted`: the
    tokenizer_type; selects the first tokenizer of this kind. Raises ConfigError if there is no tokenizer, or the
    choice is ambiguous."""
    ranked = sorted(folder.glob("*.tiktoken"))
    named = [folder / name for name in ("tokenizer.json", "tokenizer.model") if (folder / name).is_file()]
    models = [*named, *ranked]
    if wanted is not None and len(models) > 1:
        models = [path for path in models if detect_kind(read_tokenizer_file(path), path) == wanted] or models
    for names in GPT2_FILES:
        vocab_file, merge_file = (folder / name for name in names)
        if vocab_file.is_file() and merge_file.is_file() and (wanted == _GPT2 or not models):
            return None, str(vocab_file), str(merge_file)
    if models and models[0] in ranked and len(ranked) > 1:
        raise ConfigError(f"tokenizer_model {folder} holds {', '.join(path.name for path in ranked[:5])}; give one")
    if models:
        return str(models[0]), None, None
    raise ConfigError(
        f"tokenizer_model {folder} holds no tokenizer.json, tokenizer.model, .tiktoken, or vocab.json and merges.txt; give a file"
    )


def detect_kind(content: bytes, path: str | Path) -> str:
    """Detect the kind of a tokenizer: a JSON object is Hugging Face's, a JSON list or lines of base64 and a number are
    tiktoken's, and everything else may be SentencePiece's protocol buffer, which has no magic number. Raises
    ConfigError for one file of a GPT-2 BPE, which needs --vocab-file and --merge-file."""
    plain = content.removeprefix(codecs.BOM_UTF8)
    half = "merge" if plain.startswith(b"#version") else None
    if _OBJECT.match(plain):
        # A vocabulary may contain the word "model", but only a tokenizer.json has an object under that key.
        if _MODEL.search(plain) or not _is_vocabulary(plain):
            return HUGGING_FACE
        half = "vocab"
    if half is not None:
        name, other = ("merges.txt", "vocab") if half == "merge" else ("vocab.json", "merge")
        raise ConfigError(f"{path} is the {name} of a GPT-2 BPE; give --{half}-file {path} and --{other}-file")
    return TIKTOKEN if is_tiktoken(content) else SENTENCEPIECE


def is_tiktoken(content: bytes) -> bool:
    """Return whether `detect_kind` would classify the content as tiktoken's; never raises."""
    plain = content.removeprefix(codecs.BOM_UTF8)
    return bool(_LIST.match(plain) or _RANKED.match(plain))


def is_tiktoken_model(model: str) -> bool:
    """Return whether a tokenizer_model, a file or a folder, is tiktoken's. Raises ConfigError if it cannot be read."""
    file = find_tokenizer_files(Path(model), None)[0] if Path(model).is_dir() else model
    return file is not None and is_tiktoken(read_tokenizer_file(file))


def _is_vocabulary(content: bytes) -> bool:
    try:
        values = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and bool(values) and all(type(i) is int for i in values.values())


def _kind_of(model: str | None, vocab_file: str | None, merge_file: str | None) -> str | None:
    if vocab_file is not None or merge_file is not None:
        return _GPT2
    return None if model is None else detect_kind(read_tokenizer_file(model), model)


def _refuse(kind: str, **settings: str | None) -> None:
    """Raise ConfigError for settings that this kind does not read."""
    for name, value in settings.items():
        if value is not None:
            raise ConfigError(f"{kind} does not read {name} ({value}); leave it out or change tokenizer_type")
