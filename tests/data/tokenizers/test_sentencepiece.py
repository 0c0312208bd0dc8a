from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.errors import ConfigError
from megalite.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from tests.data.tokenizers.texts import AWKWARD, SOURCE, TEXTS

# SentencePiece's own sign for a space decodes to one.
UNICODE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=60)


def test_source_code_survives(files: Path) -> None:
    tokenizer = SentencePieceTokenizer(files / "sp.model")
    for text in [SOURCE, *TEXTS, *AWKWARD]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(SOURCE)) < len(SOURCE) / 2
    assert tokenizer.vocab_size == 1000 and max(tokenizer.encode(SOURCE)) < 1000


@settings(max_examples=200, deadline=None)
@given(text=UNICODE)
def test_any_text_survives(files: Path, text: str) -> None:
    tokenizer = SentencePieceTokenizer(files / "sp.model")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_eod_is_no_part_of_any_text(files: Path) -> None:
    tokenizer = SentencePieceTokenizer(files / "sp.model")
    assert tokenizer.eod == 2
    assert tokenizer.eod not in tokenizer.encode("</s> " + SOURCE)
    assert tokenizer.decode([*tokenizer.encode("x = 1\n"), tokenizer.eod]) == "x = 1\n"


def test_digits_are_single_pieces(files: Path) -> None:
    tokenizer = SentencePieceTokenizer(files / "sp.model")
    assert len(tokenizer.encode("12345")) == 5


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x0a\xff\xff\xff\xff\x0f", bytes(100)])
def test_garbled_models(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.model").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.model is not a SentencePiece model"):
        SentencePieceTokenizer(tmp_path / "bad.model")


def test_batches_are_the_library_s_ids(files: Path) -> None:
    bare = sentencepiece.SentencePieceProcessor(model_file=str(files / "sp.model"))
    texts = [*TEXTS, SOURCE, *AWKWARD]
    tokenizer = SentencePieceTokenizer(files / "sp.model")
    assert tokenizer.encode_batch(texts) == [bare.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_half_a_surrogate_pair_is_refused(files: Path) -> None:
    with pytest.raises(ConfigError, match=r"half of a surrogate pair \(U\+D83D\) at character 1"):
        SentencePieceTokenizer(files / "sp.model").encode_batch(["fine", "x\ud83d"])


def test_ids_beyond_the_vocabulary_have_no_text(files: Path) -> None:
    tokenizer = SentencePieceTokenizer(files / "sp.model")
    assert tokenizer.decode([*tokenizer.encode("x = 1"), 1000, 1 << 40, -1]) == "x = 1"
