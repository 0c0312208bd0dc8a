import numpy as np
import pytest
from hypothesis import given, settings

from megalite.config.errors import ConfigError
from megalite.data.tokenizers.byte_level import ByteLevelTokenizer
from tests.data.tokenizers.texts import ANY_TEXT, AWKWARD, SOURCE

TOKENIZER = ByteLevelTokenizer()


def test_bytes() -> None:
    assert (TOKENIZER.vocab_size, TOKENIZER.eod) == (257, 256)
    assert TOKENIZER.encode("aé\0") == [97, 0xC3, 0xA9, 0]
    # The end of document is no byte: a NUL is text.
    assert TOKENIZER.decode([97, 256, 0, 0xC3, 0xA9, 256, 300, -1]) == "a\0é"
    assert TOKENIZER.decode([0xC3]) == "\ufffd"


@settings(max_examples=200, deadline=None)
@given(text=ANY_TEXT)
def test_any_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_batches() -> None:
    texts = [SOURCE, *AWKWARD]
    batch = TOKENIZER.encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [TOKENIZER.encode(text) for text in texts]
    assert all(ids.dtype == np.uint8 for ids in batch)
    with pytest.raises(ConfigError, match="half of a surrogate pair"):
        TOKENIZER.encode_batch(["fine", "\udfff"])


def test_one_fingerprint() -> None:
    assert TOKENIZER.fingerprint() == ByteLevelTokenizer().fingerprint()
    assert len(TOKENIZER.fingerprint()) == 64
