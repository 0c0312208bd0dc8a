"""From the tokenizer settings to a tokenizer."""

from pathlib import Path

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.data.tokenizers.base import Tokenizer, read_tokenizer_file
from megalite.data.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megalite.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megalite.data.tokenizers.null import NullTokenizer
from megalite.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

_MODEL_NAMES = ("tokenizer.json", "tokenizer.model")


def build_tokenizer(data: DataConfig, vocab_size: int | None) -> Tokenizer | None:
    """The tokenizer that `data` names, or None if it names none.

    Without tokenizer_type, vocab_file and merge_file make a GPT-2 BPE, and tokenizer_model is told by its content.
    tokenizer_model may be a folder that holds tokenizer.json, tokenizer.model, or vocab.json and merges.txt.

    Args:
        data: its tokenizer_type, tokenizer_model, vocab_file and merge_file are read.
        vocab_size: for NullTokenizer, which has no file to tell it.

    Raises:
        ConfigError: a file is missing or garbled, or the settings do not go together.
    """
    model, vocab_file, merge_file = data.tokenizer_model, data.vocab_file, data.merge_file
    if model is not None and (vocab_file is not None or merge_file is not None):
        raise ConfigError(
            f"tokenizer_model {model} and vocab_file {vocab_file} / merge_file {merge_file} are given at once; "
            "a tokenizer has either one model file or a vocab.json and a merges.txt"
        )
    if model is not None and Path(model).is_dir():
        model, vocab_file, merge_file = _look_into(Path(model))
    kind = data.tokenizer_type or _tell_kind(model, vocab_file, merge_file)
    if kind is None:
        return None
    if kind == "NullTokenizer":
        _refuse(kind, tokenizer_model=model, vocab_file=vocab_file, merge_file=merge_file)
        return NullTokenizer(vocab_size)
    if kind == "GPT2BPETokenizer":
        _refuse(kind, tokenizer_model=model)
        if vocab_file is None or merge_file is None:
            raise ConfigError(
                f"{kind} needs vocab_file and merge_file, got {vocab_file} and {merge_file}; "
                "give --vocab-file vocab.json --merge-file merges.txt"
            )
        return GPT2BPETokenizer(vocab_file, merge_file)
    _refuse(kind, vocab_file=vocab_file, merge_file=merge_file)
    if kind not in ("SentencePieceTokenizer", "HuggingFaceTokenizer"):
        raise ConfigError(
            f"tokenizer_type {kind} is unknown; use SentencePieceTokenizer, GPT2BPETokenizer, HuggingFaceTokenizer or "
            "NullTokenizer"
        )
    if model is None:
        example = "tokenizer.model" if kind == "SentencePieceTokenizer" else "tokenizer.json"
        raise ConfigError(f"{kind} needs tokenizer_model, which is not set; give --tokenizer-model {example}")
    return SentencePieceTokenizer(model) if kind == "SentencePieceTokenizer" else HuggingFaceTokenizer(model)


def _look_into(folder: Path) -> tuple[str | None, str | None, str | None]:
    """(model, vocab_file, merge_file) of a folder as Hugging Face and Meta lay them out."""
    for name in _MODEL_NAMES:
        if (folder / name).is_file():
            return str(folder / name), None, None
    vocab_file, merge_file = folder / "vocab.json", folder / "merges.txt"
    if vocab_file.is_file() and merge_file.is_file():
        return None, str(vocab_file), str(merge_file)
    raise ConfigError(
        f"tokenizer_model {folder} is a folder without {' or '.join(_MODEL_NAMES)} or vocab.json and merges.txt; "
        "give the path of the model file"
    )


def _tell_kind(model: str | None, vocab_file: str | None, merge_file: str | None) -> str | None:
    if vocab_file is not None or merge_file is not None:
        return "GPT2BPETokenizer"
    if model is None:
        return None
    # A SentencePiece model is a protocol buffer; it never starts with a brace.
    is_json = model.endswith(".json") or read_tokenizer_file(model).lstrip()[:1] == b"{"
    return "HuggingFaceTokenizer" if is_json else "SentencePieceTokenizer"


def _refuse(kind: str, **settings: str | None) -> None:
    """Settings that this kind would not read are a mistake, not a default."""
    for name, value in settings.items():
        if value is not None:
            raise ConfigError(f"{kind} does not read {name} ({value}); leave it out or change tokenizer_type")
