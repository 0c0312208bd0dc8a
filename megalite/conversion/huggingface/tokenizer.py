"""Tokenizer files for a Hugging Face folder: those of one as they are, and others under the names that it has.

`AutoTokenizer` builds the tokenizer from tokenizer.json alone where tokenizer_config.json names the class
PreTrainedTokenizerFast, in all versions of transformers; other classes replace parts of it. So a tokenizer.json is made
where there is none.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError
from megalite.conversion.huggingface.folder import parse_json, refuse_code
from megalite.conversion.huggingface.sentencepiece_json import parse_sentencepiece, sentencepiece_json
from megalite.conversion.weights import ConversionError
from megalite.data.tokenizers.base import read_tokenizer_file
from megalite.data.tokenizers.gpt2_bpe import END_OF_DOCUMENT as GPT2_END
from megalite.data.tokenizers.hugging_face import END_OF_DOCUMENT
from megalite.data.tokenizers.kind import is_tiktoken

GENERATION = "generation_config.json"
SETTINGS = "tokenizer_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *(SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", GENERATION),
)
"""Files beside the weights that travel with them."""

_QWEN2_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Qwen2's tokenizer cuts text into words."""
_PARSED = (SETTINGS, "special_tokens_map.json", "added_tokens.json", GENERATION)
_NAMED_TOKENS = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "pad_token_id": "pad_token"}


@dataclass(frozen=True)
class Exported:
    """The tokenizer of an exported folder.

    Args:
        files: content by name.
        token_ids: bos_token_id, eos_token_id, pad_token_id, as far as they are known.
        generation: what generation_config.json said, if it came along.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    token_ids: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)


def export_tokenizer(paths: Sequence[Path], seq_length: int, family: str) -> Exported:
    """The files that make `AutoTokenizer` give the ids of the tokenizer in `paths`.

    Files of a Hugging Face folder (told by its tokenizer_config.json) stay as they are. Else the tokenizer is a
    tokenizer.json, a SentencePiece model, or vocab.json and merges.txt, under whatever names; its end of document is
    the eos token.

    Args:
        paths: the files.
        seq_length: the longest sequence of the model.
        family: its model_type.

    Raises:
        ConversionError: a file cannot be read, is not of a tokenizer, is tiktoken's, or asks for code of its own; or
            transformers would make another tokenizer of it in a folder of that family.
    """
    files = _gather(paths)
    parsed = {name: parse_json(files[name], name) for name in _PARSED if name in files}
    for name, values in parsed.items():
        refuse_code(values, name)
    files.pop(GENERATION, None)
    generation = parsed.get(GENERATION, {})
    settings = parsed.get(SETTINGS)
    if settings is None and files:
        settings = _make_settings(files, seq_length)
        if family == "qwen2":
            _require_qwen2(files["tokenizer.json"])
        files[SETTINGS] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    token_ids = _token_ids(files, settings or {})
    token_ids |= {name: generation[name] for name in _NAMED_TOKENS if generation.get(name) is not None}
    return Exported(files, token_ids, generation)


def _gather(paths: Sequence[Path]) -> dict[str, bytes]:
    """The content of the files by the name that each has in a Hugging Face folder."""
    found: dict[str, bytes] = {}
    for path in paths:
        try:
            content = read_tokenizer_file(path)
        except ConfigError as error:
            raise ConversionError(str(error)) from None
        name = _canonical_name(path, content)
        if name in found and found[name] != content:
            raise ConversionError(f"{path}: a second {name}; a model has one tokenizer")
        found[name] = content
    return found


def _canonical_name(path: Path, content: bytes) -> str:
    # Lines of a merges.txt could look like tiktoken's.
    if path.suffix != ".txt" and is_tiktoken(content):
        raise ConversionError(
            f"{path} is a tiktoken file, of which transformers makes no tokenizer; leave it out (--without-tokenizer), or "
            "give the tokenizer.json of the same model with --tokenizer-model"
        )
    if path.name in TOKENIZER_FILES:
        return path.name
    if content.lstrip()[:1] == b"{":
        # In a vocab.json, "model" may be a word.
        is_whole = isinstance(parse_json(content, path).get("model"), dict)
        return "tokenizer.json" if is_whole else "vocab.json"
    return "merges.txt" if path.suffix == ".txt" else "tokenizer.model"


def _make_settings(files: dict[str, bytes], seq_length: int) -> dict[str, Any]:
    """The tokenizer_config.json of a tokenizer that has none; adds a tokenizer.json to the files if they lack it."""
    tokens: dict[str, str] = {}
    if "tokenizer.json" in files:
        vocabulary = _vocabulary(files)
        present = [token for token in END_OF_DOCUMENT if token in vocabulary]
        tokens = {"eos_token": present[0]} if present else {}
    elif "tokenizer.model" in files:
        model = parse_sentencepiece(files["tokenizer.model"], "tokenizer.model")
        files["tokenizer.json"] = _compact(sentencepiece_json(model))
        ids = {
            "bos_token": model.bos,
            "eos_token": model.eos,
            "pad_token": model.pad,
            "unk_token": model.unknown,
        }
        tokens = {name: model.pieces[i][0] for name, i in ids.items() if 0 <= i < len(model.pieces)}
    elif "vocab.json" in files and "merges.txt" in files:
        files["tokenizer.json"] = _compact(_byte_level_bpe(files["vocab.json"], files["merges.txt"]))
        tokens = {name: GPT2_END for name in ("bos_token", "eos_token", "unk_token")}
    else:
        raise ConversionError(
            f"{', '.join(files)} do not make a tokenizer; give tokenizer.json, tokenizer.model, or vocab.json and "
            "merges.txt"
        )
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_length,
        "clean_up_tokenization_spaces": False,
        **tokens,
    }


def _require_qwen2(content: bytes) -> None:
    """transformers 5 takes Qwen2's own tokenizer class for every qwen2, which keeps no more than vocabulary and merges.

    Raises:
        ConversionError: the tokenizer is another, so that its ids would come out differently.
    """
    tokenizer = parse_json(content, "tokenizer.json")
    steps = tokenizer.get("pre_tokenizer") or {}
    split, *rest = steps.get("pretokenizers") or [{}]
    kinds = [step.get("type") for step in rest]
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    if (split.get("pattern"), kinds, normalizer) != ({"Regex": _QWEN2_WORDS}, ["ByteLevel"], "NFC"):
        raise ConversionError(
            "transformers gives every qwen2 model the tokenizer class of Qwen2, which would cut text into other tokens "
            "than this model's tokenizer does; leave the tokenizer out (--without-tokenizer) and load it by itself"
        )


def _byte_level_bpe(vocabulary: bytes, merges: bytes) -> dict[str, Any]:
    """GPT-2's tokenizer as a tokenizer.json."""
    ids = parse_json(vocabulary, "vocab.json")
    if type(ids.get(GPT2_END)) is not int:
        raise ConversionError(
            f"vocab.json: {GPT2_END} is not in the vocabulary; add it with an id of its own"
        )
    try:
        lines = [line.rstrip("\r") for line in merges.decode("utf-8").split("\n")]
    except UnicodeDecodeError as error:
        raise ConversionError(f"merges.txt: not UTF-8: {error}") from None
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[GPT2_END], "content": GPT2_END, **flags}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": ids,
            "merges": [line for line in lines if line and not line.startswith("#version")],
        },
    }


def _token_ids(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> dict[str, int]:
    """The ids of the tokens that tokenizer_config.json names."""
    vocabulary = _vocabulary(files)
    found = {}
    for id_name, name in _NAMED_TOKENS.items():
        token = settings.get(name)
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str) and text in vocabulary:
            found[id_name] = vocabulary[text]
    return found


def _vocabulary(files: Mapping[str, bytes]) -> dict[str, int]:
    """Ids of all tokens, added ones among them."""
    if "tokenizer.json" in files:
        content = parse_json(files["tokenizer.json"], "tokenizer.json")
        model = content.get("model")
        vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
        if isinstance(vocabulary, list):  # unigram: [piece, score] in the order of ids
            vocabulary = {
                entry[0]: i for i, entry in enumerate(vocabulary) if isinstance(entry, list) and entry
            }
        if not isinstance(vocabulary, Mapping):
            raise ConversionError("tokenizer.json: it has no model.vocab; give a Hugging Face tokenizer.json")
        added = content.get("added_tokens") or []
        pairs = [(token.get("content"), token.get("id")) for token in added if isinstance(token, Mapping)]
        items = [*vocabulary.items(), *pairs]
    elif "tokenizer.model" in files:
        pieces = parse_sentencepiece(files["tokenizer.model"], "tokenizer.model").pieces
        items = [(text, i) for i, (text, _, _) in enumerate(pieces)]
    elif "vocab.json" in files:
        items = list(parse_json(files["vocab.json"], "vocab.json").items())
    else:
        items = []
    return {text: i for text, i in items if isinstance(text, str) and type(i) is int}


def _compact(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
