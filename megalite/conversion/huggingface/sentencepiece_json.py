"""A SentencePiece model as a tokenizer.json, the form that every version of transformers reads to the same ids.

The .model file is a protocol buffer (sentencepiece_model.proto of github.com/google/sentencepiece): its fields are read
here one by one, so that no other package is needed.
"""

import base64
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megalite.conversion.weights import ConversionError

# The field numbers of the messages, and the values of the enums.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_KIND = 1, 2, 3
_MODEL_TYPE, _SUFFIX_SPACES, _BYTE_FALLBACK = 3, 24, 35
_BOS, _EOS, _PAD = 41, 42, 43
_CHARACTER_MAP, _SPACE_IN_FRONT, _ONE_SPACE, _ESCAPED_SPACES = 2, 3, 4, 5
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2
_SPACE = "▁"


@dataclass(frozen=True)
class SentencePieceModel:
    """What a .model file says, as far as ids depend on it.

    Args:
        pieces: by id: text, score and kind.
        unigram: the unigram model; else byte-pair encoding.
        bos, eos, pad: ids; below 0: there is none.
        character_map: the compiled normalisation of characters; empty: none.
        space_in_front: a space is put in front of a text.
        one_space: runs of spaces become one, those at both ends none.
    """

    pieces: list[tuple[str, float, int]]
    unigram: bool
    byte_fallback: bool
    bos: int
    eos: int
    pad: int
    character_map: bytes
    space_in_front: bool
    one_space: bool
    unknown: int = field(init=False)

    def __post_init__(self) -> None:
        found = [i for i, (_, _, kind) in enumerate(self.pieces) if kind == _UNKNOWN]
        object.__setattr__(self, "unknown", found[0] if found else -1)


def parse_sentencepiece(content: bytes, where: str) -> SentencePieceModel:
    """Read a .model file.

    Raises:
        ConversionError: it is none, or of a kind that a tokenizer.json cannot say.
    """
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
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, text, special=kind != _USER)
            for i, (text, _, kind) in enumerate(model.pieces)
            if kind in (_UNKNOWN, _CONTROL, _USER)
        ],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(model)},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": _decoders(model)},
        "model": _unigram(model) if model.unigram else _bpe(model),
    }


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
    unknown = model.pieces[model.unknown][0] if model.unknown >= 0 else None
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "vocab": ids,
        "merges": [merge[-1] for merge in sorted(merges)],
    }


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


def _added(token_id: int, text: str, *, special: bool) -> dict[str, Any]:
    # A control piece is cut out of the text as it is given; pieces of users out of what its normalisation makes of it,
    # so that what is beside them is normalised in one.
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special}
    return {"id": token_id, "content": text, **flags, "special": special}


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
