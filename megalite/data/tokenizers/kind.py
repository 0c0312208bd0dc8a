"""Which tokenizer a file holds, told by its content."""

import json
import re
from pathlib import Path

from megalite.config.errors import ConfigError

SENTENCEPIECE, HUGGING_FACE, TIKTOKEN = "SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer"
DESCRIPTIONS = {HUGGING_FACE: "a Hugging Face tokenizer.json", TIKTOKEN: "a tiktoken file"}
_MARK = b"\xef\xbb\xbf"
_OBJECT = re.compile(rb'\s*\{\s*["}]')
_MODEL = re.compile(rb'"model"\s*:\s*\{')
_LIST = re.compile(rb"\s*\[\s*[{\]]")
_RANKED = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(\n|\Z)")


def tell_kind(content: bytes, path: str | Path) -> str:
    """Kind of tokenizer: a JSON object is Hugging Face's, a JSON list or lines of base64 and a number are tiktoken's.

    Anything else may be SentencePiece's protocol buffer, which has no mark that it could be told by.

    Raises:
        ConfigError: it is half of a GPT-2 BPE, which --vocab-file and --merge-file take.
    """
    plain = content.removeprefix(_MARK)
    if plain.startswith(b"#version"):
        raise ConfigError(
            f"{path} is the merges.txt of a GPT-2 BPE; give --merge-file {path} and --vocab-file"
        )
    if _OBJECT.match(plain):
        # "model" may be a word of a vocabulary; only in a tokenizer.json is it an object.
        if not _MODEL.search(plain) and _is_vocabulary(plain):
            raise ConfigError(
                f"{path} is the vocab.json of a GPT-2 BPE; give --vocab-file {path} and --merge-file"
            )
        return HUGGING_FACE
    return TIKTOKEN if is_tiktoken(content) else SENTENCEPIECE


def is_tiktoken(content: bytes) -> bool:
    """The rule of `tell_kind` for tiktoken's files alone; raises nothing."""
    plain = content.removeprefix(_MARK)
    return bool(_LIST.match(plain) or _RANKED.match(plain))


def _is_vocabulary(content: bytes) -> bool:
    try:
        values = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and bool(values) and all(type(i) is int for i in values.values())
