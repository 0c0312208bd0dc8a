"""Properties of all kinds of tokenizers, each compared with its library."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.tokenizers.base import ByteLevelTokenizer, NullTokenizer, Tokenizer
from megalite.tokenizers.build import build_tokenizer
from megalite.tokenizers.tiktoken_tokenizer import PATTERNS
from tests.tokenizers.texts import ANY_TEXT, AWKWARD, SOURCE, TEXTS, ranks_of

tokenizers = pytest.importorskip("tokenizers")
tiktoken = pytest.importorskip("tiktoken")
KINDS: dict[str, dict[str, str]] = {
    "sentencepiece": {"tokenizer_model": "sp.model"},
    "hugging face": {"tokenizer_model": "tokenizer.json"},
    "gpt2": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    **{f"tiktoken {name}": {"tokenizer_model": "ranks.tiktoken", "tiktoken_pattern": name} for name in PATTERNS},
    "bytes": {"tokenizer_type": "ByteLevelTokenizer"},
}
SPELLED = "x<|endoftext|> </s>"


def opened(folder: Path, kind: str) -> Tokenizer:
    """The tokenizer of a kind from the files of a folder."""
    names = KINDS[kind].items()
    plain = ("tokenizer_type", "tiktoken_pattern")
    paths = {key: value if key in plain else str(folder / value) for key, value in names}
    tokenizer = build_tokenizer(DataConfig(**paths), None)
    assert tokenizer is not None
    return tokenizer


def bare(folder: Path, kind: str) -> Callable[[str], list[int]]:
    """The library's ids, with no special tokens."""
    if kind == "sentencepiece":
        return sentencepiece.SentencePieceProcessor(model_file=str(folder / "sp.model")).encode
    if kind.startswith("tiktoken"):
        encoding = tiktoken.Encoding(
            "bare",
            pat_str=PATTERNS[kind.split()[1]],
            mergeable_ranks=ranks_of(folder / "vocab.json"),
            special_tokens={},
        )
        return encoding.encode_ordinary
    if kind == "bytes":
        return lambda text: list(text.encode())
    if kind == "gpt2":
        model = tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        made = tokenizers.Tokenizer(model)
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: made.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_the_library_and_decode_to_the_text(byte_bpe: Path, kind: str) -> None:
    tokenizer, theirs = opened(byte_bpe, kind), bare(byte_bpe, kind)
    texts = [SOURCE, *TEXTS[:40], *AWKWARD, "a" * 5000, " " * 3000 + "x", "\n \t" * 1000, "1" * 3000]
    batch = [list(ids) for ids in tokenizer.encode_batch(texts)]
    assert batch == [tokenizer.encode(text) for text in texts] == [theirs(text) for text in texts]
    assert max(map(max, filter(None, batch))) < tokenizer.vocab_size
    assert list(tokenizer.encode_batch([])) == []
    for text, ids in zip(texts, batch, strict=True):
        if kind != "hugging face" or "<|endoftext|>" not in text:
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["sentencepiece", "hugging face", "gpt2", "tiktoken o200k_base", "bytes"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=ANY_TEXT)
def test_any_text_round_trips(byte_bpe: Path, kind: str, text: str, cache: dict[str, Any]) -> None:
    if kind not in cache:
        cache[kind] = opened(byte_bpe, kind), bare(byte_bpe, kind)
    tokenizer, theirs = cache[kind]
    text = text.replace("\u2581", "")  # SentencePiece's symbol for a space decodes to a space
    assert tokenizer.encode(text) == theirs(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.fixture(scope="module")
def cache() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_ids_surrogates_and_end_of_document(byte_bpe: Path, kind: str) -> None:
    tokenizer = opened(byte_bpe, kind)
    assert tokenizer.decode([*tokenizer.encode("x = 1"), tokenizer.vocab_size, 1 << 40, -1]) == "x = 1"
    with pytest.raises(ConfigError, match=r"half of a surrogate pair at character 1"):
        tokenizer.encode_batch(["fine", "x\ud83d"])
    # Only the caller ends a document, but a tokenizer.json recognises its spelling, as Hugging Face does.
    assert (tokenizer.eod in tokenizer.encode(SPELLED)) == (kind == "hugging face")
    assert len(tokenizer.fingerprint()) == 64 and opened(byte_bpe, kind).fingerprint() == tokenizer.fingerprint()


@pytest.mark.parametrize("kind", ["hugging face", "gpt2", "tiktoken gpt2"])
def test_missing_package_is_named(byte_bpe: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ConfigError, match=r"pip install 'megalite\[tokenizers\]'"):
        opened(byte_bpe, kind)


def test_byte_tokenizer() -> None:
    tokenizer = ByteLevelTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("aé\0") == [97, 0xC3, 0xA9, 0]
    assert all(ids.dtype == np.uint8 for ids in tokenizer.encode_batch([SOURCE, ""]))
    # The end of document is not a byte: a NUL is text.
    assert tokenizer.decode([97, 256, 0, 0xC3, 0xA9, 256, 300, -1]) == "a\0é"
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_number_tokenizer() -> None:
    tokenizer = NullTokenizer(100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert tokenizer.encode_batch([" 5 0\n98 ", ""]) == [[5, 0, 98], []]
    assert tokenizer.decode([5, 0, 98]) == "5 0 98"
    assert tokenizer.fingerprint() != NullTokenizer(101).fingerprint()
    for word in ("x", "-1", "100", "1.5", "²", "9" * 5000):
        with pytest.raises(ConfigError, match="is not a number from 0 to 99"):
            tokenizer.encode_batch(["1", f"1 {word}"])
    for size in (None, 0):
        with pytest.raises(ConfigError, match="needs a vocab_size"):
            NullTokenizer(size)


PLANES = "".join(chr(c) for c in range(0, 0x110000, 17) if not 0xD800 <= c < 0xE000).replace("\u2581", "")
HOSTILE = {
    "empty": "",
    "no spaces": "ab" * 50_000,
    "one capital": "A" * 100_000,
    "spaces": " " * 100_000 + "x",
    "line ends": "\n" * 100_000,
    "mixed space": "\t \n\u00a0" * 25_000 + "x",
    "emoji": "🙂" * 25_000,
    "NULs": "\0" * 100_000,
    "marks": "e" + "\u0301" * 25_000,
    "all planes": PLANES,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "kind",
    ["sentencepiece", "hugging face", "gpt2", "tiktoken gpt2", "tiktoken llama3", "tiktoken o200k_base", "bytes"],
)
def test_hostile_texts_take_linear_time(small_files: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Encoding takes time proportional to the length of a text, and decoding restores it."""
    tokenizer = opened(small_files, kind)
    for name, text in HOSTILE.items():
        assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text, name
    assert "panic" not in capfd.readouterr().err
