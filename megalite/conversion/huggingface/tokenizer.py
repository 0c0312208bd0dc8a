"""Tokenizer files for a Hugging Face folder: those of one as they are, and others under the names that it has.

`AutoTokenizer` builds the tokenizer from tokenizer.json alone where tokenizer_config.json names the class
PreTrainedTokenizerFast, in all versions of transformers; other classes replace parts of it. So a tokenizer.json is made
where there is none. The fields of a SentencePiece model are read here one by one: the sentencepiece library shows the
pieces but not how text is normalized, and protobuf, which transformers uses, is not installed with it.
"""

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
from megalite.conversion.tokenizer_files import GENERATION, SETTINGS, named_tokenizer_files
from megalite.conversion.weights import ConversionError
from megalite.tokenizers.base import read_tokenizer_file
from megalite.tokenizers.build import is_tiktoken
from megalite.tokenizers.subword import END_OF_DOCUMENT, GPT2_END

# The field numbers of the messages, and the values of the enums.
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
    """What a .model file says, as far as ids depend on it."""

    pieces: list[tuple[str, float, int]]  # by id: text, score and kind
    unigram: bool  # the unigram model; else byte-pair encoding
    byte_fallback: bool
    bos: int  # ids; below 0: there is none
    eos: int  # ids; below 0: there is none
    pad: int  # ids; below 0: there is none
    character_map: bytes  # the compiled normalisation of characters; empty: none
    space_in_front: bool  # a space is put in front of a text
    one_space: bool  # runs of spaces become one, those at both ends none

    @cached_property
    def unknown(self) -> int:
        """The id of the unknown piece; -1: there is none."""
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
            raise ConversionError(f"{where}: {reason}; give a tokenizer.json of it as the model's tokenizer")
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
    """The tokenizer.json of the same ids: no start or end of text is added."""
    # A control piece is cut out of the text as it is given; pieces of users out of what its normalisation makes of it,
    # so that what is beside them is normalised in one.
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
    """SentencePiece merges the neighbours that make the piece of the best score; a merge list says it pair by pair."""
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
        # Pieces of users are normalised too before they are looked for: they must stay as they are.
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
    """The fields of the message under a number; none if it is not there."""
    found = [value for key, value in fields if key == number and isinstance(value, bytes)]
    return dict(_fields(found[-1])) if found else {}


def _signed(value: int) -> int:
    """A varint holds negative numbers as 64-bit two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(content: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Number and value of each field of a message: varints, 32-bit floats and bytes."""
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
    """A number in groups of 7 bits, the lowest first, and where the next field begins."""
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
"""How Qwen2's tokenizer cuts text into words."""
_PARSED = (SETTINGS, "special_tokens_map.json", "added_tokens.json", GENERATION)
_NAMED_TOKENS = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "pad_token_id": "pad_token"}


@dataclass(frozen=True)
class Exported:
    files: dict[str, bytes] = field(default_factory=dict)
    token_ids: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)


def export_tokenizer(paths: Sequence[Path], seq_length: int, family: str) -> Exported:
    """The files that make `AutoTokenizer` give the ids of the tokenizer in `paths`. Files of a Hugging Face folder (it
    has a tokenizer_config.json) stay as they are. Else the tokenizer is a tokenizer.json, a SentencePiece model, or
    vocab.json and merges.txt, under whatever names; its end of document is the eos token."""
    where = _named(paths)
    files = {name: read_tokenizer_file(path) for name, path in where.items()}
    parsed = {name: parse_json(files[name], where[name]) for name in _PARSED if name in files}
    for name, values in parsed.items():
        refuse_code(values, where[name])
    files.pop(GENERATION, None)
    generation = parsed.get(GENERATION, {})
    settings = parsed.get(SETTINGS)
    if settings is None and files:
        settings = _make_settings(files, where, seq_length)
        if family == "qwen2":
            _require_qwen2(files["tokenizer.json"])
        files[SETTINGS] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    token_ids = _token_ids(files, settings or {})
    token_ids |= {name: generation[name] for name in _NAMED_TOKENS if generation.get(name) is not None}
    return Exported(files, token_ids, generation)


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    try:
        found = named_tokenizer_files(paths)
        for path in (found[name] for name in ("tokenizer.model", "tokenizer.json") if name in found):
            if is_tiktoken(read_tokenizer_file(path)):
                raise ConversionError(f"{path} is tiktoken's; give a tokenizer.json, or --without-tokenizer")
    except ConfigError as error:
        raise ConversionError(str(error)) from None
    return found


def _make_settings(files: dict[str, bytes], where: Mapping[str, Path], seq_length: int) -> dict[str, Any]:
    """The tokenizer_config.json of a tokenizer that has none; adds a tokenizer.json to the files if they lack it."""
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
        raise ConversionError(f"{', '.join(map(str, where.values()))} are no tokenizer; give a tokenizer.json")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_length,
        "clean_up_tokenization_spaces": False,
        **tokens,
    }


def _require_qwen2(content: bytes) -> None:
    """transformers 5 takes Qwen2's own tokenizer class for every qwen2, which keeps no more than vocabulary and merges."""
    tokenizer = parse_json(content, "tokenizer.json")
    steps = tokenizer.get("pre_tokenizer") or {}
    split, *rest = steps.get("pretokenizers") or [{}]
    kinds = [step.get("type") for step in rest]
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    if (split.get("pattern"), kinds, normalizer) != ({"Regex": _QWEN2_WORDS}, ["ByteLevel"], "NFC"):
        raise ConversionError("transformers cuts text of a qwen2 as Qwen2's tokenizer does; use --without-tokenizer")


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
    """Ids of all tokens, added ones among them."""
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
