"""Write the tokenizer files of a Hugging Face folder. Files from such a folder are copied, others are converted.

If tokenizer_config.json names the class PreTrainedTokenizerFast, `AutoTokenizer` in all versions of transformers builds
the tokenizer from tokenizer.json alone; other classes replace parts of it. So a missing tokenizer.json is created.
This module parses SentencePiece models itself, because the sentencepiece library does not expose the normalization of
text, and protobuf, which transformers uses, is not installed with it."""

import base64
import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError
from megalite.conversion.huggingface.config_json import parse_json, refuse_code
from megalite.conversion.model_folder import GENERATION, named_tokenizer_files
from megalite.conversion.weights import ConversionError
from megalite.tokenizers.base import END_OF_DOCUMENT, GPT2_END, SETTINGS_NAME, read_tokenizer_file
from megalite.tokenizers.build import is_tiktoken

# Protobuf field numbers and enum values of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_KIND = 1, 2, 3
_MODEL_TYPE, _SUFFIX_SPACES, _BYTE_FALLBACK = 3, 24, 35
_BOS, _EOS, _PAD = 41, 42, 43
_CHARACTER_MAP, _SPACE_IN_FRONT, _ONE_SPACE, _ESCAPED_SPACES = 2, 3, 4, 5
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_UNIGRAM, _BPE = 1, 2
_SPACE = "▁"


@dataclass(frozen=True)
class SentencePieceModel:
    """The fields of a .model file that determine ids."""

    pieces: list[tuple[str, float, int]]  # by id: text, score and kind
    unigram: bool  # unigram model; otherwise byte-pair encoding
    byte_fallback: bool
    bos: int  # id; negative: none
    eos: int  # id; negative: none
    pad: int  # id; negative: none
    character_map: bytes  # compiled normalization of characters; empty: none
    space_in_front: bool  # add a space in front of a text
    one_space: bool  # collapse runs of spaces, and strip spaces at both ends

    @cached_property
    def unknown(self) -> int:
        """Id of the unknown piece; -1 if there is none."""
        return next((i for i, (_, _, kind) in enumerate(self.pieces) if kind == _UNKNOWN), -1)


def parse_sentencepiece(content: bytes, where: Path | str) -> SentencePieceModel:
    try:
        fields = list(_fields(content))
        trainer = _last(fields, _TRAINER)
        normalizer = _last(fields, _NORMALIZER)
        pieces = [_piece(value) for number, value in fields if number == _PIECES and isinstance(value, bytes)]
    except (IndexError, ValueError, struct.error) as error:
        raise ConversionError(f"{where}: not a SentencePiece model: {error}") from None
    kind = trainer.get(_MODEL_TYPE, _UNIGRAM)
    unlike = {
        "its model is neither unigram nor bpe": kind not in (_UNIGRAM, _BPE),
        "spaces end its pieces (treat_whitespace_as_suffix)": trainer.get(_SUFFIX_SPACES, 0),
        "spaces are not escaped (escape_whitespaces)": not normalizer.get(_ESCAPED_SPACES, 1),
        "it has no pieces": not pieces,
    }
    for reason, holds in unlike.items():
        if holds:
            raise ConversionError(f"{where}: {reason}; give the tokenizer as a tokenizer.json")
    return SentencePieceModel(
        pieces=pieces,
        unigram=kind == _UNIGRAM,
        byte_fallback=bool(trainer.get(_BYTE_FALLBACK, 0)),
        bos=_signed(trainer.get(_BOS, 1)),
        eos=_signed(trainer.get(_EOS, 2)),
        pad=_signed(trainer.get(_PAD, -1)),
        character_map=normalizer.get(_CHARACTER_MAP, b""),
        space_in_front=bool(normalizer.get(_SPACE_IN_FRONT, 1)),
        one_space=bool(normalizer.get(_ONE_SPACE, 1)),
    )


def sentencepiece_json(model: SentencePieceModel) -> dict[str, Any]:
    """Return a tokenizer.json that produces the same ids. It adds no start or end of text."""
    # Control pieces are matched in the original text, user-defined pieces in the normalized text, so that the text around
    # the latter is normalized as a whole.
    added = [
        _added(i, text, special=kind != _USER)
        for i, (text, _, kind) in enumerate(model.pieces)
        if kind in (_UNKNOWN, _CONTROL, _USER)
    ]
    return _tokenizer_json(
        added,
        normalizer={"type": "Sequence", "normalizers": _normalizers(model)},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": _decoders(model)},
        model=_unigram(model) if model.unigram else _bpe(model),
    )


def _tokenizer_json(added: list[dict[str, Any]], **steps: Any) -> dict[str, Any]:
    order = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return {**head, **{name: steps.get(name) for name in order}}


def _added(token_id: int, text: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special}
    return {"id": token_id, "content": text, **flags, "special": special}


def _unigram(model: SentencePieceModel) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": model.unknown if model.unknown >= 0 else None,
        "vocab": [[text, score] for text, score, _ in model.pieces],
        "byte_fallback": model.byte_fallback,
    }


def _bpe(model: SentencePieceModel) -> dict[str, Any]:
    """Convert scores to a merge list: SentencePiece merges the adjacent pieces that give the piece of the best score."""
    ids = {text: i for i, (text, _, _) in enumerate(model.pieces)}
    scores = {text: score for text, score, kind in model.pieces if kind == _NORMAL}
    merges = []
    for text, score in scores.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in scores and right in scores:
                merges.append((-score, ids[text], ids[left], ids[right], f"{left} {right}"))
    return _bpe_json(
        ids,
        [merge[-1] for merge in sorted(merges)],
        unk_token=model.pieces[model.unknown][0] if model.unknown >= 0 else None,
        affix=None,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _bpe_json(vocab: dict[str, int], merges: list[str], *, affix: str | None, **settings: Any) -> dict[str, Any]:
    affixes = {"continuing_subword_prefix": affix, "end_of_word_suffix": affix}
    head = {"type": "BPE", "dropout": None, "unk_token": settings.pop("unk_token")}
    return {**head, **affixes, **settings, "vocab": vocab, "merges": merges}


def _normalizers(model: SentencePieceModel) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if model.character_map:
        text = base64.b64encode(model.character_map).decode()
        found.append({"type": "Precompiled", "precompiled_charsmap": text})
    if model.one_space:
        found.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        found.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    users = [re.escape(text) for text, _, kind in model.pieces if kind == _USER]
    if model.space_in_front and users:
        # User-defined pieces are normalized before matching, so a text that is one of them must get no space.
        none = rf"\A(?!(?:{'|'.join(users)})?\z)"
        found.append({"type": "Replace", "pattern": {"Regex": none}, "content": _SPACE})
    elif model.space_in_front:
        found.append({"type": "Prepend", "prepend": _SPACE})
    found.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return found


def _decoders(model: SentencePieceModel) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.space_in_front:
        found.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return found


def _piece(content: bytes) -> tuple[str, float, int]:
    values = dict(_fields(content))
    text, score, kind = values[_PIECE_TEXT], values.get(_PIECE_SCORE, 0.0), values.get(_PIECE_KIND, _NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, float) or not isinstance(kind, int):
        raise ValueError("a piece has fields of other types")
    return text.decode("utf-8"), score, kind


def _last(fields: list[tuple[int, int | float | bytes]], number: int) -> dict[int, Any]:
    """Return the fields of the last submessage with a field number; empty if there is none."""
    found = [value for key, value in fields if key == number and isinstance(value, bytes)]
    return dict(_fields(found[-1])) if found else {}


def _signed(value: int) -> int:
    """Decode a varint's 64-bit two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(content: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield number and value of each field of a protobuf message: varints, 32-bit floats and bytes."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(content, at)
            yield number, value
        elif wire == 5:
            yield number, struct.unpack_from("<f", content, at)[0]
            at += 4
        elif wire in (1, 2):
            size, at = (8, at) if wire == 1 else _varint(content, at)
            if at + size > len(content):
                raise ValueError("the file ends inside a field")
            yield number, content[at : at + size]
            at += size
        else:
            raise ValueError(f"a field of the unknown wire type {wire}")


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Decode a varint (groups of 7 bits, lowest first). Return it and the offset after it."""
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Regular expression with which Qwen2's tokenizer splits text into words."""
_PARSED = (SETTINGS_NAME, "special_tokens_map.json", "added_tokens.json", GENERATION)
_NAMED_TOKENS = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "pad_token_id": "pad_token"}


@dataclass(frozen=True)
class Exported:
    files: dict[str, bytes] = field(default_factory=dict)
    token_ids: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)


def export_tokenizer(paths: Sequence[Path], seq_length: int, family: str) -> Exported:
    """Return files with which `AutoTokenizer` produces the ids of the tokenizer in `paths`. Files of a Hugging Face
    folder (with a tokenizer_config.json) are copied. Otherwise the tokenizer is a tokenizer.json, a SentencePiece
    model, or vocab.json and merges.txt, with any file names; its end of document becomes the eos token."""
    where = _named(paths)
    files = {name: read_tokenizer_file(path) for name, path in where.items()}
    parsed = {name: parse_json(files[name], where[name]) for name in _PARSED if name in files}
    for name, values in parsed.items():
        refuse_code(values, where[name])
    files.pop(GENERATION, None)
    generation = parsed.get(GENERATION, {})
    settings = parsed.get(SETTINGS_NAME)
    if settings is None and files:
        settings = _make_settings(files, where, seq_length)
        if family == "qwen2":
            _require_qwen2(files["tokenizer.json"])
        files[SETTINGS_NAME] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    token_ids = _token_ids(files, settings or {})
    token_ids |= {name: generation[name] for name in _NAMED_TOKENS if generation.get(name) is not None}
    return Exported(files, token_ids, generation)


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    try:
        found = named_tokenizer_files(paths)
        for path in (found[name] for name in ("tokenizer.model", "tokenizer.json") if name in found):
            if is_tiktoken(read_tokenizer_file(path)):
                raise ConversionError(f"{path} is a tiktoken file; give a tokenizer.json, or --without-tokenizer")
    except ConfigError as error:
        raise ConversionError(str(error)) from None
    return found


def _make_settings(files: dict[str, bytes], where: Mapping[str, Path], seq_length: int) -> dict[str, Any]:
    """Create a tokenizer_config.json. Also add a tokenizer.json to the files if it is missing."""
    tokens: dict[str, str] = {}
    if "tokenizer.json" in files:
        vocabulary = _vocabulary(files)
        present = [token for token in END_OF_DOCUMENT if token in vocabulary]
        tokens = {"eos_token": present[0]} if present else {}
    elif "tokenizer.model" in files:
        model = parse_sentencepiece(files["tokenizer.model"], where["tokenizer.model"])
        files["tokenizer.json"] = _compact(sentencepiece_json(model))
        ids = {"bos_token": model.bos, "eos_token": model.eos, "pad_token": model.pad, "unk_token": model.unknown}
        tokens = {name: model.pieces[i][0] for name, i in ids.items() if 0 <= i < len(model.pieces)}
    elif "vocab.json" in files and "merges.txt" in files:
        files["tokenizer.json"] = _compact(_byte_level_bpe(files, where))
        tokens = {name: GPT2_END for name in ("bos_token", "eos_token", "unk_token")}
    else:
        raise ConversionError(f"{', '.join(map(str, where.values()))} are not a tokenizer; give a tokenizer.json")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_length,
        "clean_up_tokenization_spaces": False,
        **tokens,
    }


def _require_qwen2(content: bytes) -> None:
    """Reject other tokenizers for qwen2: transformers 5 always uses Qwen2's tokenizer class for this family, which keeps
    only vocabulary and merges."""
    tokenizer = parse_json(content, "tokenizer.json")
    steps = tokenizer.get("pre_tokenizer") or {}
    split, *rest = steps.get("pretokenizers") or [{}]
    kinds = [step.get("type") for step in rest]
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    if (split.get("pattern"), kinds, normalizer) != ({"Regex": _QWEN2_WORDS}, ["ByteLevel"], "NFC"):
        raise ConversionError("transformers splits text of a qwen2 like Qwen2's tokenizer; use --without-tokenizer")


def _byte_level_bpe(files: Mapping[str, bytes], where: Mapping[str, Path]) -> dict[str, Any]:
    ids = parse_json(files["vocab.json"], where["vocab.json"])
    if type(ids.get(GPT2_END)) is not int:
        raise ConversionError(f"{where['vocab.json']}: {GPT2_END} is not in the vocabulary; add it with a new id")
    try:
        lines = [line.rstrip("\r") for line in files["merges.txt"].decode("utf-8").split("\n")]
    except UnicodeDecodeError as error:
        raise ConversionError(f"{where['merges.txt']}: not UTF-8: {error}") from None
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    merges = [line for line in lines if line and not line.startswith("#version")]
    return _tokenizer_json(
        [_added(ids[GPT2_END], GPT2_END, special=True)],
        normalizer=None,
        pre_tokenizer=byte_level,
        decoder=byte_level,
        model=_bpe_json(ids, merges, unk_token=None, affix="", fuse_unk=False, byte_fallback=False),
    )


def _token_ids(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = _vocabulary(files)
    found = {}
    for id_name, name in _NAMED_TOKENS.items():
        token = settings.get(name)
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str) and text in vocabulary:
            found[id_name] = vocabulary[text]
    return found


def _vocabulary(files: Mapping[str, bytes]) -> dict[str, int]:
    """Return the ids of all tokens, including added ones."""
    if "tokenizer.json" in files:
        content = parse_json(files["tokenizer.json"], "tokenizer.json")
        model = content.get("model")
        vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
        if isinstance(vocabulary, list):  # unigram: [piece, score] in the order of ids
            vocabulary = {entry[0]: i for i, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
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
