"""SentencePiece, Hugging Face and GPT-2: ends of documents, and damaged files."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megalite.config.errors import ConfigError
from megalite.tokenizers.subword import GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer
from tests.tokenizers.test_kinds import bare
from tests.tokenizers.texts import SOURCE, TEXTS

tokenizers = pytest.importorskip("tokenizers")


def test_sentencepiece_end_of_document(files: Path, tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(files / "sp.model")
    assert (tokenizer.vocab_size, tokenizer.eod) == (1000, 2)
    assert tokenizer.decode([*tokenizer.encode("x = 1\n"), tokenizer.eod]) == "x = 1\n"
    assert len(tokenizer.encode("12345")) == 5
    assert len(tokenizer.encode(SOURCE)) < len(SOURCE) / 2
    for content in (b"", b"garbage", b"\x0a\xff\xff\xff\xff\x0f", bytes(100)):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(ConfigError, match=r"bad\.model is not a SentencePiece model"):
            SentencePieceTokenizer(tmp_path / "bad.model")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:5]),
        model_prefix=str(tmp_path / "no_eos"),
        vocab_size=300,
        model_type="bpe",
        eos_id=-1,
        minloglevel=2,
    )
    with pytest.raises(ConfigError, match=r"no_eos\.model has no end-of-sequence piece"):
        SentencePieceTokenizer(tmp_path / "no_eos.model")


def save_words(folder: Path, tokens: list[str], **settings: Any) -> HuggingFaceTokenizer:
    """Write a tokenizer.json of whole words, with tokenizer_config.json if there are settings."""
    model = tokenizers.models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return HuggingFaceTokenizer(folder / "tokenizer.json")


def test_end_of_document_of_a_tokenizer_json(tmp_path: Path) -> None:
    assert save_words(tmp_path, ["<unk>", "x", "</s>", "<eos>"]).eod == 2
    guessed = save_words(tmp_path, ["<unk>", "<eos>", "<|end_of_text|>"])
    assert guessed.eod == 2
    named = save_words(tmp_path, ["<unk>", "<eos>", "<|end_of_text|>"], eos_token={"content": "<eos>"})
    assert named.eod == 1 and named.fingerprint() != guessed.fingerprint()
    same = save_words(tmp_path, ["<unk>", "<eos>", "<|end_of_text|>"], eos_token="<|end_of_text|>")
    assert same.fingerprint() == guessed.fingerprint()
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: eos_token 'zzz' is not in the vocabulary"):
        save_words(tmp_path, ["<unk>"], eos_token="zzz")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not JSON"):
        HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json has none of <\|endo"):
        save_words(tmp_path, ["<unk>"], eos_token=None)


def test_spelled_out_special_token_is_recognized(byte_bpe: Path) -> None:
    """As docs/conversion.md says; the original tokenizer files would treat it as plain text."""
    whole, text = HuggingFaceTokenizer(byte_bpe / "tokenizer.json"), "a<|endoftext|>b"
    assert whole.encode(text) == [*whole.encode("a"), whole.eod, *whole.encode("b")]
    assert whole.decode(whole.encode(text)) == "ab"
    plain = GPT2BPETokenizer(byte_bpe / "vocab.json", byte_bpe / "merges.txt")
    assert plain.eod == whole.eod and plain.decode(plain.encode(text)) == text
    assert plain.decode([plain.eod]) == "<|endoftext|>"


def test_stored_truncation_is_ignored(byte_bpe: Path, tmp_path: Path) -> None:
    stored = tokenizers.Tokenizer.from_file(str(byte_bpe / "tokenizer.json"))
    stored.enable_truncation(5)
    stored.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode(SOURCE)) == SOURCE


def test_damaged_tokenizer_json_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in (b"", b"{", b"{}", b"\xff\xfe", b'{"model": 3}'):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.json is not a Hugging Face tokenizer\.json"):
            HuggingFaceTokenizer(path)
    model = tokenizers.models.WordPiece({"</s>": 0, "x": 1}, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(path))
    tokenizer = HuggingFaceTokenizer(path)
    assert tokenizer.encode("x") == [1]
    with pytest.raises(ConfigError, match=r"tokenizer\.json: the tokenizer fails on a text: .*\[UNK\]"):
        tokenizer.encode("y")


def test_gpt2_words_for_every_character(byte_bpe: Path) -> None:
    """Letters, digits, white space and the rest, split as by the library itself."""
    ours = GPT2BPETokenizer(byte_bpe / "vocab.json", byte_bpe / "merges.txt")
    known = [c for c in map(chr, range(0x10000)) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
    text = "".join(f"a{c}1{c}! " for c in known if not "\u3400" <= c <= "\ud7ff")
    assert ours.encode(text) == bare(byte_bpe, "gpt2")(text)


@pytest.mark.timeout(20)
def test_gpt2_merges(small_bpe: Path) -> None:
    tokenizer = GPT2BPETokenizer(small_bpe / "vocab.json", small_bpe / "merges.txt")
    vocabulary = json.loads((small_bpe / "vocab.json").read_text(encoding="utf-8"))
    names = {i: token for token, i in vocabulary.items()}
    assert [names[i] for i in tokenizer.encode("abcab ab")] == ["abc", "ab", "Ġab"]
    assert [names[i] for i in tokenizer.encode(" abc")] == ["Ġ", "abc"]
    assert tokenizer.eod == 259 and tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"
    assert len(tokenizer.encode("abc" * 100_000)) == 100_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", b"{", r"vocab\.json is not JSON"),
        ("vocab.json", b"\xff", r"vocab\.json is not JSON"),
        ("vocab.json", b"[1]", r"vocab\.json: expected an object of tokens"),
        ("vocab.json", b'{"a": 1, "b": 1}', r"vocab\.json: expected an object of tokens and ids"),
        ("vocab.json", b'{"a": -1}', r"vocab\.json: expected an object of tokens"),
        ("vocab.json", b'{"a": 1}', r"vocab\.json: <\|endoftext\|> is not in the vocabulary"),
        ("vocab.json", b'{"<|endoftext|>": 1}', r"vocab\.json lacks 256 of 256 bytes"),
        ("merges.txt", b"\xff", r"merges\.txt is not the merges\.txt .* give one tokenizer's files"),
        ("merges.txt", b"a b\na b c\n", r"merges\.txt is not"),
        ("merges.txt", b"a b\nx y\n", r"merges\.txt is not .*vocab\.json.*xy"),
    ],
)
def test_damaged_gpt2_files_are_errors(
    small_bpe: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).write_bytes((small_bpe / file).read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
