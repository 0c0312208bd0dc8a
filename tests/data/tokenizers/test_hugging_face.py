import sys
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.data.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megalite.data.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.data.tokenizers.texts import AWKWARD, SOURCE, TEXTS


def test_round_trip(byte_bpe: Path) -> None:
    tokenizer = HuggingFaceTokenizer(byte_bpe / "tokenizer.json")
    for text in (SOURCE, "  two  spaces\n", "日本語"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe", b'{"model": 3}'])
def test_garbled_files(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a Hugging Face tokenizer\.json"):
        HuggingFaceTokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("tokens", "eod"), [(["</s>", "<eos>"], "</s>"), (["<eos>", "<|end_of_text|>"], "<|end_of_text|>")]
)
def test_the_end_of_document(tmp_path: Path, tokens: list[str], eod: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {token: i for i, token in enumerate(["<unk>", "x", *tokens])}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert HuggingFaceTokenizer(tmp_path / "tokenizer.json").eod == vocabulary[eod]


def test_a_file_without_an_end_is_refused(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ConfigError, match=r"tokenizer\.json has no end-of-document token: none of <\|endoftext\|>"
    ):
        HuggingFaceTokenizer(tmp_path / "tokenizer.json")


def test_a_special_token_that_is_spelled_out_is_that_token(byte_bpe: Path) -> None:
    """docs/conversion.md says so: as Hugging Face and Megatron-LM do it; the files it was made of have plain text there."""
    whole, text = HuggingFaceTokenizer(byte_bpe / "tokenizer.json"), "a<|endoftext|>b"
    assert whole.encode(text) == [*whole.encode("a"), whole.eod, *whole.encode("b")]
    assert whole.decode(whole.encode(text)) == "ab"
    plain = GPT2BPETokenizer(byte_bpe / "vocab.json", byte_bpe / "merges.txt")
    assert plain.eod == whole.eod and plain.eod not in plain.encode(text)
    assert plain.decode(plain.encode(text)) == text


def test_stored_truncation_is_ignored(byte_bpe: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    stored = tokenizers.Tokenizer.from_file(str(byte_bpe / "tokenizer.json"))
    stored.enable_truncation(5)
    stored.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode(SOURCE)) == SOURCE


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'megalite\[tokenizers\]'"):
        HuggingFaceTokenizer(tmp_path / "tokenizer.json")


def test_batches_are_the_library_s_ids(byte_bpe: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    bare = tokenizers.Tokenizer.from_file(str(byte_bpe / "tokenizer.json"))
    texts = [*TEXTS, SOURCE, *AWKWARD]
    tokenizer = HuggingFaceTokenizer(byte_bpe / "tokenizer.json")
    assert tokenizer.encode_batch(texts) == [bare.encode(text).ids for text in texts]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_half_a_surrogate_pair_is_refused(byte_bpe: Path) -> None:
    with pytest.raises(ConfigError, match="half of a surrogate pair"):
        HuggingFaceTokenizer(byte_bpe / "tokenizer.json").encode_batch(["fine", "\ud800"])


def test_a_tokenizer_that_fails_on_a_text(tmp_path: Path) -> None:
    """It opens, and has no unknown token for a text that needs one."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordPiece({"</s>": 0, "x": 1}, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode("x") == [1]
    with pytest.raises(ConfigError, match=r"tokenizer\.json: the tokenizer fails on a text: .*\[UNK\]"):
        tokenizer.encode("y")


def test_ids_beyond_the_vocabulary_have_no_text(byte_bpe: Path) -> None:
    tokenizer = HuggingFaceTokenizer(byte_bpe / "tokenizer.json")
    assert tokenizer.decode([*tokenizer.encode("x = 1"), 1500, 1 << 40, -1]) == "x = 1"
