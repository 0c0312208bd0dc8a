import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from megalite.config.errors import ConfigError
from megalite.data.tokenizers.gpt2_bpe import GPT2BPETokenizer
from tests.data.tokenizers.texts import ANY_TEXT, AWKWARD, SOURCE, TEXTS


def library(folder: Path) -> Any:
    """The same BPE in the tokenizers library, where nothing is a special token."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def test_ids_are_the_library_s(byte_bpe: Path) -> None:
    theirs, ours = library(byte_bpe), GPT2BPETokenizer(byte_bpe / "vocab.json", byte_bpe / "merges.txt")
    rng = random.Random(1)
    runs = [
        "".join(rng.choices("abcdeé日", k=5000)),
        "a" * 5000,
        " " * 3000 + "x",
        "\n \t" * 1000,
        "1" * 3000,
    ]
    spelled = ["<|endoftext|>", "x<|endoftext|> y"]
    texts = [SOURCE, *TEXTS, *AWKWARD, *runs, *spelled]
    ids = [encoding.ids for encoding in theirs.encode_batch(texts)]
    assert ours.encode_batch(texts) == ids
    assert [ours.encode(text) for text in texts] == ids
    assert all(ours.eod not in ours.encode(text) for text in spelled)
    assert ours.encode_batch([]) == []


def test_every_character_falls_into_the_same_words(byte_bpe: Path) -> None:
    """Letters, digits, white space and the rest, as the tables of two libraries have them."""
    theirs, ours = library(byte_bpe), GPT2BPETokenizer(byte_bpe / "vocab.json", byte_bpe / "merges.txt")
    known = [c for c in map(chr, range(0x10000)) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
    text = "".join(f"a{c}1{c}! " for c in known if not "\u3400" <= c <= "\ud7ff")
    assert ours.encode(text) == theirs.encode(text).ids


@pytest.fixture(scope="module")
def both(byte_bpe: Path) -> tuple[Any, GPT2BPETokenizer]:
    return library(byte_bpe), GPT2BPETokenizer(byte_bpe / "vocab.json", byte_bpe / "merges.txt")


@settings(max_examples=300, deadline=None)
@given(text=ANY_TEXT)
def test_any_text_has_the_library_s_ids(both: tuple[Any, GPT2BPETokenizer], text: str) -> None:
    theirs, ours = both
    assert ours.encode(text) == theirs.encode(text).ids
    assert ours.decode(ours.encode(text)) == text


def test_half_a_surrogate_pair_is_refused(small_bpe: Path) -> None:
    tokenizer = GPT2BPETokenizer(small_bpe / "vocab.json", small_bpe / "merges.txt")
    with pytest.raises(ConfigError, match="half of a surrogate pair"):
        tokenizer.encode_batch(["fine", "\ud800"])


def test_merges_in_order(small_bpe: Path) -> None:
    tokenizer = GPT2BPETokenizer(small_bpe / "vocab.json", small_bpe / "merges.txt")
    names = {
        i: token for token, i in json.loads((small_bpe / "vocab.json").read_text(encoding="utf-8")).items()
    }
    assert [names[i] for i in tokenizer.encode("abcab ab")] == ["abc", "ab", "Ġab"]
    assert [names[i] for i in tokenizer.encode(" abc")] == ["Ġ", "abc"]


def test_every_text_survives(small_bpe: Path) -> None:
    tokenizer = GPT2BPETokenizer(small_bpe / "vocab.json", small_bpe / "merges.txt")
    for text in [SOURCE, *AWKWARD]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_end_of_document_cannot_be_spelled(small_bpe: Path) -> None:
    tokenizer = GPT2BPETokenizer(small_bpe / "vocab.json", small_bpe / "merges.txt")
    assert tokenizer.eod == 259 and tokenizer.eod not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def test_broken_bytes_decode_to_a_replacement(small_bpe: Path) -> None:
    tokenizer = GPT2BPETokenizer(small_bpe / "vocab.json", small_bpe / "merges.txt")
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


@pytest.mark.timeout(20)
def test_a_long_word_is_no_trap(small_bpe: Path) -> None:
    tokenizer = GPT2BPETokenizer(small_bpe / "vocab.json", small_bpe / "merges.txt")
    assert len(tokenizer.encode("abc" * 100_000)) == 100_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", b"{", r"vocab\.json is not JSON"),
        ("vocab.json", b"\xff", r"vocab\.json is not JSON"),
        ("vocab.json", b"[" * 100_000, r"vocab\.json is not JSON"),
        ("vocab.json", b"[1]", r"vocab\.json: expected an object of tokens"),
        (
            "vocab.json",
            b'{"a": 1, "b": 1}',
            r"vocab\.json: expected an object of tokens with different ids",
        ),
        ("vocab.json", b'{"a": true}', r"vocab\.json: expected an object of tokens"),
        ("vocab.json", b'{"a": -1}', r"vocab\.json: expected an object of tokens"),
        ("vocab.json", b'{"a": 1}', r"vocab\.json: <\|endoftext\|> is not in the vocabulary"),
        ("vocab.json", b'{"<|endoftext|>": 1}', r"vocab\.json: 256 of the 256 byte symbols are missing"),
        ("merges.txt", b"\xff", r"merges\.txt is not UTF-8"),
        ("merges.txt", b"a b\na b c\n", r"merges\.txt:2: expected two symbols.*'a b c'"),
        ("merges.txt", b"a b\nx y\n", r"merges\.txt:2: 'xy' is not in .*vocab\.json"),
    ],
)
def test_garbled_files(small_bpe: Path, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).write_bytes((small_bpe / file).read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
